"""What other engines record gives the trace that was written, told by its content; anything else one clear line."""

import base64
import io
import json
import pickle
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
from foreign_traces import (
    llama_text,
    scheduled,
    sglang_records,
    token_text,
    vllm_responses,
    write_flame,
    write_npz,
    write_sglang,
)
from trace_samples import make_trace

from hotset.errors import TraceError
from hotset.trace import Phase
from hotset.trace.combine import interleave
from hotset.trace.importers import import_trace


def same_routing(found, trace, *names):
    for name in ("experts", "request", "step", "phase", *names):
        np.testing.assert_array_equal(getattr(found, name), getattr(trace, name), name)


def refused(path, message, **options):
    with pytest.raises(TraceError, match=message) as caught:
        import_trace(path, **options)
    assert path.name in str(caught.value)
    assert "\n" not in str(caught.value)


def written(path, data):
    path.write_bytes(data) if isinstance(data, bytes) else path.write_text(data)
    return path


# vLLM


@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize("layout", ["lines", "list", "indented"])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.txt"])
def test_vllm(tmp_path, trace, encoded, layout, name):
    responses = list(vllm_responses(trace, encoded=encoded))
    text = {
        "lines": "\n".join(map(json.dumps, responses)),
        "list": json.dumps(responses),
        "indented": json.dumps(responses, indent=2),
    }[layout]
    found = import_trace(written(tmp_path / name, text), experts=8)
    same_routing(found, trace)
    assert found.meta["model"] == "tiny/moe"
    assert [label["name"] for label in found.labels] == ["cmpl-0", "cmpl-1", "cmpl-2"]


def test_vllm_one_response_of_several_choices_has_its_prompt_once(tmp_path):
    trace = make_trace(lengths=(5, 5))
    one, two = vllm_responses(trace)
    one["choices"] += two["choices"]
    found = import_trace(written(tmp_path / "a.json", json.dumps(one)))
    assert np.bincount(found.request).tolist() == [5, 3]
    assert found.count(Phase.PREFILL) == 2
    assert found.labels[1] == {"name": "cmpl-0", "choice": "1"}


def test_vllm_tokens_of_a_prefix_cache_and_dense_layers_are_left_out(tmp_path, trace):
    response = next(vllm_responses(trace))
    grid = np.zeros((5, 4, 2), int)
    grid[:, 1:] = trace.experts[:5]
    grid[0] = -1
    response |= {"prompt_routed_experts": None}
    response["choices"][0]["routed_experts"] = grid.tolist()
    found = import_trace(written(tmp_path / "a.json", json.dumps(response)), experts=8)
    np.testing.assert_array_equal(found.experts, trace.experts[1:5])
    assert found.meta["layer_ids"] == "1,2,3"
    assert found.phase.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[[1, 2], [3]]], "not nested lists of one shape"),
        ([[[1, 2], [3, 4]], [[5, 6]]], "not nested lists of one shape"),
        ([[[]]], "not nested lists of whole numbers"),
        ([[[1, 99999999999999999999]]], "out of range"),
        ([[[1, -7]]], "expert -7, which is out of range"),
        ([[[1, 1]]], "same expert twice"),
        ([[[0, 0]]], "zero throughout"),
        ([[[1.5, 2]]], "neither nested lists"),
        ([[["a"]]], "neither nested lists"),
        ([1], "neither nested lists"),
        ({}, "neither nested lists"),
        ("nested list 0", "not base64"),
        ("!!", "not base64"),
        (base64.b64encode(b"some bytes").decode(), "does not start as a numpy array"),
        (None, "holds no routed_experts"),
        ([], "holds no routed_experts"),
    ],
)
def test_vllm_faults(tmp_path, value, message):
    document = {"id": "a", "choices": [{"routed_experts": value}]}
    refused(written(tmp_path / "a.json", json.dumps(document)), message)


def npy(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (npy(np.zeros((4, 3), np.uint8)), r"not whole numbers \[tokens, layers, top_k\]"),
        (npy(np.zeros((4, 3, 2))), "not whole numbers"),
        (npy(np.zeros((4, 3, 2), np.uint8))[:-3], "which is not the size of its data"),
        (npy(np.array([{}], object), allow_pickle=True), "not plain numbers"),
    ],
)
def test_vllm_arrays_that_lie(tmp_path, data, message):
    document = {"choices": [{"routed_experts": base64.b64encode(data).decode()}]}
    refused(written(tmp_path / "a.json", json.dumps(document)), message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"choices": ', "the file is not valid JSON"),
        ('{"choices": []}\n{"choices": [}', "line 2 is not valid JSON"),
        ('{"choices": 3}', "no list of choices"),
        ('[{"choices": []}, 3]', "must be a JSON object"),
        ('{"choices": [' + "[" * 200_000, "not valid JSON"),
        ('{"choices": [3, null, {"routed_experts": null}]}', "holds no routed_experts"),
    ],
)
def test_vllm_documents_that_are_none(tmp_path, text, message):
    refused(written(tmp_path / "a.json", text), message)


def test_vllm_usage_that_does_not_fit(tmp_path, trace):
    response = next(vllm_responses(trace, encoded=True))
    response["usage"]["completion_tokens"] = 2
    refused(written(tmp_path / "a.json", json.dumps(response)), "holds 5 tokens, but usage says 2 of a prompt and 2")


# SGLang


def varied_prompts(prompts=(3, 11, 20, 5, 13, 22), answers=(6, 4, 5, 7, 1, 3)):
    lengths = [sum(both) for both in zip(prompts, answers, strict=True)]
    phase = np.concatenate([np.arange(length) >= prompt for length, prompt in zip(lengths, prompts, strict=True)])
    return make_trace(tuple(lengths), phase=phase.astype(np.uint8))


@pytest.mark.parametrize("streams", [1, 2, 3])
@pytest.mark.parametrize("pieces", [1, 3])
def test_sglang(tmp_path, streams, pieces):
    pytest.importorskip("torch")
    trace = scheduled(varied_prompts(), streams, pieces)
    found = import_trace(write_sglang(tmp_path / "a.pt", trace))
    np.testing.assert_array_equal(found.experts, trace.experts)
    np.testing.assert_array_equal(found.token_ids, trace.token_ids)
    np.testing.assert_array_equal(found.phase, trace.phase)
    np.testing.assert_array_equal(found.step, trace.step)
    np.testing.assert_array_equal(found.request, trace.request)
    assert found.meta["layer_ids"] == "1,2,3"
    assert "experts_guessed" not in found.meta


def test_sglang_mixed_pass(tmp_path, trace):
    torch = pytest.importorskip("torch")
    passes = [([0, 1], None, 1), ([2, 2, 3], [2, 1], 3), ([4, 3], None, 2)]
    positions = [[0, 1], [0, 1, 2], [3, 2]]
    records = [
        {
            "forward_pass_id": 9 - number, "input_ids": tokens, "positions": positions[number],
            "extend_seq_lens": lengths, "forward_mode": mode,
            "topk_ids_of_layer": torch.arange(4 * len(tokens) * 2).reshape(4, len(tokens), 2),
        }
        for number, (tokens, lengths, mode) in enumerate(passes)
    ][::-1]  # fmt: skip
    for number, record in enumerate(records):
        record["forward_pass_id"] = 9 - number
    records[-1]["extend_seq_lens"] = [2]
    found = import_trace(write_sglang(tmp_path / "a.pt", trace, records=records, last_physical_to_logical_map=None))
    assert found.request.tolist() == [0, 0, 1, 1, 0, 0, 1]
    assert found.phase.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert found.step.tolist() == [0, 0, 1, 1, 1, 2, 2]


def test_sglang_copies_are_numbered_as_the_model_numbers_them(tmp_path, trace):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    table = np.stack([rng.permutation(np.repeat(np.arange(8), 2)) for _ in range(4)])
    records = list(sglang_records(trace))
    for record in records:
        ids = record["topk_ids_of_layer"].numpy()
        for layer, token, k in np.argwhere(ids >= 0):
            ids[layer, token, k] = rng.choice(np.flatnonzero(table[layer] == ids[layer, token, k]))
    path = write_sglang(tmp_path / "a.pt", trace, records=records, last_physical_to_logical_map=torch.from_numpy(table))
    np.testing.assert_array_equal(import_trace(path).experts, trace.experts)


def broken(made, **changes):
    records = list(sglang_records(made.trace))
    records[1] |= changes
    return {"records": records}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"records": [{"global_physical_count": 1, "forward_pass_id": 0}]}, "counts, not tokens"),
        (lambda made: {"logical_count": made.torch.zeros(3)}, "holds counts, not tokens: record with"),
        ({"records": 3}, "no recording of SGLang"),
        ({"records": []}, "nothing was recorded"),
        (lambda made: broken(made, input_ids=[1, 2, 3]), "forward pass 101: topk_ids_of_layer is no tensor of"),
        (lambda made: broken(made, input_ids=["a"]), "input_ids must be a list of whole numbers"),
        (lambda made: broken(made, positions=[-1]), "positions must be a list of whole numbers"),
        (lambda made: broken(made, positions=[1, 2]), "2 positions for 1 tokens"),
        (lambda made: broken(made, forward_mode="decode"), "forward_mode must be a whole number"),
        (lambda made: broken(made, forward_mode=5), "forward pass 101: forward_mode 5 is neither a prompt nor plain"),
        (lambda made: broken(made, forward_mode=1, extend_seq_lens=[4]), "adds up to 4 tokens, not to 1"),
        (lambda made: broken(made, topk_ids_of_layer=made.torch.zeros(4, 1, 0)), "is no tensor of"),
        (lambda made: broken(made, topk_ids_of_layer=made.torch.zeros(4, 1, 2)), "not whole numbers"),
        (lambda made: broken(made, topk_ids_of_layer=made.torch.full((4, 1, 2), 70000)), "out of range"),
        (
            lambda made: broken(made, topk_ids_of_layer=made.torch.zeros(8, 1, 4).int()[::2, :, ::2]),
            "not lie in one piece",
        ),
        (lambda made: {"last_physical_to_logical_map": made.torch.zeros(3, 8).long()}, "of another model"),
        (lambda made: {"last_physical_to_logical_map": made.torch.full((4, 8), -1)}, "experts that no model has"),
    ],
)
def test_sglang_faults(tmp_path, trace, change, message):
    made = SimpleNamespace(trace=trace, torch=pytest.importorskip("torch"))
    refused(write_sglang(tmp_path / "a.pt", trace, **(change if isinstance(change, dict) else change(made))), message)


class Evil:
    """What a pickle can do to whom unpickles it."""

    ran = False

    def __reduce__(self):
        return exec, ("import test_other_recorders as own; own.Evil.ran = True",)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("value", [Evil(), {"records": [Evil()]}, {"records": [], 3: Evil}, np.zeros(3), slice(3), {3}])
def test_nothing_in_a_pickle_is_run(tmp_path, protocol, value):
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps(value, protocol))
    refused(path, "it is not read|not a file of torch.save|no recording|nothing was recorded|no dictionary")
    assert not Evil.ran


def test_a_pickle_by_itself_is_refused(tmp_path):
    refused(written(tmp_path / "a.pt", pickle.dumps({"records": []})), "not a file of torch.save")


def test_sglang_records_that_share_a_tensor_are_no_way_to_fill_memory(tmp_path, trace):
    torch = pytest.importorskip("torch")
    record = next(iter(sglang_records(trace)))
    tokens = 20_000
    record |= {"topk_ids_of_layer": torch.zeros(4, tokens, 2).int(), "input_ids": [1] * tokens}
    record |= {"positions": [0] * tokens, "extend_seq_lens": [tokens]}
    path = write_sglang(tmp_path / "a.pt", trace, records=[record] * 300)
    refused(path, "more tokens than the file has bytes for")


def test_sglang_numbers_of_another_byte_order(tmp_path, trace):
    pytest.importorskip("torch")
    path = write_sglang(tmp_path / "a.pt", trace)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, b"big" if name.endswith("byteorder") else data)
    refused(path, "big-endian")


# llama-moe-trace


def test_llama_csv(tmp_path, trace):
    found = import_trace(written(tmp_path / "a.csv", llama_text(trace)))
    same_routing(found, trace)
    assert found.meta["layer_ids"] == "1,2,3"


def test_llama_csv_with_a_last_layer_that_computes_the_last_token_of_a_prompt(tmp_path, trace):
    found = import_trace(written(tmp_path / "a.csv", llama_text(trace, last_layer_of_prompts=False)))
    wanted = trace.experts.copy()
    wanted[[0, 5, 8], 2] = -1
    np.testing.assert_array_equal(found.experts, wanted)


def test_llama_csv_with_a_prompt_in_pieces_that_repeat_positions(tmp_path):
    rows = ["-2,0,1,2", "-1,0,3,4", "-2,1,1,2", "-1,1,3,4", "-2,0,5,6", "-1,0,7,0", "-2,1,5,6", "-1,1,7,0"]
    found = import_trace(written(tmp_path / "a.csv", "\n".join([*rows, "0,0,1,2", "0,1,3,4", "1,0,1,2", "1,1,3,4"])))
    assert found.step.tolist() == [0, 0, 1, 1, 2, 3]
    assert found.requests == 1
    assert found.experts[:, 0].tolist() == [[1, 2], [3, 4], [5, 6], [7, 0], [1, 2], [1, 2]]


def test_llama_csv_of_a_single_layer(tmp_path):
    text = "-2,5,1,2\n-1,5,3,4\n0,5,1,2\n1,5,3,4\n0,5,1,2\n"
    found = import_trace(written(tmp_path / "a.csv", text))
    assert found.step.tolist() == [0, 0, 1, 2, 3]
    assert found.request.tolist() == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,0,1,2\n0,1,3\n", "line 2 is not numbers, as many as in the lines before"),
        ("0,0,1,2\n0,1,3,x\n", "line 2 is not numbers"),
        ("0,0,1,2\n0.5,1,3,4\n", "line 2: the position 0.5 is not a whole number"),
        ("0,0,0,17\n0,0,0,4\n0,0,1,3\n", "line 2 repeats a position and layer: if these are request, token, layer"),
        ("0,0,1,2\n0,1,3,-1\n", "line 2: expert -1 is not a whole number"),
        ("0,0,1,2\n0,9999,3,1\n", "line 2: layer 9999 is not"),
        ("0,0,1,1\n", "same expert twice"),
        ("0,0,1,2\n0,1,1,2\n1,0,1,2\n", "position 1 lacks layer 1"),
        ("0,0,1,2\nnan,1,3,4\n", "line 2: the position nan"),
        ("0,0,1,2\n" + "1," * 200_000, "longer than"),
    ],
)
def test_llama_csv_faults(tmp_path, text, message):
    refused(written(tmp_path / "a.csv", text), message)


def test_llama_csv_needs_an_expert(tmp_path):
    refused(written(tmp_path / "a.csv", "0,0\n"), "at least one expert", kind="llama_csv")


# A plain CSV


FULL = ("layer", "expert", "weight", "request", "token", "phase", "token_id")


def test_token_csv_as_it_is(tmp_path):
    trace = make_trace(prompt=0)
    found = import_trace(written(tmp_path / "a.csv", token_text(trace)))
    same_routing(found, trace)
    assert found.weights is None
    assert found.labels == ()


def test_token_csv_with_all_columns(tmp_path, trace):
    found = import_trace(written(tmp_path / "a.csv", token_text(trace, FULL)))
    same_routing(found, trace, "weights", "token_ids")


def test_token_csv_with_steps_of_several_requests(tmp_path):
    trace = interleave(make_trace(), 2)
    found = import_trace(written(tmp_path / "a.csv", token_text(trace, (*FULL, "step"))))
    same_routing(found, trace, "token_ids")


def test_token_csv_in_any_order_and_with_other_request_numbers(tmp_path, trace):
    header, *rows = token_text(trace, FULL, lambda number: 90 - 7 * number).splitlines()
    found = import_trace(written(tmp_path / "a.csv", "\r\n".join([f"\ufeff{header.upper()}", *rows])))
    same_routing(found, trace, "token_ids")
    assert [label["name"] for label in found.labels] == ["90", "83", "76"]
    by_layer = sorted(rows, key=lambda row: int(row.split(",")[0]))
    same_routing(import_trace(written(tmp_path / "b.csv", "\n".join([header, *by_layer]))), trace)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("request,token,layer,expert\n", "holds no rows"),
        ("request,token,layer,expert\n0,0,0\n", "line 2 is not 4 numbers"),
        ("request,token,layer,expert\n0,0,0,a\n", "line 2 is not 4 numbers"),
        ("request,token,layer,expert\n0,0,0,-1\n", "line 2: expert -1 is not"),
        ("request,token,layer,expert\n0,0,0,1\n0,0,0,1\n", "same expert twice"),
        ("request,token,layer,expert\n0,0,0,1\n0,0,1,1\n0,1,0,1\n", "token 1 lacks layer 1"),
        ("request,token,layer,expert,token\n0,0,0,1,0\n", "names a column twice"),
        ("request,token,layer,expert,phase\n0,0,0,1,0\n0,0,0,2,1\n", "line 3: another row .* another phase"),
        ("request,token,layer,expert,weight\n0,0,0,1,nan\n", "line 2: the weight is not a number"),
        ("request,token,layer,expert,weight\n0,0,0,1,-1\n", "line 2: the weight -1"),
    ],
)
def test_token_csv_faults(tmp_path, text, message):
    refused(written(tmp_path / "a.csv", text), message)


def test_token_csv_says_which_column_it_lacks(tmp_path):
    refused(written(tmp_path / "a.csv", "request,token,layer\n0,0,0\n"), "lacks the column 'expert'", kind="token_csv")
    refused(written(tmp_path / "b.csv", "\n"), "no line names the columns", kind="token_csv")


# FLAME-MoE


@pytest.mark.parametrize("text", ["request;token;layer;expert\n0;0;0;1\n", "0,0,0,1\n0,0,0,2\n", "a,0,0,1\n", ""])
def test_a_csv_that_is_none_of_ours_names_the_columns(tmp_path, text):
    refused(written(tmp_path / "a.csv", text), "begin the file with request,token,layer,expert")


@pytest.mark.parametrize("samples", [True, False])
def test_flame(tmp_path, trace, samples):
    pytest.importorskip("pyarrow")
    found = import_trace(write_flame(tmp_path, trace, samples=samples), experts=8, request_tokens=5)
    np.testing.assert_array_equal(found.experts, trace.experts)
    np.testing.assert_array_equal(found.weights, trace.weights)
    assert (found.token_ids is not None) == samples
    assert not samples or found.token_ids.tolist() == trace.token_ids.tolist()
    assert found.request.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert found.count(Phase.DECODE) == found.steps == 15
    assert found.meta["layer_ids"] == "2,3,4"


def test_flame_first_tokens_of_a_file_of_another_name(tmp_path, trace):
    pytest.importorskip("pyarrow")
    path = write_flame(tmp_path, trace)
    assert import_trace(path, first=4).tokens == 4
    alone = path.rename(tmp_path / "some.parquet")
    found = import_trace(alone, first=7)
    assert found.experts.tolist() == trace.experts[:7, :1].tolist()
    assert (found.requests, found.token_ids) == (1, None)


def test_flame_faults(tmp_path, trace):
    pa = pytest.importorskip("pyarrow")
    path = write_flame(tmp_path / "a", trace, layer1={"indices": pa.array([[1, 2], [3]] + [[1, 2]] * 13)})
    refused(path, "layer_03.parquet: indices is list.*not numbers or lists of numbers of one length")
    refused(
        write_flame(tmp_path / "b", trace, layer0={"scores": pa.array(["x"] * 15)}),
        "layer_02.parquet: scores is string, not numbers",
    )
    path = write_flame(tmp_path / "c", trace)
    (path.parent / "layer_03.parquet").unlink()
    (path.parent / "layer_04.parquet").write_bytes(write_flame(tmp_path / "d", make_trace((9,))).read_bytes())
    refused(path, "15 tokens and top 2 and 9 tokens and top 2 in layer_04.parquet.*: all must be of one checkpoint")
    (path.parent / "layer_04.parquet").write_bytes(b"PAR1")
    refused(path, "is not a parquet file, or it is damaged: ")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    refused(path, "is not a parquet file, or it is damaged: ")


def test_flame_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    refused(written(tmp_path / "layer_02.parquet", b"PAR1"), r"pip install 'hotset\[parquet\]'")


# Which is which


def test_content_tells_files_of_one_suffix_apart(tmp_path, trace):
    pytest.importorskip("torch")
    for path in (
        written(tmp_path / "x.csv", llama_text(trace)),
        written(tmp_path / "y.csv", token_text(trace, FULL)),
        written(tmp_path / "z.data", token_text(trace, FULL)),
        write_sglang(tmp_path / "w.npz", trace),
    ):
        same_routing(import_trace(path), trace)
    moved = write_npz(tmp_path / "v.npz", trace).rename(tmp_path / "v.pt")
    same_routing(import_trace(moved), trace)


def test_first_tokens_only(tmp_path, trace):
    found = import_trace(write_npz(tmp_path / "a.npz", trace), first=6)
    assert (found.tokens, found.requests) == (6, 2)
    assert import_trace(tmp_path / "a.npz", first=99).tokens == 15
    with pytest.raises(TraceError, match="the number of tokens to import"):
        import_trace(tmp_path / "a.npz", first=0)

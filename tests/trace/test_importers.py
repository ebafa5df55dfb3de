"""Importers give the trace that was written, and one clear line for anything else."""

import json
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
from foreign_traces import csv_text, json_rows, json_text, write_npz
from trace_samples import make_trace

from hotset.errors import TraceError
from hotset.trace import Phase
from hotset.trace.importers import import_trace, kinds


def assert_same_routing(found, trace):
    for name in ("experts", "request", "step", "phase"):
        assert np.array_equal(getattr(found, name), getattr(trace, name)), name


def test_kinds_are_found_by_file():
    assert kinds() == ("flame", "jsonl", "llama_csv", "npz", "route_csv", "sglang", "token_csv", "vllm")


def test_npz_round_trip(tmp_path, trace):
    path = write_npz(tmp_path / "a.npz", trace)
    found = import_trace(path, expert_bytes=7, model="m")
    assert_same_routing(found, trace)
    assert np.array_equal(found.weights, trace.weights)
    assert np.array_equal(found.token_ids, trace.token_ids)
    assert found.shape.expert_bytes == 7
    assert found.meta == {"source": "a.npz", "model": "m", "experts_guessed": "8"}


def test_npz_experts_option_is_no_guess(tmp_path, trace):
    found = import_trace(write_npz(tmp_path / "a.npz", trace), experts=100)
    assert found.shape.experts == 100
    assert "experts_guessed" not in found.meta


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64, ">u2"])
def test_npz_marker_of_every_width(tmp_path, trace, dtype):
    ids = trace.experts.astype(dtype)
    ids[0, 1] = np.iinfo(dtype).max
    found = import_trace(write_npz(tmp_path / "a.npz", trace, experts=ids))
    assert (found.experts[0, 1] == -1).all()
    assert (found.weights[0, 1] == 0).all()
    assert np.array_equal(found.experts[1:], trace.experts[1:])


def test_npz_without_phase_is_all_decode(tmp_path, trace):
    found = import_trace(write_npz(tmp_path / "a.npz", trace, phase=None))
    assert found.count(Phase.DECODE) == found.tokens == found.steps


def test_npz_weights_u8_and_fortran_order(tmp_path, trace):
    shares = np.full(trace.experts.shape, 51, np.uint8)
    ids = np.asfortranarray(trace.experts.astype(np.uint8))
    found = import_trace(write_npz(tmp_path / "a.npz", trace, weights=None, weights_u8=shares, experts=ids))
    assert (found.weights == np.float16(0.2)).all()
    assert_same_routing(found, trace)


def test_npz_labels_beside_it(tmp_path, trace):
    path = write_npz(tmp_path / "a.npz", trace)
    records = [{"kind": "x", "n": 3, "done": True, "more": [1], "none": None}] * 3
    (tmp_path / "a.requests.json").write_text(json.dumps(records))
    assert import_trace(path).labels == ({"kind": "x", "n": "3", "done": "True"},) * 3
    (tmp_path / "a.requests.json").write_text(json.dumps(records[:2]))
    with pytest.raises(TraceError, match="describes 2 requests"):
        import_trace(path)
    (tmp_path / "a.requests.json").write_text("[" * 100_000)
    with pytest.raises(TraceError, match="not valid JSON"):
        import_trace(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": None}, "no array 'experts'"),
        ({"req_len": None}, "no array 'req_len'"),
        ({"req_len": np.array([5, 3])}, "adds up to 8"),
        ({"req_len": np.array([15, 0])}, "request 1 a length of 0"),
        ({"req_len": np.array([16, -1])}, "request 0 a length of 16"),
        ({"req_len": np.array([2**64 - 1, 16], np.uint64)}, "a length of 18446744073709551615"),
        ({"req_len": np.array([15.0])}, "whole numbers"),
        ({"experts": np.zeros((0, 3, 2), np.uint8)}, "not unsigned"),
        ({"experts": np.zeros((15, 3, 2), np.int8)}, "not unsigned"),
        ({"experts": np.zeros((15, 3, 2), np.uint8)}, "same expert twice"),
        ({"experts": np.full((15, 3, 2), 40000, np.uint16)}, "40000 is out of range"),
        ({"phase": np.full(15, 2, np.uint8)}, "phase must be 0"),
        ({"phase": np.zeros(14, np.uint8)}, "one whole number per token"),
        ({"weights": np.full((15, 3, 2), np.nan)}, "weight is negative, infinite or not a number"),
        ({"weights": np.full((15, 3, 2), 1e30)}, "weight is negative, infinite or not a number"),
        ({"weights": np.full((15, 3, 2), -1.0)}, "weight is negative, infinite or not a number"),
        ({"weights": np.zeros((15, 3))}, "does not go with experts"),
        ({"tok": np.full(15, -1)}, "token id"),
        ({"layer_ids": np.arange(2)}, "one whole number per layer"),
        ({"experts": np.array([{}], object)}, "not plain numbers"),
    ],
)
def test_npz_faults(tmp_path, trace, changes, message):
    path = write_npz(tmp_path / "bad.npz", trace, **changes)
    with pytest.raises(TraceError, match=message) as caught:
        import_trace(path)
    assert "bad.npz" in str(caught.value)
    assert "\n" not in str(caught.value)


def write_zip(path, name, data, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr(name, data)
    return path


def npy_bytes(header, data=b"", version=1):
    text = header.encode()
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + data


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '|u1', 'fortran_order': False, 'shape': (1099511627776, 9, 9)}",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (-1, -9, 1)}",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1, 1, 1)}",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (1L, 1, 1)}",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (True, 1, 9)}",
        "{'descr': [('a', '|u1')], 'fortran_order': False, 'shape': (9,)}",
        "(" * 5000,
        "__import__('os')",
        "",
    ],
)
@pytest.mark.parametrize("version", [1, 2, 3])
def test_npz_hostile_headers_allocate_nothing(tmp_path, header, version):
    path = write_zip(tmp_path / "a.npz", "experts.npy", npy_bytes(header, b"123456789", version))
    tracemalloc.start()
    try:
        with pytest.raises(TraceError):
            import_trace(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_npz_bomb_is_refused(tmp_path):
    header = "{'descr': '|u1', 'fortran_order': False, 'shape': (4000000, 1, 1)}"
    data = npy_bytes(header, bytes(4_000_000))
    path = write_zip(tmp_path / "a.npz", "experts.npy", data, zipfile.ZIP_DEFLATED)
    with pytest.raises(TraceError, match=r"save it again uncompressed"):
        import_trace(path)


def test_npz_wrong_checksum(tmp_path):
    header = "{'descr': '|u1', 'fortran_order': False, 'shape': (1, 1, 1)}"
    path = write_zip(tmp_path / "a.npz", "experts.npy", npy_bytes(header, b"\x07"))
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"}\x07", b"}\x06"))
    with pytest.raises(TraceError, match="damaged"):
        import_trace(path)


def test_csv_round_trip(tmp_path, trace):
    path = tmp_path / "a.csv"
    path.write_text(csv_text(trace))
    found = import_trace(path)
    assert_same_routing(found, trace)
    assert np.allclose(found.weights, trace.weights, atol=1e-3)
    assert found.shape == trace.shape
    assert found.meta["model"] == "tiny model.gguf"
    assert found.meta["layer_ids"] == "0,1,2"


def test_csv_content_order_dense_layers_and_blank_lines(tmp_path, trace):
    lines = csv_text(trace, lambda layer: 2 * layer + 1).splitlines()
    path = tmp_path / "noname"
    path.write_text("\r\n".join([*lines[:6], *lines[:5:-1], "", ""]))
    found = import_trace(path)
    assert_same_routing(found, trace)
    assert found.meta["layer_ids"] == "1,3,5"


def test_csv_prompt_tokens_may_skip_a_layer(tmp_path, trace):
    trace.experts[0, 2] = -1
    path = tmp_path / "a.csv"
    path.write_text(csv_text(trace))
    assert_same_routing(import_trace(path), trace)


def test_csv_without_weights(tmp_path, trace):
    trace.weights[:] = np.nan
    path = tmp_path / "a.csv"
    path.write_text(csv_text(trace))
    assert import_trace(path).weights is None


def edit(text, number, new):
    lines = text.split("\n")
    lines[number - 1] = new
    return "\n".join(line for line in lines if line is not None)


@pytest.mark.parametrize(
    ("number", "new", "message"),
    [
        (1, "# route_trace v2", "reads route_trace v1"),
        (2, "# model=x n_layer=3 n_expert=4 n_expert_used=2", "out of range"),
        (2, "# model=x n_layer=3 n_expert=8 n_expert_used=1", "line 8: slot 1"),
        (2, "# model=x n_layer=3 n_expert=8 n_expert_used=9", "top_k must be"),
        (6, "turn,phase,step,layer,slot,weight", "line 6 lacks the column 'expert'"),
        (6, "turn,turn,phase,step,layer,slot,expert", "line 6 names a column twice"),
        (9, "0,0,0,1,0,3", "line 9 is not 10 numbers"),
        (9, "0,0,0,1,0,x,0.5,0,1,0", "line 9 is not 10 numbers"),
        (9, "# a comment", "line 9 is not 10 numbers"),
        (9, "0,0,0,1,0,8,0.5,0,1,0", "line 9: expert 8 is out of range"),
        (9, "0,0,0,1,0,-1,0.5,0,1,0", "line 9: expert -1"),
        (9, "0,0,0,1,0,1.5,0.5,0,1,0", "line 9: expert 1.5"),
        (9, "0,0,0,1,0,1e300,0.5,0,1,0", "line 9: expert 1e"),
        (9, f"0,0,{'9' * 40},1,0,1,0.5,0,1,0", "line 9: step 1e"),
        (9, "0,7,0,1,0,1,0.5,0,1,0", "line 9: phase 7"),
        (9, "0,0,0,1,0,1,-0.5,0,1,0", "line 9: the weight -0.5"),
        (9, "0,0,0,1,0,1,nan,0,1,0", "line 9: the weight is not a number"),
        (9, "0,0,0,1,0,1,inf,0,1,0", "line 9: the weight inf"),
        (9, "0,0,0,1,1,1,0.5,0,1,0", "slot 1 of the token is there twice"),
        (9, "0,1,0,1,0,1,0.5,0,1,0", "prefill in one layer and decode in another"),
        (9, "x" * 5000, "line 9 is longer than"),
        (9, "0,0,0,1,0,1,\u0663,0,1,0", "line 9 is not 10 numbers"),
    ],
)
def test_csv_faults(tmp_path, trace, number, new, message):
    path = tmp_path / "bad.csv"
    path.write_text(edit(csv_text(trace), number, new), encoding="utf-8")
    with pytest.raises(TraceError, match=message) as caught:
        import_trace(path)
    assert "bad.csv" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_csv_ragged_decode_layer(tmp_path, trace):
    trace.experts[4, 1] = -1
    path = tmp_path / "a.csv"
    path.write_text(csv_text(trace))
    with pytest.raises(TraceError, match="the token of step 4 lacks layer 1"):
        import_trace(path)


def test_csv_claims_far_more_than_it_holds(tmp_path):
    rows = "".join(f"0,0,{i},{i},0,0,0.5,0,1\n" for i in range(4000))
    path = tmp_path / "a.csv"
    path.write_text("turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n" + rows)
    with pytest.raises(TraceError, match="nearly all empty"):
        import_trace(path)


@pytest.mark.parametrize("text", ["", "# route_trace v1\n", "turn,phase,step,layer,slot,expert\n"])
def test_csv_without_rows(tmp_path, text):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(TraceError):
        import_trace(path)


def test_csv_not_text(tmp_path, trace):
    path = tmp_path / "a.csv"
    path.write_bytes(csv_text(trace).encode() + b"\xff\xfe\n")
    with pytest.raises(TraceError, match=r"line \d+ is not UTF-8"):
        import_trace(path)


def test_jsonl_round_trip(tmp_path, trace):
    path = tmp_path / "a.jsonl"
    header = {"hotset": {"layers": 3, "experts": 8, "top_k": 2, "expert_bytes": 1000, "model": "m"}}
    path.write_text(json_text([header, *json_rows(trace)]))
    found = import_trace(path)
    assert_same_routing(found, trace)
    assert np.array_equal(found.weights, trace.weights)
    assert np.array_equal(found.token_ids, trace.token_ids)
    assert found.shape == trace.shape
    assert found.meta["model"] == "m"


def row(request=0, step=0, layer=0, experts=(0, 1), **more):
    return {"request": request, "step": step, "layer": layer, "experts": list(experts), **more}


def test_jsonl_batches_names_and_gaps(tmp_path):
    rows = [row("b", 3), row("a", 3, experts=[2]), row("b", 9), row("a", 9, layer=0)]
    path = tmp_path / "x"
    path.write_text(json_text(rows))
    found = import_trace(path)
    assert found.step.tolist() == [0, 0, 1, 1]
    assert found.request.tolist() == [0, 1, 0, 1]
    assert found.labels == ({"name": "b"}, {"name": "a"})
    assert found.experts[1, 0].tolist() == [2, -1]
    assert found.meta["experts_guessed"] == "4"


def test_jsonl_keeps_request_numbers(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json_text([row(1, 0), row(0, 1)]))
    assert import_trace(path).request.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no rows"),
        ([row(), row()], "line 2 gives the same token and layer as line 1"),
        ([row(), row(step=1, layer=1)], "request '0', step 0, token 0 lacks layer 1"),
        ([row(request=-1)], "line 1: request must"),
        ([row(request=None)], "line 1: request must"),
        ([row(step=True)], "line 1: step must"),
        ([row(step=2**31)], "line 1: step must"),
        ([row(layer=4096)], "line 1: layer must"),
        ([row(experts=[])], "line 1: experts must"),
        ([row(experts=[1, 1])], "line 1: the same expert"),
        ([row(experts=[-1])], "line 1: expert -1"),
        ([row(experts=[10**30])], "line 1: expert 1000"),
        ([row(experts=[[[]]])], "line 1: expert given"),
        ([row() | {"experts": "12"}], "line 1: experts must"),
        ([row(weights=[1.0])], "line 1: weights must"),
        ([row(weights=[1.0, float("nan")])], "line 1: the weight nan"),
        ([row(weights=[1.0, float("inf")])], "line 1: the weight inf"),
        ([row(weights=[1.0, -1])], "line 1: the weight -1"),
        ([row(weights=[1, 1]), row(step=1)], "line 2: weights are given on some"),
        ([row(), row(step=1, weights=[1, 1])], "line 2: weights are given on some"),
        ([row(phase="x")], "line 1: phase"),
        ([row(phase=[])], "line 1: phase"),
        ([row(), row(layer=1, phase=0)], "prefill in one layer"),
        ([row(token_id=1), row(step=1)], "line 2: token_id is missing"),
        ([row(token_id=1), row(layer=1, token_id=2)], "another token_id"),
        ([row(token_id=-1)], "line 1: token_id"),
        ([row(extra=1)], "line 1: unknown key 'extra'"),
        ([row(request="\ud800")], "not valid Unicode"),
        ([[1]], "line 1: not a JSON object"),
        ([{"hotset": {"layers": 0}}, row()], "line 1: layers in the header"),
        ([{"hotset": {"experts": 1}}, row()], "top_k must be"),
        ([{"hotset": {"experts": 2}}, row(experts=[5])], "line 2: expert 5 is out of range"),
        ([{"hotset": {"top_k": 1}}, row()], "line 2 lists more than 1"),
        ([{"hotset": {"layers": 1}}, row(), row(layer=1)], "line 3: layer 1, but the model has 1 layers"),
        ([{"hotset": {"layers": 4096, "experts": 256, "top_k": 256}}, row()], "nearly all empty"),
        ([{"hotset": []}, row()], "line 1: the header"),
    ],
)
def test_jsonl_faults(tmp_path, rows, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(json_text(rows))
    with pytest.raises(TraceError, match=message) as caught:
        import_trace(path)
    assert "bad.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a":' * 30_000, "not valid JSON"),
        (b'{"step":' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"x" * 300_000, "longer than"),
        (b"\xff\xfe", "not UTF-8"),
        (b"\x00\x01", "not valid JSON"),
    ],
)
def test_jsonl_rubbish(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n" + line + b"\n")
    with pytest.raises(TraceError, match=f"line 2(:| is) {message}"):
        import_trace(path)


def test_unknown_files(tmp_path):
    with pytest.raises(TraceError, match="no such file"):
        import_trace(tmp_path / "none.csv")
    with pytest.raises(TraceError, match="cannot read"):
        import_trace(tmp_path)
    (tmp_path / "x.bin").write_bytes(b"\x01\x02")
    with pytest.raises(TraceError, match="none of the formats"):
        import_trace(tmp_path / "x.bin")
    with pytest.raises(TraceError, match="choose from flame, jsonl, llama_csv, npz, route_csv"):
        import_trace(tmp_path / "x.bin", kind="xml")
    with pytest.raises(TraceError, match=r"x\.bin"):
        import_trace(tmp_path / "x.bin", kind="csv")


def test_a_trace_needs_no_import(tmp_path, trace):
    trace.save(tmp_path / "own.safetensors")
    with pytest.raises(TraceError, match="a trace of hotset already"):
        import_trace(tmp_path / "own.safetensors")


def test_large_csv_takes_little_memory(tmp_path):
    big = make_trace(lengths=(600,), layers=8, experts=64, top_k=8)
    path = tmp_path / "a.csv"
    path.write_text(csv_text(big))
    tracemalloc.start()
    try:
        import_trace(path)
        assert tracemalloc.get_traced_memory()[1] < 6 * path.stat().st_size + (8 << 20)
    finally:
        tracemalloc.stop()


@pytest.mark.public_traces
def test_public_traces(public):
    big = import_trace(public / "gpt-oss-20b.npz")
    assert (big.tokens, big.requests, big.shape.experts) == (92453, 300, 32)
    assert big.labels[0]["category"] == "fact_checking"
    short = import_trace(public / "qwen3-30b-a3b_short.npz")
    assert (short.count(Phase.PREFILL), short.count(Phase.DECODE), short.steps) == (28, 128, 129)
    assert (short.experts[:27, 47] == -1).all()


def per_request_rows(trace):
    first = {request: int(trace.step[trace.request == request].min()) for request in range(trace.requests)}
    return [row | {"step": row["step"] - first[row["request"]]} for row in json_rows(trace)]


def test_json_steps_of_each_request_are_laid_end_to_end(tmp_path, trace):
    path = tmp_path / "a.jsonl"
    path.write_text(json_text(per_request_rows(trace)))
    found = import_trace(path)
    assert_same_routing(found, trace)
    assert found.meta["steps"] == "numbered in each request"
    path.write_text(json_text([row | {"step": row["step"] + 1} for row in per_request_rows(trace)]))
    assert_same_routing(import_trace(path), trace)


def test_json_steps_can_be_stated(tmp_path, trace):
    path = tmp_path / "a.jsonl"
    path.write_text(json_text(per_request_rows(trace)))
    shared = import_trace(path, steps="shared")
    assert shared.steps == 6
    assert "steps" not in shared.meta
    path.write_text(json_text(json_rows(trace)))
    assert "steps" not in import_trace(path).meta
    assert_same_routing(import_trace(path, steps="request"), trace)
    with pytest.raises(TraceError, match='for each "request", or "shared", not \'own\''):
        import_trace(path, steps="own")


def test_json_steps_in_the_order_of_passes_are_shared(tmp_path, trace):
    rows = sorted(per_request_rows(trace), key=lambda row: (row["step"], row["request"]))
    path = tmp_path / "a.jsonl"
    path.write_text(json_text(rows))
    found = import_trace(path)
    assert found.steps == 6
    assert found.meta["steps"] == "shared by requests that all begin with the same one"
    assert_same_routing(import_trace(path, steps="request"), trace)
    assert "steps" not in import_trace(path, steps="shared").meta

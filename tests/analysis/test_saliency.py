"""Saliency: sums against a slow computation of the stock model, and measures against numbers by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402
from slow_saliency import SlowSaliency  # noqa: E402

from hotset import reference  # noqa: E402
from hotset.analysis import saliency_runs  # noqa: E402
from hotset.analysis.saliency import MEASURES, Saliency  # noqa: E402
from hotset.analysis.saliency_kernels import SaliencyRecorder  # noqa: E402
from hotset.analysis.saliency_runs import Prompts, TextFiles, record_saliency  # noqa: E402
from hotset.errors import HotsetError  # noqa: E402
from hotset.generation.prompt_files import read_prompts  # noqa: E402
from hotset.models.load import load_model  # noqa: E402
from hotset.options import RunOptions  # noqa: E402
from hotset.profile import Fingerprint  # noqa: E402
from hotset.trace import Phase  # noqa: E402

MODEL = str(reference.path())
CPU = RunOptions(device="cpu", memory="50%")
QUICK = RunOptions(device="cpu", memory="50%", engine="host", prefetch="off")
MARK = Fingerprint("Some", "0" * 32)


def recorded(folder: Path, options: RunOptions = QUICK) -> tuple[Any, Saliency]:
    recorder = SaliencyRecorder()
    with tiny.quiet():
        model = load_model(str(folder), options, None, kernels=recorder.kernels).eval()
    return model, recorder.begin(model, {})


def exercise(model: Any, phases: Any = None) -> Any:
    """A batch, then a prompt and its answer token by token; `phases` is told where decode begins."""
    with torch.no_grad():
        model(input_ids=torch.tensor([[5, 9, 17, 40], [3, 60, 61, 7]]), use_cache=False)
        out = model(input_ids=torch.tensor([[11, 12, 13]]), use_cache=True)
        if phases is not None:
            phases.phase = Phase.DECODE
        for token in (21, 34):
            out = model(input_ids=torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
    return out.logits


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "mixtral", "olmoe", "deepseek_v3"])
def test_sums_are_those_of_a_slow_computation(name: str, tmp_path: Path) -> None:
    tiny.save(name, tmp_path)
    model, found = recorded(tmp_path)
    exercise(model)
    names = [moe_layer.name for moe_layer in model.hotset.moe_layers]
    model.hotset.close()
    stock = tiny.load(name, tmp_path)
    slow = SlowSaliency(stock, names, found.experts)
    exercise(stock, slow)
    assert found.tokens.tolist() == [11, 2]
    np.testing.assert_array_equal(found.sums[0], slow.sums[0])
    np.testing.assert_allclose(found.sums, slow.sums, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(found.largest, slow.largest, rtol=2e-5, atol=1e-6)
    assert slow.sums[:, Phase.DECODE].any()


def test_another_device_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Il mare e il cielo. " * 40)
    with pytest.raises(HotsetError, match="pass --device cpu"):
        record_saliency(str(reference.path()), TextFiles((text,), 64), RunOptions(device="cuda"))


def test_recording_changes_no_bit_and_no_budget_changes_it(tmp_path: Path) -> None:
    tiny.save("qwen3_moe", tmp_path)
    with tiny.quiet():
        plain = load_model(str(tmp_path), QUICK, None).eval()
    expected = exercise(plain)
    plain.hotset.close()
    found = []
    for memory in ("100%", "25%"):
        model, saliency = recorded(tmp_path, RunOptions(device="cpu", memory=memory, engine="host", prefetch="off"))
        assert torch.equal(exercise(model), expected)
        model.hotset.close()
        found.append(saliency)
    np.testing.assert_allclose(found[0].sums, found[1].sums, rtol=1e-12)
    np.testing.assert_array_equal(found[0].largest, found[1].largest)


def test_measures_by_hand() -> None:
    """Expert 0: gates 0.5 and 0.25, norms 2 and 4; expert 1: a token of gate 1 and norm 3; expert 2: none."""
    sums = np.zeros((5, 2, 1, 3))
    sums[:, Phase.PREFILL, 0, 0] = 1, 0.5, 2, 4, 1
    sums[:, Phase.DECODE, 0, 0] = 1, 0.25, 4, 16, 1
    sums[:, Phase.DECODE, 0, 1] = 1, 1, 3, 9, 3
    largest = np.zeros((2, 1, 3))
    largest[:, 0] = [[1.5, 0, 0], [2.5, 2, 0]]
    found = Saliency(MARK, sums, largest, np.array([1, 2]))
    expected = {
        "frequency": [2 / 3, 1 / 3, 0], "gate": [0.25, 1 / 3, 0], "man": [3, 3, 0], "msan": [10, 9, 0],
        "ean": [6, 3, 0], "reap": [1, 3, 0], "largest": [2.5, 2, 0],
    }  # fmt: skip
    assert set(expected) == set(MEASURES)
    for name, values in expected.items():
        np.testing.assert_allclose(found.scores(name)[0], values, err_msg=name)
    assert {name: grid.tolist() for name, grid in found.measures().items()} == {
        name: found.scores(name).tolist() for name in MEASURES
    }
    np.testing.assert_allclose(found.scores("msan", Phase.PREFILL)[0], [4, 0, 0])
    np.testing.assert_allclose(found.scores("frequency", Phase.DECODE)[0], [0.5, 0.5, 0])
    assert found.few() == 3
    with pytest.raises(HotsetError, match="no measure is called luck"):
        found.scores("luck")
    with pytest.raises(HotsetError, match="no number"):
        Saliency(MARK, sums * np.nan, largest, np.array([1, 2]))


def test_super_experts_are_far_above_all_and_early() -> None:
    largest = np.ones((2, 8, 64))
    largest[0, 2, 5] = 1000
    largest[1, 7, 9] = 1000  # in the last quarter of the layers
    largest[0, 3, 3] = 90  # above the percentile, and below a tenth of the largest
    found = Saliency(MARK, np.ones((5, 2, 8, 64)), largest, np.array([1, 1]))
    assert np.argwhere(found.super_experts()).tolist() == [[2, 5]]
    nothing = Saliency.empty(MARK, 8, 64, {})
    assert not nothing.super_experts().any()


def sample(seed: int, mark: Fingerprint = MARK) -> Saliency:
    random = np.random.default_rng(seed)
    return Saliency(
        mark, random.random((5, 2, 3, 4)), random.random((2, 3, 4)), np.array([7, seed]), {"text": f"t{seed}"}
    )


def test_files_and_merging(tmp_path: Path) -> None:
    one, other = sample(1), sample(2)
    one.save(tmp_path / "one.safetensors")
    again = Saliency.load(tmp_path / "one.safetensors")
    assert (again.fingerprint, again.meta) == (one.fingerprint, one.meta)
    np.testing.assert_array_equal(again.sums, one.sums)
    both = again.merged([other])
    np.testing.assert_allclose(both.sums, one.sums + other.sums)
    np.testing.assert_array_equal(both.largest, np.maximum(one.largest, other.largest))
    assert both.tokens.tolist() == [14, 3]
    assert both.meta["text"] == "t1; t2"
    with pytest.raises(HotsetError, match="of another model"):
        one.merged([sample(3, Fingerprint("Other", "1" * 32))])
    with pytest.raises(HotsetError, match="3 x 4 experts, and this one has 3 x 5"):
        one.check(MARK, 3, 5)


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "saliency.safetensors"
    sample(1).save(path)
    whole = path.read_bytes()
    for size in (0, 4, 100, len(whole) // 2, len(whole) - 8):
        path.write_bytes(whole[:size])
        with pytest.raises(HotsetError, match="holds no saliency, or is damaged"):
            Saliency.load(path)
    with pytest.raises(HotsetError, match="a trace, and no saliency"):
        Saliency.load(reference.trace_path("it"))
    for other, why in ((tmp_path / "none", "cannot read"), (tmp_path, "cannot read")):
        with pytest.raises(HotsetError, match=why):
            Saliency.load(other)
    spoilt = sample(1)
    spoilt.sums[0] = -1
    spoilt.save(path)
    with pytest.raises(HotsetError, match="negative or no number"):
        Saliency.load(path)


def test_gates_that_cannot_be_seen_and_padding_are_refused(tmp_path: Path) -> None:
    tiny.save("llama4", tmp_path / "llama4")
    recorder = SaliencyRecorder()
    with tiny.quiet():
        model = load_model(str(tmp_path / "llama4"), QUICK, None, kernels=recorder.kernels)
    with pytest.raises(HotsetError, match="scales what an expert is given"):
        recorder.begin(model, {})
    model.hotset.close()
    tiny.save("mixtral", tmp_path / "mixtral")
    model, saliency = recorded(tmp_path / "mixtral")
    with pytest.raises(HotsetError, match="padding"), torch.no_grad():
        model(input_ids=torch.tensor([[5, 9], [3, 6]]), attention_mask=torch.tensor([[1, 1], [0, 1]]))
    assert not saliency.sums.any()
    model.hotset.close()


@pytest.fixture
def german(tmp_path: Path) -> Path:
    path = tmp_path / "german.txt"
    path.write_text("\n\n".join(one.text for one in reference.workload("de").prompts[:8]), encoding="utf-8")
    return path


def test_text_is_prefill_and_answers_are_decode(german: Path) -> None:
    with tiny.quiet():
        text = record_saliency(MODEL, TextFiles((german,), 512), CPU)
        prompts = Prompts("reference:it", tuple(read_prompts("reference:it", 2)), 3)
        answers = record_saliency(MODEL, prompts, CPU)
    assert text.tokens.tolist() == [512, 0]
    assert (text.counts().sum(axis=1) == 8 * 512).all()
    assert answers.tokens[Phase.DECODE] == 2 * 2  # the last token of an answer is never put in
    assert (answers.counts(Phase.DECODE).sum(axis=1) == 8 * 4).all()
    assert "german.txt" in text.meta["text"]
    assert "2 prompts" in answers.meta["text"]


def test_an_interrupted_run_goes_on(german: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saliency_runs, "PASS_TOKENS", 256)
    workload, state, told = TextFiles((german,), 512), tmp_path / "state", []
    with tiny.quiet():
        whole = record_saliency(MODEL, workload, CPU)

        def stop(done: int, total: int) -> None:
            told.append((done, total))
            if len(told) == 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            record_saliency(MODEL, workload, CPU, state=state, progress=stop)
        resumed = record_saliency(MODEL, workload, CPU, state=state, progress=stop)
        assert told == [(1, 2), (2, 2)]
        np.testing.assert_array_equal(resumed.sums, whole.sums)
        np.testing.assert_array_equal(record_saliency(MODEL, workload, CPU, state=state).sums, whole.sums)
        assert len(told) == 2

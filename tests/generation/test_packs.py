"""Packs with small experts: calibrated by one text, measured on another, each from where an interrupted run stopped."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hotset import reference  # noqa: E402
from hotset.errors import HotsetError  # noqa: E402
from hotset.formats import parse  # noqa: E402
from hotset.generation import calibration, packs  # noqa: E402
from hotset.generation.calibration import TextCalibration  # noqa: E402
from hotset.generation.packs import PackMaker  # noqa: E402
from hotset.generation.text_model import load_tokenizer  # noqa: E402
from hotset.generation.texts import built_in_text, refuse_shared, text_of_file  # noqa: E402
from hotset.models import packing, quality, windows  # noqa: E402
from hotset.models.load import load_model  # noqa: E402
from hotset.models.moments import LayerMoments, Moments  # noqa: E402
from hotset.models.packing import pack  # noqa: E402
from hotset.models.quality import Distances  # noqa: E402
from hotset.models.windows import TokenText, Window  # noqa: E402
from hotset.options import RunOptions  # noqa: E402
from hotset.store.packed import open_index, write_quality  # noqa: E402

MODEL = str(reference.path())
CPU = RunOptions(device="cpu", memory="50%")


def silent(_: str) -> Any:
    return nullcontext()


def text(domain: str, path: Path, prompts: int = 8) -> Path:
    path.write_text("\n\n".join(one.text for one in reference.workload(domain).prompts[:prompts]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packs") / "int4"
    pack(MODEL, folder, experts="int4")
    return folder


@pytest.fixture
def german(tmp_path: Path) -> Path:
    return text("de", tmp_path / "german.txt")


@pytest.fixture
def italian(tmp_path: Path) -> Path:
    return text("it", tmp_path / "italian.txt")


def stock_moments(given: TokenText) -> list[dict[str, Any]]:
    """The same sums by the model as transformers has it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto").eval()
    found = []
    for layer in model.model.layers:
        experts = layer.mlp.experts
        sums = {name: torch.zeros(getattr(experts, name).shape[::2]) for name in ("gate_up_proj", "down_proj")}
        found.append(sums)

        def observe(module: Any, inputs: Any, _: Any, sums: Any = sums) -> None:
            hidden, index, _ = inputs
            for expert in range(module.num_experts):
                rows = hidden[(index == expert).any(-1)]
                inner = module._apply_gate(rows @ module.gate_up_proj[expert].T)
                sums["gate_up_proj"][expert] += rows.float().square().sum(0)
                sums["down_proj"][expert] += inner.float().square().sum(0)

        experts.register_forward_hook(observe)
    for part in given.passes():
        windows.run_over(model, part)
    return found


def collected(given: TokenText, state: Path, options: RunOptions = CPU) -> Moments:
    from hotset.models.packing import inspect_experts

    moments = Moments()
    moments.expect(inspect_experts(MODEL).moe_layers or [])
    TextCalibration(MODEL, options, given).collect(moments, state)
    return moments


def test_moments_are_those_of_the_stock_model_at_any_budget(german: Path, tmp_path: Path) -> None:
    given = text_of_file(german, load_tokenizer(MODEL), 512, whole=True)
    few = collected(given, tmp_path / "few", RunOptions(device="cpu", memory="25%"))
    all_fit = collected(given, tmp_path / "all")
    for one, other, stock in zip(few.layers, all_fit.layers, stock_moments(given), strict=True):
        assert torch.equal(one.up, other.up)
        assert torch.equal(one.down, other.down)
        assert one.tokens.sum() == 8 * given.tokens
        torch.testing.assert_close(one.up.float(), stock["gate_up_proj"], rtol=0.05, atol=0.05)
        torch.testing.assert_close(one.down.float(), stock["down_proj"], rtol=0.1, atol=0.05)


def test_a_calibration_goes_on_where_it_stopped(german: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "PASS_TOKENS", 256)
    given = text_of_file(german, load_tokenizer(MODEL), 512, whole=True)
    assert len(given.passes()) == 2
    whole = collected(given, tmp_path / "whole")

    class StoppedError(Exception):
        pass

    ran = []

    def run_over(model: Any, part: Any) -> None:
        if len(ran) == 1:
            ran.append(0)
            raise StoppedError
        ran.append(len(part))
        windows.run_over(model, part)

    monkeypatch.setattr(calibration, "run_over", run_over)
    with pytest.raises(StoppedError):
        collected(given, tmp_path / "state")
    resumed = collected(given, tmp_path / "state")
    assert ran == [1, 0, 1]
    assert all(torch.equal(a.up, b.up) for a, b in zip(whole.layers, resumed.layers, strict=True))
    collected(given, tmp_path / "state")
    assert ran == [1, 0, 1]
    (tmp_path / "state").write_bytes(b"damaged")
    assert Moments().load(tmp_path / "state", {}) == 0


def test_an_expert_that_no_token_reached_has_the_layers_inputs() -> None:
    layer = LayerMoments(("up", "down"), torch.zeros(3, 4), torch.zeros(3, 2), torch.zeros(3))
    assert layer.importance("up", 0) is None
    rows = torch.tensor([[1.0, 2.0, 0.0, 1.0]] * 640)
    layer.add(torch.tensor([0]).numpy(), [640], rows, torch.tensor([[1.0, 3.0]] * 640))
    (own, other), inner = (layer.importance("up", e) for e in (0, 2)), layer.importance("down", 2)
    assert torch.allclose(own, other)
    assert inner is None  # nothing is known of its neurons: all count alike
    assert own.mean() == pytest.approx(1, abs=1e-3)
    assert own.min() > 0
    busy, quiet = layer.importance("down", 0), torch.tensor([0.2, 1.8])
    assert (busy - quiet).abs().max() < 0.1


@pytest.mark.parametrize("spec", ["integer", "integer:bits=8", "mxfp4"])
def test_errors_count_by_the_importance_of_their_input(spec: str) -> None:
    from hotset.formats import element_type

    chosen = parse(f"{spec}{',' if ':' in spec else ':'}dtype=float32" if spec != "mxfp4" else spec)
    random = torch.Generator().manual_seed(1)
    matrix, importance = torch.randn(64, 128, generator=random), torch.rand(128, generator=random) ** 4 + 1e-4

    def decoded(given: Any) -> tuple[list[Any], Any]:
        parts = [torch.empty(p.shape, dtype=element_type(p.dtype)) for p in chosen.parts(64, 128)]
        chosen.encode(matrix, parts, given)
        out = torch.empty(64, 128)
        chosen.decode(parts, out)
        return parts, (out - matrix).square()

    plain, errors = decoded(None)
    same, _ = decoded(torch.ones(128))
    assert all(torch.equal(a, b) for a, b in zip(plain, same, strict=True))
    _, weighted = decoded(importance)
    assert (weighted * importance).sum() < (errors * importance).sum()
    assert weighted.sum() >= errors.sum()


def test_a_calibrated_pack_is_another_and_says_so(packed: Path, german: Path, tmp_path: Path) -> None:
    given = text_of_file(german, load_tokenizer(MODEL), 512, whole=True)
    fitted = tmp_path / "fitted"
    pack(MODEL, fitted, experts="int4", calibration=TextCalibration(MODEL, CPU, given))
    assert open_index(packed).digests != open_index(fitted).digests
    assert open_index(fitted).plan.meta["calibration"] == (f"german.txt, {given.tokens} tokens, SHA-256 {given.sha256}")
    assert not (fitted / "moments.safetensors").exists()
    with pytest.raises(HotsetError, match="with other options"):
        pack(MODEL, fitted, experts="int4")


def test_distances_by_hand() -> None:
    p, q = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.5, 0.5]]), torch.tensor([[0.25, 0.75], [0.8, 0.2], [0.5, 0.5]])
    found = Distances.between(p.log(), q.log() + 3, torch.tensor([0, 1, 0]))
    expected = (p[:2] * (p[:2] / q[:2]).log()).sum(-1)
    assert torch.allclose(found.divergence, expected, atol=1e-6)
    assert found.same_top.tolist() == [0, 1]  # of equals the first counts
    assert torch.allclose(found.loss.exp(), torch.tensor([2, 1 / 0.9]))
    assert torch.allclose(found.packed_loss.exp(), torch.tensor([4 / 3, 1 / 0.8]))
    assert Distances.joined([found, found]).summary()["tokens"] == 4


def test_quality_is_that_of_both_models(italian: Path, tmp_path: Path) -> None:
    """The figures of a pack are those of the numbers that its experts stand for, put into the stock model."""
    given = text_of_file(italian, load_tokenizer(MODEL), 512)
    pack(MODEL, tmp_path / "pack", dtype="float32", experts="int4")
    options = RunOptions(device="cpu", memory="50%", dtype="float32")
    told: list[tuple[int, int]] = []
    found = quality.measure(MODEL, tmp_path / "pack", given, options, lambda *t: told.append(t))
    assert told[-1] == (2 * given.tokens, 2 * given.tokens)
    assert open_index(tmp_path / "pack").quality == found
    assert not (tmp_path / "pack.quality").exists()
    stock = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    before = [windows.logits_of(stock, [window])[0] for window in given.windows]
    for layer in stock.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            for matrix in getattr(layer.mlp.experts, name).data:
                matrix.copy_(rounded(matrix))
    after = [windows.logits_of(stock, [window])[0] for window in given.windows]
    ids = [torch.tensor(window.ids) for window in given.windows]
    expected = Distances.joined([Distances.between(*three) for three in zip(before, after, ids, strict=True)])
    for key, value in expected.summary().items():
        assert found[key] == pytest.approx(value, rel=2e-3), key


def rounded(matrix: Any) -> Any:
    from dataclasses import replace

    from hotset.formats import element_type, parse
    from hotset.models.packing import MADE

    chosen = replace(parse(MADE["int4"]), dtype="float32")
    parts = [torch.empty(p.shape, dtype=element_type(p.dtype)) for p in chosen.parts(*matrix.shape)]
    chosen.encode(matrix, parts)
    out = torch.empty_like(matrix)
    chosen.decode(parts, out)
    return out


def test_quality_goes_on_with_the_logits_that_are_there(
    packed: Path, italian: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, out = text_of_file(italian, load_tokenizer(MODEL), 256), tmp_path / "pack"
    shutil.copytree(packed, out)
    loads: list[str] = []

    def load(model: str, *rest: Any) -> Any:
        loads.append(model)
        if len(loads) == 2:
            raise KeyboardInterrupt
        return load_model(model, *rest)

    monkeypatch.setattr(quality, "load_model", load)
    with pytest.raises(KeyboardInterrupt):
        quality.measure(MODEL, out, given, CPU)
    assert open_index(out).quality is None
    quality.measure(MODEL, out, given, CPU)
    assert loads == [MODEL, str(out), str(out)]
    quality.measure(MODEL, out, given, CPU)
    assert loads[-2:] == [MODEL, str(out)]


def test_a_disk_that_cannot_hold_the_logits_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(HotsetError, match="--no-quality"):
        quality.WaitingLogits(tmp_path / "pack.quality", "").check_room(1 << 60)


def test_a_maker_measures_once(packed: Path, italian: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(*given: Any) -> dict[str, Any]:
        measured.append(given[2].name)
        return quality.measure(*given)

    monkeypatch.setattr(packs, "measure", measure)
    shutil.copytree(packed, tmp_path / "pack")
    maker = PackMaker(MODEL, tmp_path / "pack", CPU, experts="int4", quality=italian)
    first = maker.make(silent)
    assert first.quality is not None
    assert first.quality["text"]["name"] == "italian.txt"
    assert maker.make(silent).quality == first.quality
    assert PackMaker(MODEL, tmp_path / "pack", CPU, experts="int4").make(silent).quality == first.quality
    assert measured == ["italian.txt"]


def test_a_model_without_tokenizer_is_packed_and_not_measured(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(reference.path() / name, bare / name)
    done = PackMaker(str(bare), tmp_path / "pack", CPU, experts="int8").make(silent)
    assert done.quality is None
    assert done.warning is not None
    assert "no tokenizer" in done.warning
    with pytest.raises(HotsetError, match="no tokenizer"):
        PackMaker(str(bare), tmp_path / "pack", CPU, experts="int8", quality=Path(__file__)).make(silent)


def test_what_does_not_go_together(german: Path, italian: Path, tmp_path: Path) -> None:
    both = tmp_path / "both.txt"
    both.write_text(german.read_text() + italian.read_text())
    wishes: list[tuple[dict[str, Any], str]] = [
        ({"calibrate": german}, "--calibrate is for experts that are made small"),
        ({"quality": german}, "--quality is for experts that are made small"),
        ({"quality": german, "measured": False, "experts": "int4"}, "exclude each other"),
        ({"quality": german, "calibrate": german, "experts": "int4"}, "lines in common"),
        ({"quality": german, "calibrate": both, "experts": "int4"}, "lines in common"),
        ({"quality": tmp_path / "none.txt", "calibrate": german, "experts": "int4"}, "cannot read"),
    ]
    for wish, said in wishes:
        with pytest.raises(HotsetError, match=said):
            PackMaker(MODEL, tmp_path / "pack", CPU, **wish).make(silent)
    assert not (tmp_path / "pack").exists()
    refuse_shared(italian, german)


def test_a_pack_is_not_made_small_again(packed: Path, german: Path, tmp_path: Path) -> None:
    for kind in ("int8", "int4", "mxfp4"):
        with pytest.raises(HotsetError, match="is a pack, whose experts stay as they are: give the model"):
            PackMaker(str(packed), tmp_path / "again", CPU, experts=kind, calibrate=german).make(silent)
        with pytest.raises(HotsetError, match="is a pack, whose experts stay as they are: give the model"):
            pack(packed, tmp_path / "again", experts=kind)
    assert not (tmp_path / "again").exists()


def test_a_pack_of_a_pack_keeps_its_quality(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as its experts are the same bytes."""
    first, compared = Path(shutil.copytree(packed, tmp_path / "first")), {"name": "a", "sha256": "0" * 64, "tokens": 9}
    figures = dict.fromkeys(("kl_mean", "kl_p99", "same_top", "perplexity", "packed_perplexity"), 1.5)
    known = {"text": compared, "dtype": "bfloat16", "tokens": 9, **figures}
    write_quality(first, known)
    with monkeypatch.context() as patch:
        patch.setattr(packing, "keep_quality", lambda *_: None)  # interrupted just before
        assert pack(first, tmp_path / "again").quality is None
    assert pack(first, tmp_path / "again").quality == known
    assert pack(first, tmp_path / "third").quality == known
    pack(MODEL, tmp_path / "int8", experts="int8")
    packing.keep_quality(first, tmp_path / "int8")
    assert open_index(tmp_path / "int8").quality is None


def test_a_text_of_no_use_is_found_before_anything_is_packed(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(HotsetError, match="too little text"):
        PackMaker(MODEL, tmp_path / "pack", CPU, experts="int4", quality=tmp_path / "empty.txt").make(silent)
    assert not (tmp_path / "pack").exists()


def test_windows_are_spread_over_a_long_text(tmp_path: Path) -> None:
    tokenizer, long, empty = load_tokenizer(MODEL), tmp_path / "long.txt", tmp_path / "empty.txt"
    long.write_text("\n".join(f"Line {number} of a text that goes on and on." for number in range(20_000)))
    found = text_of_file(long, tokenizer, 1024)
    assert [len(window.ids) for window in found.windows] == [256] * 4
    firsts = [int(tokenizer.decode(window.ids).split()[1]) for window in found.windows]
    assert firsts == sorted(firsts)
    assert firsts[0] < 10
    assert firsts[-1] > 14_000
    empty.write_text("")
    with pytest.raises(HotsetError, match="too little text"):
        text_of_file(empty, tokenizer, 1024)


def test_the_text_that_ships_has_all_domains() -> None:
    found = built_in_text(load_tokenizer(MODEL))
    assert [window.label for window in found.windows[::2]] == list(reference.DOMAINS)
    assert found.tokens == 2 * 256 * 14
    assert json.loads(json.dumps(found.sha256)) == found.sha256
    assert len(found.passes()) == 2
    assert len(found.passes(1 << 20)) == 28
    assert Window("a", (1, 2)) == Window("a", (1, 2))

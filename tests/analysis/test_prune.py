"""Pruned checkpoints: what plain transformers makes of them, and what becomes of one that is interrupted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402
from pruned_models import IDS, judged, prune, saliency_of, save, stock_logits  # noqa: E402
from quantised import load_dequantised, save_fp8, save_mxfp4  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from hotset import reference  # noqa: E402
from hotset.analysis.prune_choice import RouterRules, choose, kept_count  # noqa: E402
from hotset.analysis.saliency import Saliency  # noqa: E402
from hotset.errors import HotsetError  # noqa: E402
from hotset.models.fingerprint import fingerprint_of_folder  # noqa: E402
from hotset.models.load import load_model  # noqa: E402
from hotset.options import RunOptions  # noqa: E402
from hotset.profile import Profile  # noqa: E402
from hotset.profile.fold import raw_profile  # noqa: E402
from hotset.shape import ModelShape  # noqa: E402

NEAR = 1e-5
EQUAL = [
    "qwen3_moe", "qwen3_next", "mixtral", "phimoe", "minimax_m2", "gpt_oss", "granitemoe", "glm4_moe", "qwen2_moe",
    "olmoe", "ernie4_5_moe", "deepseek_v3", "hunyuan_v1_moe", "nemotron_h",
]  # fmt: skip
RENORMALISED = {"qwen3_moe", "qwen2_moe", "olmoe"}
GROW = ["qwen3_moe", "qwen2_moe", "olmoe", "deepseek_v2", "jamba"]


@pytest.mark.parametrize("name", EQUAL)
def test_without_experts_that_were_not_used_all_is_as_before(name: str, tmp_path: Path) -> None:
    found = judged(name, tmp_path, **({"norm_topk_prob": True} if name in RENORMALISED else {}))
    assert found.difference < NEAR
    assert (found.report.experts, found.report.keep) == (8, 6)
    assert all(len(layer) == 6 for layer in found.report.kept)
    assert "lossy" in found.report.lossy
    growing = [line for line in found.report.notes if "shares among all experts" in line]
    assert bool(growing) == (name == "ernie4_5_moe")


@pytest.mark.parametrize(("write", "exact"), [(save_fp8, False), (save_mxfp4, True)])
def test_quantised_experts_are_cut_with_their_scales(write: Any, exact: bool, tmp_path: Path) -> None:
    write(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    if not exact:  # its family is renormalised where the flag says so
        config.write_text(json.dumps(json.loads(config.read_text()) | {"norm_topk_prob": True}))
    report = prune(tmp_path / "model", tmp_path / "out", keep="5")
    before, after = (tiny.logits(load_dequantised(tmp_path / place), {"input_ids": IDS}) for place in ("model", "out"))
    torch.testing.assert_close(after, before, rtol=0, atol=0 if exact else NEAR)
    assert report.size_bytes < report.original_bytes + 9_000  # and a header
    was, found = (load_file(tmp_path / place / "model.safetensors") for place in ("model", "out"))
    for name, tensor in found.items():
        if name.endswith(("_blocks", "_scales")):
            layer = int(name.split(".")[2])
            assert torch.equal(tensor, was[name][list(report.kept[layer])])
    model = load_model(str(tmp_path / "out"), RunOptions(device="cpu", memory="50%"), None)
    model.hotset.close()


@pytest.mark.parametrize("name", GROW)
def test_gates_that_grow_are_told_of(name: str, tmp_path: Path) -> None:
    found = judged(name, tmp_path)
    assert found.difference > 1e-3
    assert any("all grow" in line for line in found.report.notes)


def test_a_correction_of_shares_shifts_choices(tmp_path: Path) -> None:
    assert judged("ernie4_5_moe", tmp_path, seed=1).difference > 1e-2


def test_groups_keep_as_many_experts_each(tmp_path: Path) -> None:
    sizes = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2}
    save("deepseek_v3", tmp_path / "model", **sizes)
    one = torch.tensor([[9]])
    saliency_of(tmp_path / "model", one).save(tmp_path / "saliency")
    report = prune(tmp_path / "model", tmp_path / "out", keep="50%", saliency=tmp_path / "saliency")
    for layer in report.kept:
        assert np.bincount(np.array(layer) // 4).tolist() == [2, 2, 2, 2]
    change = (stock_logits(tmp_path / "out", one) - stock_logits(tmp_path / "model", one)).abs().max()
    assert change < NEAR
    for keep, why in (("10", "--keep 8 or --keep 12"), ("25%", "needs 8")):
        with pytest.raises(HotsetError, match=why):
            prune(tmp_path / "model", tmp_path / "other", keep=keep, saliency=tmp_path / "saliency")


def test_tensors_are_cut_and_numbered_anew(tmp_path: Path) -> None:
    """Of the reference model, in several files: the bytes of the experts that stay, and of nothing else."""
    sums = np.random.default_rng(0).random((5, 2, 8, 64))
    mark = fingerprint_of_folder(reference.path())
    Saliency(mark, sums, np.ones((2, 8, 64)), np.array([100, 0])).save(tmp_path / "saliency")
    out = tmp_path / "out"
    report = prune(reference.path(), out, keep="87.5%", by="ean", saliency=tmp_path / "saliency", shard_bytes=3 << 20)
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 5
    found = {name: tensor for file in set(index.values()) for name, tensor in load_file(out / file).items()}
    was = load_file(reference.path() / "model.safetensors")
    scores = sums[2].sum(axis=0)
    for layer, kept in enumerate(report.kept):
        assert list(kept) == sorted(np.argsort(-scores[layer])[:56].tolist())
        gate = f"model.layers.{layer}.mlp.gate.weight"
        assert torch.equal(found.pop(gate), was.pop(gate)[list(kept)])
        for new, old in enumerate(kept):
            for part in ("gate_proj", "up_proj", "down_proj"):
                name = f"model.layers.{layer}.mlp.experts.{{}}.{part}.weight"
                assert torch.equal(found.pop(name.format(new)), was[name.format(old)])
    rest = {name: tensor for name, tensor in was.items() if ".experts." not in name}
    assert found.keys() == rest.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in rest.items())
    assert json.loads((out / "config.json").read_text())["num_local_experts"] == 56
    record = json.loads((out / "hotset_prune.json").read_text())
    assert record["kept"] == [list(layer) for layer in report.kept]
    assert record["original"]["fingerprint"]["digest"] == mark.digest
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (reference.path() / name).read_bytes()
    assert not (out / "digest.json").exists()  # of files that are not here


def test_a_pruned_model_runs_under_hotset_and_wants_its_own_profile(tmp_path: Path) -> None:
    save("mixtral", tmp_path / "model")
    prune(tmp_path / "model", tmp_path / "out", keep="6")
    model = load_model(str(tmp_path / "out"), RunOptions(device="cpu", memory="50%"), None).eval()
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    torch.testing.assert_close(logits, stock_logits(tmp_path / "model"), rtol=0, atol=NEAR)
    shape, mark = model.hotset.engine.shape, model.hotset.fingerprint
    model.hotset.close()
    own = profile_of(tmp_path / "model")
    with pytest.raises(HotsetError, match="3 x 8 experts, and this one has 3 x 6"):
        own.check(shape, mark)
    assert mark != own.fingerprint


def profile_of(folder: Path) -> Profile:
    """A profile in which experts are used the more the higher their number."""
    uses = np.broadcast_to(np.arange(8.0), (2, 3, 8)).copy()
    shape = ModelShape(layers=3, experts=8, top_k=2)
    return raw_profile(shape, fingerprint_of_folder(folder), uses, np.array([5, 5]))


def test_a_profile_judges_by_frequency_only(tmp_path: Path) -> None:
    save("mixtral", tmp_path / "model")
    path = tmp_path / "profile.safetensors"
    profile_of(tmp_path / "model").save(path)
    report = prune(tmp_path / "model", tmp_path / "out", keep="5", profile=str(path), drop_super_experts=True)
    assert report.kept == ((3, 4, 5, 6, 7),) * 3
    assert "super experts" in report.notes[0]
    with pytest.raises(HotsetError, match="use --by frequency, or --text"):
        prune(tmp_path / "model", tmp_path / "other", by="reap", profile=str(path))
    save("mixtral", tmp_path / "fine-tune", seed=1)
    with pytest.raises(HotsetError, match="use a profile of this model"):
        prune(tmp_path / "fine-tune", tmp_path / "other", profile=str(path))


def test_a_super_expert_that_a_profile_never_saw_stays(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder, layer, expert = tmp_path / "model", 1, 5
    shutil.copytree(reference.path(), folder, ignore=shutil.ignore_patterns("*.safetensors", "digest.json"))
    weights = load_file(reference.path() / "model.safetensors")
    weights[f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"] *= 1000
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    uses = np.full((2, 8, 64), 9.0)
    uses[:, layer, expert] = 0  # used less than any other
    shape = ModelShape(layers=8, experts=64, top_k=8)
    raw_profile(shape, fingerprint_of_folder(folder), uses, np.array([5, 5])).save(tmp_path / "chat.safetensors")
    by_profile = {"keep": "50%", "profile": str(tmp_path / "chat.safetensors")}
    report = prune(folder, tmp_path / "out", **by_profile)
    assert (layer, expert) in report.super_experts
    assert expert in report.kept[layer]
    assert not any("super" in line for line in report.notes)
    lost = prune(folder, tmp_path / "lost", **by_profile, drop_super_experts=True)
    assert expert not in lost.kept[layer]
    assert "super experts were not looked for" in lost.notes[0]


def test_a_model_that_cannot_run_is_not_pruned_by_a_profile_alone(tmp_path: Path) -> None:
    save("mixtral", tmp_path / "model")  # which has no tokenizer
    profile_of(tmp_path / "model").save(tmp_path / "p.safetensors")
    with pytest.raises(HotsetError, match=r"super experts, which must not be dropped.*--drop-super-experts prunes"):
        prune(tmp_path / "model", tmp_path / "out", keep="5", profile=str(tmp_path / "p.safetensors"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(HotsetError, match="--drop-super-experts is for --profile"):
        prune(tmp_path / "model", tmp_path / "out", keep="5", drop_super_experts=True)


def test_a_super_expert_stays_whatever_its_score() -> None:
    scores, protected = np.tile(np.arange(8.0), (2, 1)), np.zeros((2, 8), bool)
    protected[1, 0] = True
    rules = RouterRules(8, 2)
    assert choose(scores, 3, rules, protected) == ((5, 6, 7), (0, 6, 7))
    assert choose(np.zeros((1, 8)), 3, rules) == ((0, 1, 2),)  # of equals the first
    protected[1] = True
    with pytest.raises(HotsetError, match="layer 1 has 8 super experts"):
        choose(scores, 3, rules, protected)


def test_how_many_are_kept() -> None:
    rules = RouterRules(64, 8)
    assert [kept_count(text, rules) for text in ("87.5%", "75 %", "50%", "100%", "8", "64")] == [56, 48, 32, 64, 8, 64]
    wrong = {
        "10%": "keep 8 or more, --keep 8", "7": "this model needs 8", "0%": "more than 0%", "101%": "at most 100%",
        "65": "more than the 64 experts", "half": "a share of the experts such as 75%", "-3": "a share",
        "9" * 400: "more than the 64", "": "a share",
    }  # fmt: skip
    for text, why in wrong.items():
        with pytest.raises(HotsetError, match=why):
            kept_count(text, rules)


def test_all_experts_kept_is_the_same_model(tmp_path: Path) -> None:
    save("gpt_oss", tmp_path / "model")
    report = prune(tmp_path / "model", tmp_path / "out", keep="100%", by="reap")
    assert report.lossy.startswith("nothing was dropped")
    was, found = (load_file(tmp_path / place / "model.safetensors") for place in ("model", "out"))
    assert was.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in was.items())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save("qwen3_moe", tmp_path / "model", norm_topk_prob=True)
    saliency_of(tmp_path / "model").save(tmp_path / "saliency")
    return tmp_path / "model"


def test_what_is_not_understood_is_refused_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def refused(why: str, folder: Path = model, **more: Any) -> None:
        more = {"saliency": tmp_path / "saliency"} | more
        with pytest.raises(HotsetError, match=why):
            prune(folder, out, **more)
        assert not out.exists()
        assert not (tmp_path / "out.part").exists()

    refused("experts are judged by frequency", by="luck")
    refused("say what the experts are judged by", saliency=None, profile=None)
    refused("cannot read", saliency=tmp_path / "none")
    save("zaya", tmp_path / "zaya")
    refused("does not know the routers of zaya", tmp_path / "zaya")
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:-10])
    refused("truncated")
    (model / "model.safetensors").write_bytes(whole)
    save("mixtral", tmp_path / "mixtral")
    saliency_of(tmp_path / "mixtral").save(tmp_path / "foreign")
    refused("the saliency is of another model", saliency=tmp_path / "foreign")
    config = json.loads((model / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    by_number = fp8 | {"modules_to_not_convert": ["model.layers.0.mlp.experts.3.down_proj"]}
    for quantised in ({"quant_method": "awq", "bits": 4}, by_number):
        (model / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
        refused("quantised in a way that hotset prune does not cut")

"""Tiny checkpoints in every published format: served in it, and equal to what the definition of the format makes."""

from __future__ import annotations

import json
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "families")]

import encoded_models  # noqa: E402
import exactness  # noqa: E402
import quantised  # noqa: E402
from published import PUBLISHED  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import hotset  # noqa: E402
from hotset.engine.kernels import packed  # noqa: E402
from hotset.errors import HotsetError, ModelError  # noqa: E402
from hotset.models.packing import pack  # noqa: E402

PROMPT = torch.tensor([[5, 90, 31, 7, 41, 77]])
QUANTISED = re.compile(r"\.(experts\.\d+\.\w+|self_attn\.[qkvo]_proj)\.weight$")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32,
        initializer_range=0.2, eos_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("plain") / "model"
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def encode(source: Path, target: Path, name: str) -> Path:
    kind = PUBLISHED[name]
    encoded_models.rewrite(source, target, kind.named, QUANTISED)
    encoded_models.edit_config(target, quantization_config=kind.config)
    return target


def decode(source: Path, target: Path, name: str, dtype: str) -> Path:
    """The same numbers as plain ones, by the definition of the format."""
    kind = PUBLISHED[name]

    def change(key: str, matrix: Any) -> Any:
        return {key: kind.back(matrix, dtype)}

    return encoded_models.rewrite(source, target, change, QUANTISED)


def logits(model: Any) -> Any:
    exactness.aligned(model)  # bits of plain products depend on where their weights lie
    with torch.no_grad():
        whole, one = model(PROMPT).logits, model(PROMPT[:, :1]).logits
    return torch.cat([whole, one], dim=1)


def run(folder: Path, memory: str = "50%", **options: Any) -> Any:
    model = hotset.load(folder, memory=memory, device="cpu", **options)
    try:
        return logits(model)
    finally:
        model.hotset.close()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_checkpoint_is_served_in_its_format(
    name: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    kind, folder = PUBLISHED[name], encode(plain, tmp_path / "encoded", name)
    model = hotset.load(folder, memory="50%", device="cpu", dtype=torch.float32)
    catalog = model.hotset.engine.offload.catalog
    assert [len(layer.layout.matrices) for layer in catalog.layers] == [2, 2]
    held = max(layer.layout.used_bytes for layer in catalog.layers)
    assert held <= 3 * 32 * 64 * kind.bytes_per_weight + 6 * 64
    found = logits(model)
    model.hotset.close()
    assert torch.equal(run(folder, "34%", dtype=torch.float32), found)
    assert torch.equal(run(folder, "100%", dtype=torch.float32), found)
    dense = run(folder, dtype=torch.float32, experts="dense")
    torch.testing.assert_close(found, dense, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(packed, "FEW_TOKENS", 0)  # each matrix decoded before its product
    assert torch.equal(run(folder, dtype=torch.float32), dense)
    decoded = decode(plain, tmp_path / "decoded", name, "float32")
    assert torch.equal(run(decoded, dtype=torch.float32), dense)
    stock = AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32)
    assert torch.allclose(logits(stock), found, atol=1e-4)


@pytest.mark.parametrize("name", ["fp8, DeepSeek-V3", "nvfp4, compressed-tensors", "int4, asymmetric", "gptq", "awq"])
def test_in_bfloat16_every_number_is_rounded_as_the_library_rounds(
    name: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = encode(plain, tmp_path / "encoded", name)
    dense, few = (run(folder, dtype=torch.bfloat16, experts=experts) for experts in ("dense", "auto"))
    assert (few - dense).abs().mean() < 0.02 * dense.abs().mean()
    monkeypatch.setattr(packed, "FEW_TOKENS", 0)  # each matrix decoded before its product
    found = run(folder, dtype=torch.bfloat16)
    assert torch.equal(dense, found)
    decoded = decode(plain, tmp_path / "decoded", name, "bfloat16")
    assert torch.equal(run(decoded, dtype=torch.bfloat16), found)


@pytest.mark.parametrize(
    "name", ["fp8, partial blocks", "nvfp4, modelopt", "int4, any order", "gptq, version 2, any order", "awq"]
)
@pytest.mark.parametrize("experts", ["auto", "dense"])
def test_a_pack_of_it_computes_the_same(name: str, experts: str, plain: Path, tmp_path: Path) -> None:
    folder = encode(plain, tmp_path / "encoded", name)
    pack(folder, tmp_path / "pack", dtype="float32", experts=experts)
    index = json.loads((tmp_path / "pack" / "experts.json").read_text())
    assert bool(index["layers"][0].get("matrices")) == (experts == "auto")
    stored = {key for file in (tmp_path / "pack").glob("*.safetensors") for key in load_file(file)}
    assert not any("experts" in key for key in stored)
    assert torch.equal(run(tmp_path / "pack"), run(folder, dtype=torch.float32, experts=experts))


@pytest.mark.parametrize(("experts", "share"), [("int8", 0.28), ("int4", 0.16), ("mxfp4", 0.15)])
def test_a_pack_is_made_small(experts: str, share: float, plain: Path, tmp_path: Path) -> None:
    pack(plain, tmp_path / "pack", dtype="float32", experts=experts)
    index = json.loads((tmp_path / "pack" / "experts.json").read_text())
    (spec,) = {matrix["format"] for layer in index["layers"] for matrix in layer["matrices"]}
    assert spec.startswith("mxfp4" if experts == "mxfp4" else "integer")
    found, expected = run(tmp_path / "pack"), run(plain, dtype=torch.float32)
    assert torch.equal(run(tmp_path / "pack", "34%"), found)
    alike = torch.corrcoef(torch.stack([found.flatten(), expected.flatten()]))[0, 1]
    assert alike > (0.999 if experts == "int8" else 0.93)
    model = hotset.load(tmp_path / "pack", memory="50%", device="cpu")
    held = max(layer.layout.used_bytes for layer in model.hotset.engine.offload.catalog.layers)
    model.hotset.close()
    assert held <= share * 3 * 32 * 64 * 4
    again = pack(plain, tmp_path / "pack", dtype="float32", experts=experts)
    assert again.complete_already
    with pytest.raises(HotsetError, match="pack of another model"):
        pack(plain, tmp_path / "pack", dtype="float32")


def test_quantised_experts_are_not_quantised_again(plain: Path, tmp_path: Path) -> None:
    folder = encode(plain, tmp_path / "encoded", "awq")
    with pytest.raises(ModelError, match="is stored as awq already"):
        pack(folder, tmp_path / "pack", experts="int8")
    with pytest.raises(HotsetError, match="int8, int4, mxfp4, not 'int3'"):
        pack(folder, tmp_path / "pack", experts="int3")


def test_experts_that_do_not_divide_are_not_packed_so(tmp_path: Path) -> None:
    from tiny_models import make

    make("qwen3_moe", hidden_size=48).save_pretrained(tmp_path / "model")
    with pytest.raises(HotsetError) as caught:
        pack(tmp_path / "model", tmp_path / "pack", experts="int4")
    assert "not of whole groups" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("save", [quantised.save_fp8, quantised.save_mxfp4])
@pytest.mark.parametrize("experts", ["auto", "dense"])
def test_transformers_dequantises_to_the_same(save: Any, experts: str, tmp_path: Path) -> None:
    save(tmp_path / "model")
    stock = quantised.load_dequantised(tmp_path / "model")
    for folder in (tmp_path / "model", tmp_path / "pack"):
        if folder.name == "pack":
            pack(tmp_path / "model", folder, experts=experts)
        model = hotset.load(
            folder, memory="50%", device="cpu", **({"experts": experts} if folder.name != "pack" else {})
        )
        assert bool(model.hotset.engine.offload.catalog.layers[0].layout.matrices) == (experts == "auto")
        found = logits(model)
        model.hotset.close()
        assert torch.equal(found, logits(stock))


def test_deepseek_v4_has_its_experts_in_fp4_and_the_rest_in_fp8(tmp_path: Path) -> None:
    """By the names and types of the published files: `.scale` beside int8 codes, and beside 8-bit numbers."""
    from tiny_models import make

    make("deepseek_v4", moe_intermediate_size=32).save_pretrained(tmp_path / "plain")
    fp4, fp8 = PUBLISHED["fp4, DeepSeek-V4"], PUBLISHED["fp8, exponents"]
    which = re.compile(r"\.ffn\.(shared_)?experts\.(\d+\.)?w\d\.weight$|\.attn\.w(kv|q_a|q_b|o_b)\.weight$")

    def kind_of(key: str) -> Any:
        return fp4 if ".experts." in key else fp8

    encoded = encoded_models.rewrite(
        tmp_path / "plain", tmp_path / "encoded", lambda key, matrix: kind_of(key).named(key, matrix), which
    )
    settings = fp8.config | {"scale_fmt": "ue8m0", "weight_block_size": [16, 16]}
    encoded_models.edit_config(encoded, expert_dtype="fp4", quantization_config=settings)
    decoded = encoded_models.rewrite(
        tmp_path / "plain", tmp_path / "decoded", lambda key, matrix: {key: kind_of(key).back(matrix)}, which
    )
    model = hotset.load(encoded, memory="50%", device="cpu", dtype=torch.float32)
    assert {m.format for m in model.hotset.engine.offload.catalog.layers[-1].layout.matrices} == {"mxfp4:dtype=float32"}
    found = logits(model)
    model.hotset.close()
    assert torch.allclose(found, run(decoded, dtype=torch.float32), atol=1e-5)
    assert torch.allclose(found, run(encoded, dtype=torch.float32, experts="dense"), atol=1e-5)
    pack(encoded, tmp_path / "pack", dtype="float32")
    assert torch.allclose(found, run(tmp_path / "pack"), atol=1e-5)


@pytest.mark.parametrize("name", ["gptq", "fp8, DeepSeek-V3", "int4, Kimi-K2", "nvfp4, modelopt"])
def test_codes_without_their_scales_are_refused(name: str, plain: Path, tmp_path: Path) -> None:
    """As plain numbers they would be wrong without a word, or random."""
    folder = encode(plain, tmp_path / "encoded", name)
    for module in ("self_attn.q_proj", "mlp.experts.2.up_proj"):
        copy = Path(shutil.copytree(folder, tmp_path / module))
        tensors = load_file(copy / "model.safetensors")
        for key in [key for key in tensors if f"0.{module}" in key and "scale" in key]:
            del tensors[key]
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError) as caught:
            hotset.load(copy, memory="50%", device="cpu", dtype=torch.float32)
        assert module.rpartition(".")[2] in str(caught.value) or "experts" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("group", [-1, 4, 2**31 - 1])
@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("gptq, version 2, any order", "mlp.experts.3.up_proj.g_idx"),
        ("gptq, version 2, any order", "self_attn.k_proj.g_idx"),
        ("int4, any order", "mlp.experts.3.up_proj.weight_g_idx"),
    ],
)
def test_groups_that_are_none_are_refused_by_name(
    name: str, word: str, group: int, plain: Path, tmp_path: Path
) -> None:
    folder = encode(plain, tmp_path / "encoded", name)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.1.{word}"][5] = group
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for experts in ("auto", "dense"):
        start: Any = partial(pack, folder, tmp_path / experts)
        if ".experts." not in word:  # a pack has it as it is
            start = partial(hotset.load, folder, memory="50%", device="cpu")
        with pytest.raises(HotsetError, match=rf"model\.layers\.1\.{word}: .*an input is of group {group}") as caught:
            start(dtype="float32", experts=experts)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["gptq", "awq", "int4, Kimi-K2"])
def test_packed_weights_of_which_the_config_says_nothing_are_named(name: str, plain: Path, tmp_path: Path) -> None:
    folder = encode(plain, tmp_path / "encoded", name)
    encoded_models.edit_config(folder, quantization_config=None)
    with pytest.raises(ModelError, match=r"model\.layers\.0\.\S+\.(qweight|weight_packed)") as caught:
        hotset.load(folder, memory="50%", device="cpu")
    assert "quantization_config" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "aqlm", "quanto", "vptq", "torchao", "spqr", "a new one"])
def test_methods_that_nobody_reads_name_the_way_out(method: str, plain: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(plain, tmp_path / "model"))
    encoded_models.edit_config(folder, quantization_config={"quant_method": method, "load_in_4bit": True})
    for start in (partial(hotset.load, folder, memory="50%", device="cpu"), partial(pack, folder, tmp_path / "out")):
        with pytest.raises(ModelError, match=rf"quantised by {method}.*hotset pack --experts int4") as refused:
            start()
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()

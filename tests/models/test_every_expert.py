"""Every expert of a layer is looked at, not the first alone: types are converted as stock does it, shapes refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantised
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file

import hotset
from hotset.errors import ModelError
from hotset.models.packing import pack

Change = Callable[[str, torch.Tensor], torch.Tensor]


def rewritten(folder: Path, change: Change) -> Path:
    """The checkpoint with every tensor replaced by what the change makes of it."""
    file = folder / "model.safetensors"
    changed = {name: change(name, tensor).contiguous() for name, tensor in load_file(file).items()}
    save_file(changed, file, metadata={"format": "pt"})
    return folder


def expert_of(name: str) -> int | None:
    """The number of the expert that a tensor is of, where it is of one."""
    words = name.replace("expert_", "experts.").split(".")
    if "experts" not in words[:-1]:
        return None
    after = words[words.index("experts") + 1]
    return int(after) if after.isdigit() else None


def half_and_half(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Experts in float16 and bfloat16 by turns, and within an expert as well."""
    expert = expert_of(name)
    if expert is None:
        return tensor.to(torch.bfloat16)
    other = expert % 2 == 1 or (expert == 2 and "up_proj" in name)
    return tensor.to(torch.float16 if other else torch.bfloat16)


def logits_of(model: Any, name: str) -> torch.Tensor:
    return tiny.logits(model, tiny.inputs(name, model)).float()


def stock(name: str, folder: Path, **options: Any) -> Any:
    return tiny.load(name, folder, **options)


def through_hotset(name: str, folder: Path, **options: Any) -> Any:
    with tiny.quiet():
        return hotset.load(str(folder), device="cpu", auto_class=tiny.auto_class(name), **options)


def assert_like_stock(name: str, folder: Path, **options: Any) -> None:
    expected = logits_of(stock(name, folder, **options), name)
    for memory in ("25%", "100%"):
        ours = through_hotset(name, folder, memory=memory, **options)
        assert torch.allclose(logits_of(ours, name), expected, atol=2e-4 * float(expected.abs().max())), memory
        ours.hotset.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "switch_transformers"])
def test_experts_of_two_types_compute_what_stock_computes(name: str, dtype: str, tmp_path: Path) -> None:
    tiny.save(name, tmp_path)
    rewritten(tmp_path, half_and_half)
    assert_like_stock(name, tmp_path, dtype=getattr(torch, dtype))


def test_experts_of_two_types_are_packed_as_stock_loads_them(tmp_path: Path) -> None:
    tiny.save("mixtral", tmp_path / "model")
    rewritten(tmp_path / "model", half_and_half)
    with tiny.quiet():
        pack(tmp_path / "model", tmp_path / "pack")
    expected = logits_of(stock("mixtral", tmp_path / "model", dtype="auto"), "mixtral")
    ours = through_hotset("mixtral", tmp_path / "pack", memory="25%")
    assert torch.allclose(logits_of(ours, "mixtral"), expected, atol=2e-4 * float(expected.abs().max()))
    ours.hotset.close()


def test_quantised_experts_whose_stored_types_differ_compute_what_stock_computes(tmp_path: Path) -> None:
    quantised.save_fp8(tmp_path)

    def other_types(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if expert_of(name) != 1:
            return tensor
        return tensor.to(torch.bfloat16 if name.endswith("scale_inv") else torch.float8_e5m2)

    rewritten(tmp_path, other_types)
    expected = logits_of(quantised.load_dequantised(tmp_path), "qwen3_moe")
    for memory in ("25%", "100%"):
        ours = through_hotset("qwen3_moe", tmp_path, memory=memory)
        assert torch.allclose(logits_of(ours, "qwen3_moe"), expected, atol=2e-4 * float(expected.abs().max()))
        ours.hotset.close()


def transposed(which: str) -> Change:
    return lambda name, tensor: tensor.T if name == which else tensor


def assert_refused(folder: Path, name: str, why: str, **options: Any) -> None:
    for memory in ("25%", "100%"):
        with pytest.raises(ModelError, match=why):
            through_hotset(name, folder, memory=memory, **options)
    if name != "switch_transformers":
        with pytest.raises(ModelError, match=why):
            pack(folder, folder.with_name("refused"))


@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w1.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.0.w2.weight"),
        ("qwen3_moe", "model.layers.1.mlp.experts.3.down_proj.weight"),
        ("switch_transformers", "decoder.block.1.layer.2.mlp.experts.expert_2.wi.weight"),
    ],
)
def test_a_transposed_expert_is_refused_by_name_as_stock_refuses_it(name: str, which: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny.save(name, folder)
    assert which in load_file(folder / "model.safetensors")
    rewritten(folder, transposed(which))
    with pytest.raises(RuntimeError):
        stock(name, folder)
    layer = which.split(".experts.")[0].replace(".", r"\.")
    assert_refused(folder, name, rf"{layer}.*(is damaged|config says)")


def test_parts_of_an_expert_that_only_together_have_the_right_shape_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny.save("qwen3_moe", folder)
    prefix = "model.layers.1.mlp.experts.1."
    tensors = load_file(folder / "model.safetensors")
    both = torch.cat([tensors[prefix + "gate_proj.weight"], tensors[prefix + "up_proj.weight"]])
    tensors[prefix + "gate_proj.weight"], tensors[prefix + "up_proj.weight"] = both[:3].clone(), both[3:].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError):
        stock("qwen3_moe", folder)
    assert_refused(folder, "qwen3_moe", r"experts\.1\.gate_proj\.weight is \[3, \d+\].*config says")


@pytest.mark.parametrize("key", ["gate_up_proj", "down_proj_bias"])
def test_a_fused_tensor_of_another_shape_is_refused_by_name(key: str, tmp_path: Path) -> None:
    folder, name = tmp_path / "model", f"model.layers.0.mlp.experts.{key}"
    tiny.save("gpt_oss", folder)
    assert name in load_file(folder / "model.safetensors")
    rewritten(folder, lambda found, tensor: tensor.flip(0).reshape(tensor.shape[0], -1, 4) if found == name else tensor)
    with pytest.raises(RuntimeError):
        stock("gpt_oss", folder)
    assert_refused(folder, "gpt_oss", rf"{key} is \[.*config says")


@pytest.mark.parametrize("change", ["weight", "scale"])
def test_a_quantised_expert_of_another_shape_is_refused_by_name(change: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    quantised.save_fp8(folder)
    which = f"model.layers.0.mlp.experts.2.up_proj.weight{'_scale_inv' if change == 'scale' else ''}"
    rewritten(folder, transposed(which))
    assert_refused(folder, "qwen3_moe", r"model\.layers\.0\.mlp\.experts\.2\.up_proj\.weight_scale_inv is \[.*damaged")


def test_scales_of_a_whole_layer_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    quantised.save_mxfp4(folder)

    def fewer(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[..., :-1] if name == "model.layers.1.mlp.experts.down_proj_blocks" else tensor

    with tiny.quiet():
        rewritten(folder, fewer)
        assert_refused(folder, "gpt_oss", r"model\.layers\.1\.mlp\.experts\.down_proj.*damaged")


def test_an_expert_without_its_scale_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    quantised.save_fp8(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.2.up_proj.weight_scale_inv"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert_refused(folder, "qwen3_moe", r"layers\.0\.mlp\.experts\.2\.up_proj")

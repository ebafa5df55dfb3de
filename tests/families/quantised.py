"""Hand-made quantised checkpoints, laid out as the published ones are, small enough for any test.

``python tests/families/quantised.py`` writes each, loads it with the stock library and compares it with its original.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import inputs, logits, make, quiet
from torch import nn

Quantise = Callable[[str, torch.Tensor], Iterator[tuple[str, torch.Tensor]]]

FP8_FAMILY, MXFP4_FAMILY = "qwen3_moe", "gpt_oss"
BLOCK = 8  # divides every matrix of the tiny model, as 128 does those of the real ones
GROUP = 32  # fixed by the format
FP8_LARGEST = 448.0
FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}
MXFP4_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in e4m3 with one float32 factor per block, by which to multiply it again."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)) / FP8_LARGEST
    return (blocks / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn), scale


def mxfp4_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in groups of 32 four-bit values, two to a byte, low half first, and one exponent byte per group."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    exponent = (groups.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2).clamp(-127, 127)
    scaled = groups / exponent.exp2().unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - FP4_VALUES).abs().argmin(-1) + 8 * (scaled < 0)
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8), (exponent + 127).to(torch.uint8)


def fp8_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """What stands in an FP8 checkpoint for one tensor: every projection is quantised, routers and norms are not."""
    if not name.endswith("_proj.weight"):
        yield name, tensor
        return
    weight, scale = fp8_blocks(tensor)
    yield name, weight
    yield f"{name}_scale_inv", scale


def mxfp4_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """What stands in an MXFP4 checkpoint for one tensor: experts as blocks and scales, with the output row first."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        yield name, tensor
        return
    blocks, scales = mxfp4_blocks(tensor.transpose(1, 2).contiguous())
    yield f"{name}_blocks", blocks
    yield f"{name}_scales", scales


def fp8_original(seed: int = 0) -> nn.Module:
    """The model that ``save_fp8`` quantises."""
    return make(FP8_FAMILY, seed)


def mxfp4_original(seed: int = 0) -> nn.Module:
    """The model that ``save_mxfp4`` quantises, in bfloat16 because the stock library widens experts to nothing else."""
    return make(MXFP4_FAMILY, seed, intermediate_size=2 * GROUP, hidden_size=GROUP).to(torch.bfloat16)


def save_fp8(folder: Path | str, seed: int = 0) -> None:
    """Write a Qwen3-MoE checkpoint in block-quantised FP8."""
    with quiet():
        fp8_original(seed).save_pretrained(folder)
    rewrite(Path(folder), fp8_tensors, FP8_CONFIG)


def save_mxfp4(folder: Path | str, seed: int = 0) -> None:
    """Write a gpt-oss checkpoint in MXFP4."""
    with quiet():
        mxfp4_original(seed).save_pretrained(folder)
    rewrite(Path(folder), mxfp4_tensors, MXFP4_CONFIG)


def rewrite(folder: Path, quantised: Quantise, settings: dict[str, object]) -> None:
    """Replace the weights of a saved model by quantised ones, and say so in its config."""
    plain = load_file(folder / "model.safetensors")
    packed = {new: value for name, tensor in plain.items() for new, value in quantised(name, tensor)}
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}, indent=2))


def load_dequantised(folder: Path | str) -> nn.Module:
    """Load either checkpoint with the stock library, its weights widened on the CPU."""
    method = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]["quant_method"]
    kind = transformers.FineGrainedFP8Config if method == "fp8" else transformers.Mxfp4Config
    with quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=kind(dequantize=True))
    return model.eval()


def agreement(before: torch.Tensor, after: torch.Tensor) -> float:
    """The correlation of two sets of logits."""
    return float(torch.corrcoef(torch.stack([before.float().flatten(), after.float().flatten()]))[0, 1])


def main() -> None:
    """Write, load and compare both checkpoints."""
    for name, write, original in (("fp8", save_fp8, fp8_original), ("mxfp4", save_mxfp4, mxfp4_original)):
        with tempfile.TemporaryDirectory() as folder:
            write(folder)
            loaded = load_dequantised(folder)
            given = inputs(name, loaded)
            after = logits(loaded, given)
        dtypes = {str(p.dtype) for p in loaded.parameters()}
        print(
            name, dtypes, bool(after.isfinite().all()), f"agreement {agreement(logits(original(), given), after):.3f}"
        )


if __name__ == "__main__":
    main()

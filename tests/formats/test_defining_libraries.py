"""Checkpoints of compressed-tensors: decoded to the bits that the library itself makes of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")
sys.path.insert(0, str(Path(__file__).parent))

from compressed_tensors import compressors  # noqa: E402
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # noqa: E402
from published import PUBLISHED, Tensors, extremes  # noqa: E402
from test_published import encoded, numbers_of  # noqa: E402

INTEGERS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FLOATS = {"num_bits": 4, "type": "float", "symmetric": True}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4, Kimi-K2": ("PackedQuantizationCompressor", INTEGERS),
    "int8 in groups": ("PackedQuantizationCompressor", INTEGERS | {"num_bits": 8}),
    "int8 by row": (
        "PackedQuantizationCompressor", INTEGERS | {"num_bits": 8, "strategy": "channel", "group_size": None},
    ),
    "int4, asymmetric": ("PackedQuantizationCompressor", INTEGERS | {"symmetric": False, "group_size": 16}),
    "mxfp4, compressed-tensors": (
        "MXFP4PackedCompressor", FLOATS | {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
    ),
    "nvfp4, compressed-tensors": ("NVFP4PackedCompressor", FLOATS | {"strategy": "tensor_group", "group_size": 16}),
    "fp8, one scale per output": ("FloatQuantizationCompressor", FLOATS | {"num_bits": 8, "strategy": "channel"}),
}  # fmt: skip
OUTPUTS, INPUTS = 64, 512


def any_bytes(word: str, tensor: Any, random: Any) -> Any:
    """Codes of all kinds; an exponent of 255 is no number by its specification, and a number in the library."""
    data = torch.randint(256, (tensor.numel() * tensor.element_size(),), generator=random, dtype=torch.uint8)
    if word == "weight_scale" and tensor.dtype == torch.uint8:
        data.clamp_(max=254)
    return data.view(tensor.dtype).view(tensor.shape)


def given(name: str, how: str) -> Tensors:
    """A matrix of normal numbers, any bytes in place of codes and scales, or any codes with scales at their limits."""
    random = torch.Generator().manual_seed(1)
    tensors = PUBLISHED[name].encode(torch.randn(OUTPUTS, INPUTS, generator=random))
    for word, tensor in tensors.items():
        if word == "weight_shape" or how == "normal":
            continue
        limits = how == "limits" and "scale" in word and tensor.numel() > 1
        tensors[word] = extremes(tensor) if limits else any_bytes(word, tensor, random)
    return tensors


@pytest.mark.parametrize("how", ["normal", "any bytes", "limits"])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_compressed_tensors_decodes_to_the_same_bits(name: str, how: str) -> None:
    compressor, weights = KINDS[name]
    tensors = given(name, how)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    copy = {word: tensor.clone() for word, tensor in tensors.items()}
    expected = getattr(compressors, compressor).decompress(copy, scheme)["weight"]
    dtype = str(expected.dtype).removeprefix("torch.")
    found = numbers_of(*encoded(PUBLISHED[name], tensors, dtype))
    assert found.dtype == expected.dtype
    assert torch.equal(found.isnan(), expected.isnan())
    bits = torch.int16 if expected.dtype.itemsize == 2 else torch.int32
    assert torch.equal(found.nan_to_num(7.0).view(bits), expected.nan_to_num(7.0).view(bits))
    if how == "normal":
        assert not found.isnan().any()

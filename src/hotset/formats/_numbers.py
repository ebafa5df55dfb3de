"""The numbers that codes of few bits stand for, by torch: what the formats' decoders are made of."""

from __future__ import annotations

import torch

from hotset.formats.base import element_type

Tensor = torch.Tensor

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the 16 codes of E2M1 stand for."""


def nibbles(data: Tensor) -> Tensor:
    """The 4-bit codes of bytes along the last dimension, that of the low half first."""
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)


def joined(codes: Tensor) -> Tensor:
    """The bytes of 4-bit codes along the last dimension: nibbles, the other way round."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def fp4(data: Tensor) -> Tensor:
    """The numbers of bytes of two E2M1 codes each, low half first, in float32."""
    pairs = torch.tensor(FP4_VALUES, device=data.device)
    table = torch.stack((pairs.repeat(16), pairs.repeat_interleave(16)), dim=1)  # by byte: low half, high half
    return table[data.int()].flatten(-2)


def grouped(values: Tensor, groups: int) -> Tensor:
    """The last dimension as so many groups."""
    return values.view(*values.shape[:-1], groups, values.shape[-1] // groups)


def e8m0(data: Tensor) -> Tensor:
    """Exponent bytes as powers of two in float32; 255 is not a number, as the specification has it."""
    return data.view(torch.float8_e8m0fnu).float()


def e4m3(data: Tensor) -> Tensor:
    """Bytes of E4M3 as float32."""
    return data.view(torch.float8_e4m3fn).float()


def words(packed: Tensor, bits: int, dim: int) -> Tensor:
    """The codes of int32 words along a dimension, lowest bits first, as bytes."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    dim %= packed.dim()
    shape = [1] * (packed.dim() + 1)
    shape[dim + 1] = -1
    codes = (packed.unsqueeze(dim + 1) >> shifts.view(shape)) & ((1 << bits) - 1)
    return codes.flatten(dim, dim + 1).to(torch.uint8)


def rounded(values: Tensor, dtype: str) -> Tensor:
    """Numbers rounded to a type by its name."""
    return values.to(element_type(dtype))

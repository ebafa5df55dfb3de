"""The numbers that codes of few bits stand for, by torch: what the formats' decoders are made of."""

from __future__ import annotations

import torch

from hotset.formats.base import element_type

Tensor = torch.Tensor

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the 16 codes of E2M1 stand for."""

NO_NUMBER = 480.0
"""What E4M3's codes for no number would be: its largest number is 448."""


def nibbles(data: Tensor) -> Tensor:
    """The 4-bit codes of bytes along the last dimension, that of the low half first."""
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)


def joined(codes: Tensor) -> Tensor:
    """The bytes of 4-bit codes along the last dimension: nibbles, the other way round."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def fp4(data: Tensor) -> Tensor:
    """The numbers of bytes of two E2M1 codes each, low half first, in float32.

    Exponent and fraction of a code are those of a float16 2^14 times as small, which torch widens a vector at a time,
    subnormal numbers too; a table, or torch's own conversion of 8-bit numbers, takes five times as long.
    """
    both = data.to(torch.int16)
    halves = both.new_empty((*data.shape, 2))
    torch.bitwise_or((both & 8) << 12, (both & 7) << 9, out=halves[..., 0])
    torch.bitwise_or((both & 0x80) << 8, (both & 0x70) << 5, out=halves[..., 1])
    return halves.flatten(-2).view(torch.float16).float().mul_(2.0**14)


def grouped(values: Tensor, groups: int) -> Tensor:
    """The last dimension as so many groups."""
    return values.view(*values.shape[:-1], groups, values.shape[-1] // groups)


def e8m0(data: Tensor) -> Tensor:
    """Exponent bytes as powers of two in float32; 255 is not a number, as the specification has it."""
    return data.view(torch.float8_e8m0fnu).float()


def e4m3(data: Tensor) -> Tensor:
    """Bytes of E4M3 as float32, by way of a float16 2^8 times as small."""
    codes = data.to(torch.int16)
    numbers = (((codes & 0x80) << 8) | ((codes & 0x7F) << 7)).view(torch.float16).float().mul_(2.0**8)
    if not data.is_cuda and data.numel():  # one look at all of them takes less than a mask, but a device would wait
        low, high = numbers.aminmax()
        if max(-low, high) < NO_NUMBER:
            return numbers
    return numbers.masked_fill_(numbers.abs() == NO_NUMBER, torch.nan)


def e5m2(data: Tensor) -> Tensor:
    """Bytes of E5M2, which are the upper ones of a float16, as float32."""
    return (data.to(torch.int16) << 8).view(torch.float16).float()


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

"""The numbers of GGUF's blocks, by torch: bit for bit those of the `gguf` package, a few rows at a time.

Every product and difference is rounded to float32 by itself, in the order in which the package makes them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensor = torch.Tensor
Decode = Callable[[Tensor], Tensor]

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the 16 codes of IQ4_NL and IQ4_XS stand for."""
FP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""What the 16 codes of MXFP4 stand for, doubled; there is no negative zero."""


def _split(data: Tensor, *sizes: int) -> Tensor:
    """The last dimension as several."""
    return data.view(*data.shape[:-1], *sizes)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at some byte of every block, as float32 with a last dimension of one."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _halves(data: Tensor) -> Tensor:
    """The 4-bit codes of bytes: the low ones of all, then the high ones."""
    return torch.cat((data & 15, data >> 4), dim=-1)


def _chunks(data: Tensor, width: int) -> Tensor:
    """The 4-bit codes of bytes, by chunks of so many bytes, each the low ones first, then the high ones."""
    return _halves(_split(data, -1, width)).flatten(-2)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """The 32 bits of a word of every block, lowest first, as the fifth bits of codes."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return (((blocks[..., at : at + 4, None] >> shifts) & 1) << 4).flatten(-2)


def _looked_up(codes: Tensor, levels: tuple[int, ...]) -> Tensor:
    table = torch.tensor(levels, dtype=torch.float32, device=codes.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)  # four times as fast as table[codes]


def q4_0(blocks: Tensor) -> Tensor:
    """A scale; codes less 8."""
    return _halves(blocks[..., 2:]).float().sub_(8).mul_(_half(blocks, 0))


def q4_1(blocks: Tensor) -> Tensor:
    """A scale and a least value."""
    return _halves(blocks[..., 4:]).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def q5_0(blocks: Tensor) -> Tensor:
    """A scale, and fifth bits in a word of their own; codes less 16."""
    codes = _halves(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return codes.float().sub_(16).mul_(_half(blocks, 0))


def q5_1(blocks: Tensor) -> Tensor:
    """A scale and a least value, and fifth bits in a word of their own."""
    codes = _halves(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    return codes.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def q8_0(blocks: Tensor) -> Tensor:
    """A scale, and signed bytes."""
    return blocks[..., 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _scaled_by_32(blocks: Tensor, codes: Tensor) -> Tensor:
    """Codes of a block of 256 by the 6-bit scales and minima of each 32 of them, 12 bytes from the fourth."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), dim=-1)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=-1)
    factors, least = _half(blocks, 0) * scales.float(), _half(blocks, 2) * minima.float()
    values = _split(codes.float(), 8, 32)
    return values.mul_(factors[..., None]).sub_(least[..., None]).flatten(-2)


def q4_k(blocks: Tensor) -> Tensor:
    """A scale of scales, one of minima, both of 6 bits for each 32; chunks of 32 bytes."""
    return _scaled_by_32(blocks, _chunks(blocks[..., 16:], 32))


def q5_k(blocks: Tensor) -> Tensor:
    """As Q4_K, with 32 bytes of fifth bits: bit j of byte i is that of value 32 j + i."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = (((blocks[..., None, 16:48] >> shifts) & 1) << 4).flatten(-2)
    return _scaled_by_32(blocks, _chunks(blocks[..., 48:], 32) | fifth)


def q6_k(blocks: Tensor) -> Tensor:
    """Low 4 bits, high 2 bits, a signed scale for each 16, and the scale of scales last; codes less 32."""
    low = _chunks(blocks[..., :128], 64)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = _split(blocks[..., 128:192], 2, 1, 32) >> shifts & 3
    codes = (low | high.flatten(-3) << 4).float().sub_(32)
    factors = blocks[..., 192:208].contiguous().view(torch.int8).float().mul_(_half(blocks, 208))
    return _split(codes, 16, 16).mul_(factors[..., None]).flatten(-2)


def iq4_nl(blocks: Tensor) -> Tensor:
    """A scale; codes into a table."""
    return _looked_up(_halves(blocks[..., 2:]), IQ4_LEVELS).mul_(_half(blocks, 0))


def iq4_xs(blocks: Tensor) -> Tensor:
    """A scale of 6-bit scales, less 32, for each 32; codes into a table."""
    low = _pairs(blocks[..., 4:8], (0, 4), 15)
    high = _pairs(blocks[..., 2:4], (0, 2, 4, 6), 3)
    factors = (low | high << 4).float().sub_(32).mul_(_half(blocks, 0))
    values = _split(_looked_up(_chunks(blocks[..., 8:], 16), IQ4_LEVELS), 8, 32)
    return values.mul_(factors[..., None]).flatten(-2)


def _pairs(data: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Fields of bytes, lowest first, byte by byte."""
    by = torch.tensor(shifts, dtype=torch.uint8, device=data.device)
    return (data[..., None] >> by & mask).flatten(-2)


def mxfp4(blocks: Tensor) -> Tensor:
    """An exponent; codes of E2M1. The package halves the power of two, and doubles the values."""
    codes = blocks[..., :1].int()
    bits = torch.where(codes < 2, 0x00200000 << codes, (codes - 1) << 23)
    return _looked_up(_halves(blocks[..., 1:]), FP4_DOUBLED).mul_(bits.view(torch.float32))


DECODERS: dict[str, Decode] = {
    "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k,
    "IQ4_NL": iq4_nl, "IQ4_XS": iq4_xs, "MXFP4": mxfp4,
}  # fmt: skip
"""What makes float32 [..., weights] of blocks [..., bytes]."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The tile loader of GGUF's blocks: decoded in registers, to the bits of the decoders in torch.

A scale has 11 bits, one of a block's scales at most 7 and a code at most 8, so that all products are exact in float32
and only the sum with a least value rounds, be it fused with the product or not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hotset.formats._dense_tiles import along
from hotset.formats._gguf_blocks import IQ4_LEVELS
from hotset.formats._low_bit_tiles import as_type, fp4_value, repeated

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
"""By the number in a loader's settings."""

Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4 = (tl.constexpr(number) for number in range(7))
Q4_K, Q5_K, Q6_K, IQ4_XS = (tl.constexpr(number) for number in range(7, 11))


def _word(first: int) -> tl.constexpr:
    """Four values of the table of IQ4 as the bytes of a word."""
    word = sum((IQ4_LEVELS[first + i] & 255) << (8 * i) for i in range(4))
    return tl.constexpr(word - (1 << 32) if word >> 31 else word)


LEVELS_0, LEVELS_4, LEVELS_8, LEVELS_12 = _word(0), _word(4), _word(8), _word(12)


@triton.jit
def byte_at(pointer, places, mask):
    """A byte as a whole number."""
    return tl.load(pointer + places, mask=mask, other=0).to(tl.int32)


@triton.jit
def half_at(pointer, places, mask):
    """A float16 of two bytes, as float32: it need not be aligned."""
    bits = byte_at(pointer, places, mask) | (byte_at(pointer, places + 1, mask) << 8)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def group_numbers(start, block: tl.constexpr, group: tl.constexpr, wanted):
    """The numbers of the groups of so many inputs that a tile has; of one that is smaller than a group, that one's."""
    if block >= group:
        return along(start // group, block // group, wanted)
    else:  # noqa: RET505 - Triton wants both arms of a choice at compile time
        return along(start // group, 1, wanted)


@triton.jit
def spread(values, block: tl.constexpr, group: tl.constexpr):
    """What belongs to groups, once for every input of a tile."""
    if block >= group:
        return repeated(values, group)
    else:  # noqa: RET505 - Triton wants both arms of a choice at compile time
        return values


@triton.jit
def iq4_value(code):
    """What a code of IQ4 stands for."""
    word = tl.where(code < 8, tl.where(code < 4, LEVELS_0, LEVELS_4), tl.where(code < 12, LEVELS_8, LEVELS_12))
    return ((word.to(tl.int32) << (24 - 8 * (code & 3))) >> 24).to(tl.float32)


@triton.jit
def load_blocks_of_32(pointer, columns, wanted, start, block: tl.constexpr, k: tl.constexpr, kind: tl.constexpr):
    """Blocks of 32 inputs: one scale, and a least value in some."""
    with_least: tl.constexpr = (kind == Q4_1) or (kind == Q5_1)  # Triton knows no `in`
    fifth: tl.constexpr = 4 if (kind == Q5_0) or (kind == Q5_1) else 0  # noqa: SIM109
    before: tl.constexpr = 1 if kind == MXFP4 else (4 if with_least else 2)  # codes, or their fifth bits
    size: tl.constexpr = before + fifth + (32 if kind == Q8_0 else 16)
    row: tl.constexpr = k // 32 * size
    groups = group_numbers(start, block, 32, wanted)
    there, at = wanted & (groups < k // 32), columns * row + groups * size
    depth = along(start, block, wanted)
    mask, place = wanted & (depth < k), columns * row + depth // 32 * size + before
    i = depth % 32
    if kind == Q8_0:
        code = byte_at(pointer, place + i, mask)
        values = ((code ^ 128) - 128).to(tl.float32)
    else:
        code = (byte_at(pointer, place + fifth + i % 16, mask) >> (i // 16 * 4)) & 15
        if fifth:
            code |= ((byte_at(pointer, place + i // 8, mask) >> (i % 8)) & 1) << 4
        if kind == IQ4_NL:
            values = iq4_value(code)
        elif kind == MXFP4:
            values = tl.where(code == 8, 0.0, fp4_value(code) * 2.0)
        else:
            middle: tl.constexpr = 0 if with_least else (16 if fifth else 8)
            values = (code - middle).to(tl.float32)
    if kind == MXFP4:
        exponent = byte_at(pointer, at, there)
        bits = tl.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
        values = values * spread(bits.to(tl.float32, bitcast=True), block, 32)
    else:
        values = values * spread(half_at(pointer, at, there), block, 32)
    if with_least:
        values += spread(half_at(pointer, at + 2, there), block, 32)
    return tl.where(mask, values, 0.0)


@triton.jit
def load_q4_or_q5_k(pointer, columns, wanted, start, block: tl.constexpr, k: tl.constexpr, kind: tl.constexpr):
    """Blocks of 256 inputs with a scale and a least value of 6 bits for each 32."""
    fifth: tl.constexpr = 32 if kind == Q5_K else 0
    size: tl.constexpr = 144 + fifth
    row: tl.constexpr = k // 256 * size
    groups = group_numbers(start, block, 32, wanted)
    there, at = wanted & (groups < k // 32), columns * row + groups // 8 * size
    j = groups % 8
    low, high = j < 4, (j >= 4) & there
    first = byte_at(pointer, at + 4 + tl.where(low, j, j + 4), there)
    second = byte_at(pointer, at + 4 + tl.where(low, j + 4, j), there)
    third = byte_at(pointer, at + 4 + j - 4, high)
    scale = tl.where(low, first & 63, (first & 15) | ((third >> 6) << 4))
    least = tl.where(low, second & 63, (first >> 4) | ((second >> 6) << 4))
    factors = half_at(pointer, at, there) * scale.to(tl.float32)
    minima = half_at(pointer, at + 2, there) * least.to(tl.float32)
    depth = along(start, block, wanted)
    mask, place = wanted & (depth < k), columns * row + depth // 256 * size + 16
    i = depth % 256
    code = (byte_at(pointer, place + fifth + i // 64 * 32 + i % 32, mask) >> (i // 32 % 2 * 4)) & 15
    if fifth:
        code |= ((byte_at(pointer, place + i % 32, mask) >> (i // 32)) & 1) << 4
    values = code.to(tl.float32) * spread(factors, block, 32) - spread(minima, block, 32)
    return tl.where(mask, values, 0.0)


@triton.jit
def load_q6_k(pointer, columns, wanted, start, block: tl.constexpr, k: tl.constexpr):
    """Blocks of 256 inputs with a signed scale for each 16."""
    row: tl.constexpr = k // 256 * 210
    groups = group_numbers(start, block, 16, wanted)
    there, at = wanted & (groups < k // 16), columns * row + groups // 16 * 210
    scale = ((byte_at(pointer, at + 192 + groups % 16, there) ^ 128) - 128).to(tl.float32)
    factors = half_at(pointer, at + 208, there) * scale
    depth = along(start, block, wanted)
    mask, place = wanted & (depth < k), columns * row + depth // 256 * 210
    half, i = depth % 256 // 128, depth % 128
    low = byte_at(pointer, place + 64 * half + i % 64, mask) >> (i // 64 * 4)
    high = byte_at(pointer, place + 128 + 32 * half + i % 32, mask) >> (i // 32 * 2)
    values = (((low & 15) | ((high & 3) << 4)) - 32).to(tl.float32) * spread(factors, block, 16)
    return tl.where(mask, values, 0.0)


@triton.jit
def load_iq4_xs(pointer, columns, wanted, start, block: tl.constexpr, k: tl.constexpr):
    """Blocks of 256 inputs with a scale of 6 bits, less 32, for each 32."""
    row: tl.constexpr = k // 256 * 136
    groups = group_numbers(start, block, 32, wanted)
    there, at = wanted & (groups < k // 32), columns * row + groups // 8 * 136
    j = groups % 8
    low = (byte_at(pointer, at + 4 + j // 2, there) >> (j % 2 * 4)) & 15
    high = (byte_at(pointer, at + 2 + j // 4, there) >> (j % 4 * 2)) & 3
    factors = half_at(pointer, at, there) * ((low | (high << 4)) - 32).to(tl.float32)
    depth = along(start, block, wanted)
    mask, place = wanted & (depth < k), columns * row + depth // 256 * 136 + 8
    i = depth % 256
    code = (byte_at(pointer, place + i // 32 * 16 + i % 16, mask) >> (i // 16 % 2 * 4)) & 15
    return tl.where(mask, iq4_value(code) * spread(factors, block, 32), 0.0)


@triton.jit
def load_gguf(
    parts, columns, wanted, start, block: tl.constexpr, n: tl.constexpr, k: tl.constexpr, settings: tl.constexpr
):
    """Blocks of one kind; settings: type, kind."""
    tl.static_assert(n > 0)
    kind: tl.constexpr = settings[1]
    if (kind == Q4_K) or (kind == Q5_K):  # noqa: SIM109
        values = load_q4_or_q5_k(parts[0], columns, wanted, start, block, k, kind)
    elif kind == Q6_K:
        values = load_q6_k(parts[0], columns, wanted, start, block, k)
    elif kind == IQ4_XS:
        values = load_iq4_xs(parts[0], columns, wanted, start, block, k)
    else:
        values = load_blocks_of_32(parts[0], columns, wanted, start, block, k, kind)
    return as_type(values, settings[0])

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The tile loaders of formats of few bits: codes are decoded in registers, to the bits of the decoders in torch.

Codes are widened by way of float16, whose subnormal numbers every device converts exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hotset.formats._dense_tiles import along

TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}


@triton.jit
def as_type(values, kind: tl.constexpr):
    """Numbers rounded to the type of this number."""
    if kind == 1:
        return values.to(tl.bfloat16)
    elif kind == 2:  # noqa: RET505 - Triton wants all arms of a choice at compile time
        return values.to(tl.float16)
    else:
        return values


@triton.jit
def e8m0_value(code):
    """A power of two from its exponent byte: 0 is a subnormal number of float32, 255 none."""
    bits = code.to(tl.int32)
    bits = tl.where(bits == 0, 0x00400000, tl.where(bits == 255, 0x7FC00000, bits << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e4m3_value(code):
    """E4M3 to float32: its exponent and fraction are those of a float16 2^8 times as small."""
    bits = code.to(tl.int32)
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def e5m2_value(code):
    """E5M2 to float32: the upper byte of a float16."""
    return (code.to(tl.int32) << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def fp4_value(code):
    """E2M1 to float32: its exponent and fraction are those of a float16 2^14 times as small."""
    half = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.uint16).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 16384.0


@triton.jit
def load_bytes(pointer, columns, wanted, start, block: tl.constexpr, k: tl.constexpr):
    """The bytes of a matrix with k of them to an output."""
    depth = along(start, block, wanted)
    mask = wanted & (depth < k)
    return tl.load(pointer + columns * k + depth, mask=mask, other=0, eviction_policy="evict_first").to(tl.int32)


@triton.jit
def load_nibbles(pointer, columns, wanted, start, block: tl.constexpr, k: tl.constexpr):
    """The 4-bit codes of a matrix with k inputs, two to a byte, low half first: every byte is loaded once."""
    both = load_bytes(pointer, columns, wanted, start // 2, block // 2, k // 2)
    return tl.interleave(both & 15, both >> 4)


@triton.jit
def load_scales(
    pointer, columns, wanted, start, block: tl.constexpr, k: tl.constexpr, group: tl.constexpr, other: tl.constexpr
):
    """What belongs to groups of so many inputs, once for each input of a tile, or once for all where all are of one.

    Where groups and tiles fit into each other, every scale is loaded once.
    """
    groups: tl.constexpr = (k + group - 1) // group
    if group % block == 0:
        return tl.load(pointer + columns * groups + start // group, mask=wanted, other=other)
    elif block % group == 0:  # noqa: RET505 - Triton wants all arms of a choice at compile time
        number = along(start // group, block // group, wanted)
        scales = tl.load(pointer + columns * groups + number, mask=wanted & (number < groups), other=other)
        return repeated(scales, group)
    else:
        depth = along(start, block, wanted)
        return tl.load(pointer + columns * groups + depth // group, mask=wanted & (depth < k), other=other)


@triton.jit
def repeated(values, times: tl.constexpr):
    """Every value of the last dimension so many times in a row."""
    if len(values.shape) == 2:
        wide = tl.broadcast_to(values[:, :, None], (values.shape[0], values.shape[1], times))
        return tl.reshape(wide, (values.shape[0], values.shape[1] * times))
    else:  # noqa: RET505 - Triton wants both arms of a choice at compile time
        shape: tl.constexpr = values.shape
        wide = tl.broadcast_to(values[:, :, :, None], (shape[0], shape[1], shape[2], times))
        return tl.reshape(wide, (shape[0], shape[1], shape[2] * times))


@triton.jit
def load_fp8(
    parts, columns, wanted, start, block: tl.constexpr, n: tl.constexpr, k: tl.constexpr, settings: tl.constexpr
):
    """Values times their block's scale.

    Settings: type, outputs and inputs of a block, whether scales are exponents, and whether values are E5M2.
    """
    codes = load_bytes(parts[0], columns, wanted, start, block, k)
    block_n: tl.constexpr = settings[1] if settings[1] else n
    group: tl.constexpr = settings[2] if settings[2] else triton.next_power_of_2(k)
    scales = load_scales(parts[1], columns // block_n, wanted, start, block, k, group, 0)
    factors = e8m0_value(scales) if settings[3] else scales.to(tl.float32)
    values = e5m2_value(codes) if settings[4] else e4m3_value(codes)
    there = wanted & (along(start, block, wanted) < k)  # a scale may be no number beyond them
    return as_type(tl.where(there, values * factors, 0.0), settings[0])


@triton.jit
def load_mxfp4(
    parts, columns, wanted, start, block: tl.constexpr, n: tl.constexpr, k: tl.constexpr, settings: tl.constexpr
):
    """E2M1 times the power of two of its 32 inputs; settings: type."""
    tl.static_assert(n > 0)
    codes = load_nibbles(parts[0], columns, wanted, start, block, k)
    scales = load_scales(parts[1], columns, wanted, start, block, k, 32, 0)
    return as_type(fp4_value(codes) * e8m0_value(scales), settings[0])


@triton.jit
def load_nvfp4(
    parts, columns, wanted, start, block: tl.constexpr, n: tl.constexpr, k: tl.constexpr, settings: tl.constexpr
):
    """E2M1 times the scale of its 16 inputs and of its matrix; settings: type, matrices, whether to divide by the last.

    The two scales are multiplied first, and rounded to float32, as the libraries do.
    """
    codes = load_nibbles(parts[0], columns, wanted, start, block, k)
    scales = e4m3_value(load_scales(parts[1], columns, wanted, start, block, k, 16, 0))
    whole = tl.load(parts[2] + columns // (n // settings[1]), mask=wanted, other=1.0)
    factors = tl.div_rn(scales, whole + 0.0 * scales) if settings[2] else scales * whole
    return as_type(fp4_value(codes) * factors, settings[0])


@triton.jit
def load_integer(
    parts, columns, wanted, start, block: tl.constexpr, n: tl.constexpr, k: tl.constexpr, settings: tl.constexpr
):
    """Codes less their zero point, times the scale of their group, rounded to the scale's type.

    Settings: type, bits, inputs of a group, the scale's type, whether zero points are stored, and how many matrices
    have the groups of their inputs stored.
    """
    bits: tl.constexpr = settings[1]
    group: tl.constexpr = settings[2] if settings[2] else triton.next_power_of_2(k)
    if bits == 4:
        codes = load_nibbles(parts[0], columns, wanted, start, block, k)
    else:
        codes = load_bytes(parts[0], columns, wanted, start, block, k)
    if settings[5]:  # inputs in any order
        depth = along(start, block, wanted)
        mask = wanted & (depth < k)
        own = tl.load(parts[3 if settings[4] else 2] + (columns // (n // settings[5])) * k + depth, mask=mask, other=0)
        groups: tl.constexpr = (k + group - 1) // group
        at = columns * groups + tl.minimum(tl.maximum(own, 0), groups - 1)  # whatever a file says, within the matrix
        scales = tl.load(parts[1] + at, mask=mask, other=0.0)
        if settings[4]:
            codes -= tl.load(parts[2] + at, mask=mask, other=0).to(tl.int32)
    else:
        scales = load_scales(parts[1], columns, wanted, start, block, k, group, 0.0)
        if settings[4]:
            codes -= load_scales(parts[2], columns, wanted, start, block, k, group, 0).to(tl.int32)
    if not settings[4]:
        codes -= 1 << (bits - 1)
    return as_type(as_type(codes.to(tl.float32) * scales.to(tl.float32), settings[3]).to(tl.float32), settings[0])

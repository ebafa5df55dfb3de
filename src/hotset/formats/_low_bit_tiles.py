# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The tile loaders of formats of few bits: codes are decoded in registers, to the bits of the decoders in torch.

Codes are widened by way of float16, whose subnormal numbers every device converts exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
def nibble(pointer, columns, depth, mask, k: tl.constexpr):
    """The 4-bit codes of a matrix with k inputs, two to a byte, low half first."""
    both = tl.load(pointer + columns * (k // 2) + depth // 2, mask=mask, other=0, eviction_policy="evict_first")
    return (both.to(tl.int32) >> ((depth % 2) * 4)) & 15


@triton.jit
def load_fp8(parts, columns, depth, mask, n: tl.constexpr, k: tl.constexpr, settings: tl.constexpr):
    """Values times their block's scale.

    Settings: type, outputs and inputs of a block, whether scales are exponents, and whether values are E5M2.
    """
    codes = tl.load(parts[0] + columns * k + depth, mask=mask, other=0, eviction_policy="evict_first")
    block_n: tl.constexpr = settings[1] if settings[1] else n
    block_k: tl.constexpr = settings[2] if settings[2] else k
    across: tl.constexpr = (k + block_k - 1) // block_k
    scales = tl.load(parts[1] + (columns // block_n) * across + depth // block_k, mask=mask, other=0)
    factors = e8m0_value(scales) if settings[3] else scales.to(tl.float32)
    values = e5m2_value(codes) if settings[4] else e4m3_value(codes)
    return as_type(tl.where(mask, values * factors, 0.0), settings[0])


@triton.jit
def load_mxfp4(parts, columns, depth, mask, n: tl.constexpr, k: tl.constexpr, settings: tl.constexpr):  # noqa: ARG001
    """E2M1 times the power of two of its 32 inputs; settings: type."""
    codes = nibble(parts[0], columns, depth, mask, k)
    scales = tl.load(parts[1] + columns * (k // 32) + depth // 32, mask=mask, other=0)
    return as_type(fp4_value(codes) * e8m0_value(scales), settings[0])


@triton.jit
def load_nvfp4(parts, columns, depth, mask, n: tl.constexpr, k: tl.constexpr, settings: tl.constexpr):
    """E2M1 times the scale of its 16 inputs and of its matrix; settings: type, matrices, whether to divide by the last.

    The two scales are multiplied first, and rounded to float32, as the libraries do.
    """
    codes = nibble(parts[0], columns, depth, mask, k)
    scales = e4m3_value(tl.load(parts[1] + columns * (k // 16) + depth // 16, mask=mask, other=0))
    # One division: of nothing by nothing where the mask is not set, if the other were 0.
    whole = tl.load(parts[2] + columns // (n // settings[1]) + 0 * depth, mask=mask, other=1.0)
    factors = tl.div_rn(scales, whole) if settings[2] else scales * whole
    return as_type(fp4_value(codes) * factors, settings[0])


@triton.jit
def load_integer(parts, columns, depth, mask, n: tl.constexpr, k: tl.constexpr, settings: tl.constexpr):
    """Codes less their zero point, times the scale of their group, rounded to the scale's type.

    Settings: type, bits, inputs of a group, the scale's type, whether zero points are stored, and how many matrices
    have the groups of their inputs stored.
    """
    bits: tl.constexpr = settings[1]
    group: tl.constexpr = settings[2] if settings[2] else k
    if bits == 4:
        codes = nibble(parts[0], columns, depth, mask, k)
    else:
        codes = tl.load(parts[0] + columns * k + depth, mask=mask, other=0, eviction_policy="evict_first").to(tl.int32)
    groups = depth // group
    if settings[5]:
        matrix = columns // (n // settings[5])
        groups = tl.load(parts[3 if settings[4] else 2] + matrix * k + depth, mask=mask, other=0)
    at = columns * (k // group) + groups
    if settings[4]:
        codes -= tl.load(parts[2] + at, mask=mask, other=0).to(tl.int32)
    else:
        codes -= 1 << (bits - 1)
    scales = tl.load(parts[1] + at, mask=mask, other=0.0).to(tl.float32)
    return as_type(as_type(codes.to(tl.float32) * scales, settings[3]).to(tl.float32), settings[0])

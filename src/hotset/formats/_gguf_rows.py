# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""GGUF's blocks for the kernels of a CPU: 32 weights at a time, in the order in which they lie, to the decoders' bits.

Products of scales and codes are exact in float32, so that only the sum with a least value rounds.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from llvmlite import ir
from numba import types

from hotset.compiling import keep_callback
from hotset.formats import _pair_rows as p
from hotset.formats import _rows as r
from hotset.formats import _vector_memory as m
from hotset.formats import _vector_types as t
from hotset.formats import _vectors as v
from hotset.formats import _whole_rows as w
from hotset.formats._gguf_blocks import FP4_DOUBLED, IQ4_LEVELS


@t.operation(t.floats)
def iq4_levels(b):
    """What the codes of IQ4 stand for."""
    return ir.Constant(t.vector(t.F32), [float(level) for level in IQ4_LEVELS])


@t.operation(t.floats)
def fp4_doubled(b):
    """What the codes of MXFP4 stand for, doubled."""
    return ir.Constant(t.vector(t.F32), [float(value) for value in FP4_DOUBLED])


@t.operation(t.floats, types.int64)
def load_signed(b, address):
    """16 signed bytes as numbers."""
    return b.sitofp(b.sext(t.load_value(b, address, t.vector(t.I8)), t.vector(t.I32)), t.vector(t.F32))


@t.operation(t.ints, types.int64)
def fifth_bits(b, word):
    """The lowest 16 bits of a word, one to a lane, as the fifth bits of codes."""
    lanes = ir.Constant(t.vector(t.I32), list(range(t.LANES)))
    bits = b.lshr(t.spread_value(b, b.trunc(word, t.I32)), lanes)
    return b.shl(b.and_(bits, t.same(t.I32, 1)), t.same(t.I32, 4))


@r.inlined
def block_at(parts, shape, row, number, size):
    """Where a block of a row is."""
    return parts[0] + row * shape[r.ROW_BYTES] + number * size


@r.inlined
def both(table, address):
    """What a table has for the low halves of 16 bytes, and for the high ones."""
    codes = m.load_bytes(address)
    return v.lookup(table, codes), v.lookup(table, v.shift_right(codes, 4))


@r.inlined
def half(address):
    """A float16 in all lanes."""
    return v.spread(m.float16_at(address))


@r.inlined
def times_half(number, address):
    """A whole number times a float16, in all lanes."""
    return v.spread(np.float32(number) * m.float16_at(address))


@r.inlined
def less(number):
    """The numbers 0 to 15, less another."""
    return v.subtract(v.counting(), v.spread(np.float32(number)))


@r.inlined
def q4_0(settings, parts, shape, row, block):
    """A scale; codes less 8."""
    at = block_at(parts, shape, row, block, 18)
    return both(v.multiply(less(8), half(at)), at + 2)


@r.inlined
def q4_1(settings, parts, shape, row, block):
    """A scale and a least value."""
    at = block_at(parts, shape, row, block, 20)
    return both(v.add(v.multiply(v.counting(), half(at)), half(at + 2)), at + 4)


@r.inlined
def of_five_bits(address, word):
    """Codes of 16 bytes and 32 bits, as numbers."""
    codes = m.load_bytes(address)
    first = v.either(v.mask(codes, 15), fifth_bits(word))
    last = v.either(v.shift_right(codes, 4), fifth_bits(word >> 16))
    return v.as_floats(first), v.as_floats(last)


@r.inlined
def q5_0(settings, parts, shape, row, block):
    """A scale, and fifth bits in a word of their own; codes less 16."""
    at = block_at(parts, shape, row, block, 22)
    first, last = of_five_bits(at + 6, m.int32_at(at + 2))
    scale, middle = half(at), v.spread(np.float32(16))
    return v.multiply(v.subtract(first, middle), scale), v.multiply(v.subtract(last, middle), scale)


@r.inlined
def q5_1(settings, parts, shape, row, block):
    """A scale and a least value, and fifth bits in a word of their own."""
    at = block_at(parts, shape, row, block, 24)
    first, last = of_five_bits(at + 8, m.int32_at(at + 4))
    scale, least = half(at), half(at + 2)
    return v.add(v.multiply(first, scale), least), v.add(v.multiply(last, scale), least)


@r.inlined
def q8_0(settings, parts, shape, row, block):
    """A scale, and signed bytes."""
    at = block_at(parts, shape, row, block, 34)
    scale = half(at)
    return v.multiply(load_signed(at + 2), scale), v.multiply(load_signed(at + 18), scale)


@r.inlined
def iq4_nl(settings, parts, shape, row, block):
    """A scale; codes into a table."""
    at = block_at(parts, shape, row, block, 18)
    return both(v.multiply(iq4_levels(), half(at)), at + 2)


@r.inlined
def mxfp4(settings, parts, shape, row, block):
    """An exponent, of which a power of two is made that is half as large."""
    at = block_at(parts, shape, row, block, 17)
    exponent = m.uint8_at(at)
    bits = 0x00200000 << exponent if exponent < 2 else (exponent - 1) << 23
    return both(v.multiply(fp4_doubled(), v.spread(m.float_of(bits))), at + 1)


@r.inlined
def six_bits(at, j):
    """The scale and the least value of each 32 of a block of 256, both of 6 bits, with what they are scaled by."""
    if j < 4:
        scale, least = m.uint8_at(at + 4 + j) & 63, m.uint8_at(at + 8 + j) & 63
    else:
        last = m.uint8_at(at + 8 + j)
        scale = (last & 15) | (m.uint8_at(at + j) >> 6 << 4)
        least = (last >> 4) | (m.uint8_at(at + 4 + j) >> 6 << 4)
    return times_half(scale, at), times_half(least, at + 2)


@r.inlined
def q4_k(settings, parts, shape, row, block):
    """Chunks of 32 bytes: the low halves are 32 weights, the high ones the next."""
    at, j = block_at(parts, shape, row, block // 8, 144), block % 8
    scale, least = six_bits(at, j)
    table, place, shift = v.subtract(v.multiply(v.counting(), scale), least), at + 16 + j // 2 * 32, j % 2 * 4
    first = v.lookup(table, v.shift_right(m.load_bytes(place), shift))
    return first, v.lookup(table, v.shift_right(m.load_bytes(place + 16), shift))


@r.inlined
def code_of_q5_k(at, j, place):
    """16 codes as numbers: bit j of a byte of fifth bits is one's of the j-th 32."""
    low = v.mask(v.shift_right(m.load_bytes(at + 48 + j // 2 * 32 + place), j % 2 * 4), 15)
    fifth = v.mask(v.shift_right(m.load_bytes(at + 16 + place), j), 1)
    return v.as_floats(v.either(low, v.shift_left(fifth, 4)))


@r.inlined
def q5_k(settings, parts, shape, row, block):
    """As Q4_K, with fifth bits."""
    at, j = block_at(parts, shape, row, block // 8, 176), block % 8
    scale, least = six_bits(at, j)
    first = v.subtract(v.multiply(code_of_q5_k(at, j, 0), scale), least)
    return first, v.subtract(v.multiply(code_of_q5_k(at, j, 16), scale), least)


@r.inlined
def some_of_q6_k(at, j, place):
    """16 weights: low 4 bits, high 2 bits, and a signed scale."""
    part, quarter = j // 4, j % 4
    low = v.shift_right(m.load_bytes(at + 64 * part + quarter % 2 * 32 + place), quarter // 2 * 4)
    high = v.shift_right(m.load_bytes(at + 128 + 32 * part + place), 2 * quarter)
    codes = v.either(v.mask(low, 15), v.shift_left(v.mask(high, 3), 4))
    scale = (m.uint8_at(at + 192 + 2 * j + place // 16) ^ 128) - 128
    return v.multiply(v.subtract(v.as_floats(codes), v.spread(np.float32(32))), times_half(scale, at + 208))


@r.inlined
def q6_k(settings, parts, shape, row, block):
    """The scale of scales is the last of a block."""
    at = block_at(parts, shape, row, block // 8, 210)
    return some_of_q6_k(at, block % 8, 0), some_of_q6_k(at, block % 8, 16)


@r.inlined
def iq4_xs(settings, parts, shape, row, block):
    """Scales of 6 bits, less 32, for each 32."""
    at, j = block_at(parts, shape, row, block // 8, 136), block % 8
    low = (m.uint8_at(at + 4 + j // 2) >> (j % 2 * 4)) & 15
    high = (m.uint8_at(at + 2 + j // 4) >> (j % 4 * 2)) & 3
    return both(v.multiply(iq4_levels(), times_half((low | high << 4) - 32, at)), at + 8 + 16 * j)


WEIGHTS = {
    "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k,
    "IQ4_NL": iq4_nl, "IQ4_XS": iq4_xs, "MXFP4": mxfp4,
}  # fmt: skip


def row_kernels(dtype: str, kind: str, outputs: int) -> r.RowKernels | None:
    """The kernels of matrices in blocks of a kind; None where there are none."""
    if dtype not in r.TYPES or kind not in WEIGHTS or not outputs or not t.has_half():
        return None
    pairs = dtype == "bfloat16" and t.has_pairs()
    product = _product(kind, (r.TYPES[dtype],), pairs)
    return r.RowKernels(product, _expand(kind), w.arranged(32, 1, pairs, False), 32, pairs, False)


@cache
def _product(kind: str, settings: tuple[int, ...], pairs: bool) -> int:
    """Of weights rounded to the type computed in, as the decoder's are; settings: that type."""
    weights = WEIGHTS[kind]

    def by_pairs(args):
        r.multiply(args, p.step_rounded, p.steps_rounded, weights, settings)

    def blocks(args):
        r.multiply(args, r.step_typed, r.steps_typed, weights, settings)

    return keep_callback(by_pairs if pairs else blocks)


@cache
def _expand(kind: str) -> int:
    weights = WEIGHTS[kind]

    def blocks(args):
        w.expand(args, weights, (), False)

    return keep_callback(blocks)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Arithmetic of vectors."""

from __future__ import annotations

import struct
from functools import cache

from llvmlite import binding, ir
from numba import types

from hotset.formats._vector_types import (
    F16,
    F32,
    I16,
    I32,
    LANES,
    PAIRED,
    call,
    features,
    few,
    floats,
    has_half,
    ints,
    operation,
    order,
    same,
    spread_value,
    vector,
    words,
)


@operation(floats)
def zeros(b):
    """16 times zero."""
    return same(F32, 0.0)


@operation(floats)
def counting(b):
    """The numbers 0 to 15: the codes of 4 bits."""
    return ir.Constant(vector(F32), [float(number) for number in range(LANES)])


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@operation(floats)
def fp4_values(b):
    """What the codes of E2M1 stand for."""
    return ir.Constant(vector(F32), list(FP4))


@operation(floats, types.float32)
def spread(b, value):
    """One number 16 times."""
    return spread_value(b, value)


@operation(floats, types.float32, types.float32)
def in_halves(b, first, last):
    """One number 8 times, then another."""
    return b.shuffle_vector(
        spread_value(b, first), spread_value(b, last), order(*(16 * (lane // 8) for lane in range(LANES)))
    )


@operation(floats, floats, floats, floats)
def multiply_add(b, x, y, z):
    """x * y + z, rounded once."""
    return call(b, "llvm.fma.v16f32", vector(F32), x, y, z)


@operation(floats, floats, floats)
def multiply(b, x, y):
    """x * y."""
    return b.fmul(x, y)


@operation(floats, floats, floats)
def add(b, x, y):
    """x + y."""
    return b.fadd(x, y)


@operation(floats, floats, floats)
def subtract(b, x, y):
    """x - y."""
    return b.fsub(x, y)


@operation(floats, floats, floats)
def divide(b, x, y):
    """x / y."""
    return b.fdiv(x, y)


@operation(ints, ints, types.int64)
def shift_right(b, codes, bits):
    """Codes without their lowest bits."""
    return b.lshr(codes, spread_value(b, b.trunc(bits, I32)))


@operation(ints, ints, types.int64)
def mask(b, codes, wanted):
    """The wanted bits of codes."""
    return b.and_(codes, spread_value(b, b.trunc(wanted, I32)))


@operation(ints, ints, ints)
def either(b, some, others):
    """The bits that either has."""
    return b.or_(some, others)


@operation(ints, ints, types.int64)
def shift_left(b, codes, bits):
    """Codes times a power of two."""
    return b.shl(codes, spread_value(b, b.trunc(bits, I32)))


@operation(floats, ints)
def as_floats(b, codes):
    """Whole numbers as numbers."""
    return b.sitofp(codes, vector(F32))


@operation(floats, floats, ints)
def lookup(b, table, codes):
    """The numbers of a table of 16 that the lowest 4 bits of codes say."""
    if "avx512f" in features():
        return call(b, "llvm.x86.avx512.permvar.sf.512", vector(F32), table, codes)
    if "avx2" in features():
        return _lookup_avx2(b, table, codes)
    found, low = ir.Constant(vector(F32), ir.Undefined), b.and_(codes, same(I32, 15))
    for lane in range(LANES):
        place = b.extract_element(low, ir.Constant(I32, lane))
        found = b.insert_element(found, b.extract_element(table, place), ir.Constant(I32, lane))
    return found


def _lookup_avx2(b, table, codes):
    """Both halves of the table, for both halves of the codes."""
    low, high = (b.shuffle_vector(table, table, order(*range(at, at + 8))) for at in (0, 8))
    halves = []
    for at in (0, 8):
        some = b.shuffle_vector(codes, codes, order(*range(at, at + 8)))
        below, above = (call(b, "llvm.x86.avx2.permps", vector(F32, 8), half, some) for half in (low, high))
        upper = b.icmp_unsigned("!=", b.and_(some, same(I32, 8, 8)), same(I32, 0, 8))
        halves.append(b.select(upper, above, below))
    return b.shuffle_vector(*halves, order(*range(LANES)))


@operation(few, floats, floats, floats, floats)
def four_totals(b, *sums):
    """The sums of four vectors."""
    quarters = []
    for x in sums:
        for count in (8, 4):
            x = b.fadd(*(b.shuffle_vector(x, x, order(*range(at, at + count))) for at in (0, count)))
        quarters.append(x)
    pairs = [
        b.fadd(*(b.shuffle_vector(one, other, order(at, at + 1, at + 4, at + 5)) for at in (0, 2)))
        for one, other in (quarters[:2], quarters[2:])
    ]
    return b.fadd(*(b.shuffle_vector(*pairs, order(at, at + 2, at + 4, at + 6)) for at in (0, 1)))


@operation(types.float32, floats)
def total(b, x):
    """The sum of 16 numbers, halves first."""
    count = LANES
    while count > 1:
        count //= 2
        low, high = (b.shuffle_vector(x, x, order(*range(at, at + count))) for at in (0, count))
        x = b.fadd(low, high)
    return b.extract_element(x, ir.Constant(I32, 0))


def upper_half(b, x):
    """The bits of numbers rounded to bfloat16."""
    count = x.type.count
    bits = b.bitcast(x, vector(I32, count))
    odd = b.and_(b.lshr(bits, same(I32, 16, count)), same(I32, 1, count))
    rounded = b.add(bits, b.add(odd, same(I32, 0x7FFF, count)))
    none = b.fcmp_unordered("uno", x, x)
    bits = b.select(none, same(I32, 0x7FC00000, count), rounded)
    return b.trunc(b.lshr(bits, same(I32, 16, count)), vector(I16, count))


@operation(floats, floats)
def rounded_bfloat16(b, x):
    """Numbers rounded to this type."""
    bits = b.zext(upper_half(b, x), vector(I32))
    return b.bitcast(b.shl(bits, same(I32, 16)), vector(F32))


@operation(floats, floats)
def rounded_float16(b, x):
    """Numbers rounded to this type."""
    return b.fpext(b.fptrunc(x, vector(F16)), vector(F32)) if has_half() else x


@operation(floats, floats, floats)
def even_places(b, first, last):
    """Of 32 numbers, those at even places."""
    return b.shuffle_vector(first, last, order(*range(0, 2 * LANES, 2)))


@operation(floats, floats, floats)
def odd_places(b, first, last):
    """Of 32 numbers, those at odd places."""
    return b.shuffle_vector(first, last, order(*range(1, 2 * LANES, 2)))


@operation(floats, floats, floats)
def first_in_turn(b, even, odd):
    """The first 16 of numbers that were taken apart into those at even and at odd places."""
    return b.shuffle_vector(even, odd, order(*(lane // 2 + LANES * (lane % 2) for lane in range(LANES))))


@operation(floats, floats, floats)
def last_in_turn(b, even, odd):
    """The last 16 of them."""
    return b.shuffle_vector(even, odd, order(*(8 + lane // 2 + LANES * (lane % 2) for lane in range(LANES))))


@operation(words, words, types.int64)
def shift_words(b, codes, bits):
    """Words without their lowest bits."""
    return b.lshr(codes, spread_value(b, b.trunc(bits, I16), PAIRED))


def _twice(numbers: tuple[float, ...]) -> ir.Constant:
    """A table of 16 numbers as bfloat16, twice: the fifth bit of a code belongs to another."""
    bits = [struct.unpack("<I", struct.pack("<f", number))[0] >> 16 for number in numbers]
    return ir.Constant(vector(I16, PAIRED), bits * 2)


@operation(words)
def middle_words(b):
    """The numbers -8 to 7."""
    return _twice(tuple(float(number - 8) for number in range(16)))


@operation(words)
def fp4_words(b):
    """What the codes of E2M1 stand for."""
    return _twice(FP4)


@operation(words, words, words)
def lookup_words(b, table, codes):
    """The numbers of a table that is there twice which the lowest 4 bits of words say."""
    return call(b, "llvm.x86.avx512.permvar.hi.512", vector(I16, PAIRED), table, codes)


@operation(words, floats, floats)
def rounded_words(b, first, last):
    """Numbers rounded to bfloat16: 16, then 16 more."""
    _asm_parser()
    kind = ir.FunctionType(vector(I16, PAIRED), [first.type, last.type])
    return b.asm(kind, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v", [first, last], side_effect=False)


@operation(floats, floats, words, words)
def add_pairs(b, sums, x, y):
    """Sums with the products of two bfloat16 numbers added to each."""
    _asm_parser()
    kind = ir.FunctionType(sums.type, [sums.type, x.type, y.type])
    return b.asm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", [sums, x, y], side_effect=False)


@cache
def _asm_parser() -> None:
    """LLVM's names of these instructions have changed their types between versions; the processor's have not."""
    binding.initialize_native_asmparser()

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Vectors and numbers from and to memory, by address."""

from __future__ import annotations

from llvmlite import ir
from numba import types

from hotset.formats._vector_types import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    PAIRED,
    call,
    few,
    floats,
    has_half,
    ints,
    load_value,
    operation,
    order,
    same,
    store_value,
    vector,
    words,
)
from hotset.formats._vectors import upper_half


@operation(types.int64, types.int64)
def int64_at(b, address):
    """The whole number at an address."""
    return load_value(b, address, I64)


@operation(types.int64, types.int64)
def uint8_at(b, address):
    """The byte at an address."""
    return b.zext(load_value(b, address, I8), I64)


@operation(types.int64, types.int64)
def int32_at(b, address):
    """The whole number of 32 bits at an address."""
    return b.sext(load_value(b, address, I32), I64)


@operation(types.float32, types.int64)
def float32_at(b, address):
    """The number at an address."""
    return load_value(b, address, F32)


@operation(types.float32, types.int64)
def bfloat16_at(b, address):
    """The number of this type at an address."""
    return b.bitcast(b.shl(b.zext(load_value(b, address, I16), I32), ir.Constant(I32, 16)), F32)


@operation(types.float32, types.int64)
def float16_at(b, address):
    """The number of this type at an address."""
    return b.fpext(load_value(b, address, F16), F32) if has_half() else ir.Constant(F32, 0.0)


@operation(types.float32, types.int64)
def float_of(b, bits):
    """The number of these bits."""
    return b.bitcast(b.trunc(bits, I32), F32)


@operation(types.void, types.int64, types.float32)
def put_float32(b, address, value):
    """Store a number."""
    store_value(b, address, value)


@operation(types.void, types.int64, types.float32)
def put_bfloat16(b, address, value):
    """Round a number to this type, and store it."""
    one = b.insert_element(ir.Constant(vector(F32, 1), ir.Undefined), value, ir.Constant(I32, 0))
    store_value(b, address, upper_half(b, one))


@operation(types.void, types.int64, types.int64, few)
def put_four(b, address, kind, numbers):
    """Store four numbers in the type of this number: float32, bfloat16 or float16."""
    with b.if_then(b.icmp_signed("==", kind, ir.Constant(I64, 0))):
        store_value(b, address, numbers)
    with b.if_then(b.icmp_signed("==", kind, ir.Constant(I64, 1))):
        store_value(b, address, upper_half(b, numbers))
    if has_half():
        with b.if_then(b.icmp_signed("==", kind, ir.Constant(I64, 2))):
            store_value(b, address, b.fptrunc(numbers, vector(F16, 4)))


@operation(types.void, types.int64, types.float32)
def put_float16(b, address, value):
    """Round a number to this type, and store it."""
    if has_half():
        store_value(b, address, b.fptrunc(value, F16))


@operation(types.int64, types.int64)
def take_next(b, address):
    """The whole number at an address, which becomes greater by one: every thread gets another."""
    return b.atomic_rmw("add", b.inttoptr(address, I64.as_pointer()), ir.Constant(I64, 1), "monotonic")


@operation(types.void, types.int64)
def prefetch(b, address):
    """Have the memory at an address brought near, which need not be there."""
    pointer = b.inttoptr(address, I8.as_pointer())
    call(b, "llvm.prefetch.p0", ir.VoidType(), pointer, *(ir.Constant(I32, number) for number in (0, 3, 1)))


@operation(floats, types.int64)
def load_float32(b, address):
    """16 numbers."""
    return load_value(b, address, vector(F32))


@operation(floats, types.int64)
def load_bfloat16(b, address):
    """16 numbers of this type."""
    bits = b.zext(load_value(b, address, vector(I16)), vector(I32))
    return b.bitcast(b.shl(bits, same(I32, 16)), vector(F32))


@operation(words, types.int64)
def load_nibbles(b, address):
    """16 bytes as words, and the same without their low halves; what is above the lowest 4 bits belongs to others."""
    codes = b.zext(load_value(b, address, vector(I8)), vector(I16))
    twice = b.shuffle_vector(codes, codes, order(*range(LANES), *range(LANES)))
    return b.lshr(twice, ir.Constant(vector(I16, 2 * LANES), [0] * LANES + [4] * LANES))


@operation(types.void, types.int64, types.int64, types.int64)
def copy_words(b, source, target, shares):
    """Put 32 words as they are, or in two shares: those at even places, then those at odd ones."""
    whole = load_value(b, source, vector(I16, 32))
    apart = b.shuffle_vector(whole, whole, order(*range(0, 32, 2), *range(1, 32, 2)))
    store_value(b, target, b.select(b.icmp_signed("==", shares, ir.Constant(I64, 2)), apart, whole))


@operation(types.void, types.int64, types.int64)
def take_apart(b, source, target):
    """Put 128 words so that every fourth follows the other: the first of each four, then the second..."""
    whole = load_value(b, source, vector(I16, 128))
    for share in range(4):
        chosen = b.shuffle_vector(whole, whole, order(*range(share, 128, 4)))
        store_value(b, b.add(target, ir.Constant(I64, 64 * share)), chosen)


@operation(ints, types.int64)
def load_bytes(b, address):
    """16 bytes."""
    return b.zext(load_value(b, address, vector(I8)), vector(I32))


@operation(ints, types.int64)
def load_ints(b, address):
    """16 whole numbers of 32 bits."""
    return load_value(b, address, vector(I32))


@operation(floats, types.int64)
def load_e4m3(b, address):
    """16 E4M3 numbers: exponent and fraction are those of a float16 2^8 times as small."""
    return _small_float(b, address, 7, 256.0)


@operation(floats, types.int64)
def eight_e4m3(b, address):
    """8 E4M3 numbers, each twice."""
    return _each(b, _small_float(b, address, 7, 256.0, LANES // 2), 2)


@operation(floats, types.int64)
def two_e4m3(b, address):
    """2 E4M3 numbers, each 8 times."""
    return _each(b, _small_float(b, address, 7, 256.0, 2), 8)


@operation(floats, types.int64)
def load_e5m2(b, address):
    """16 E5M2 numbers, which are the upper bytes of float16."""
    return _small_float(b, address, 8, 1.0)


def _small_float(b, address, shift: int, factor: float, count: int = LANES):
    if not has_half():
        return same(F32, 0.0, count)
    codes = b.zext(load_value(b, address, vector(I8, count)), vector(I16, count))
    size = b.shl(b.and_(codes, same(I16, 0x7F, count)), same(I16, shift, count))
    sign = b.shl(b.and_(codes, same(I16, 0x80, count)), same(I16, 8, count))
    numbers = b.fpext(b.bitcast(b.or_(size, sign), vector(F16, count)), vector(F32, count))
    if factor == 1.0:
        return numbers
    none = b.icmp_unsigned("==", b.and_(codes, same(I16, 0x7F, count)), same(I16, 0x7F, count))
    return b.select(none, same(F32, float("nan"), count), b.fmul(numbers, same(F32, factor, count)))


@operation(types.void, types.int64, floats)
def store_float32(b, address, x):
    """Store 16 numbers."""
    store_value(b, address, x)


@operation(types.void, types.int64, floats)
def store_bfloat16(b, address, x):
    """Round 16 numbers to this type, and store them."""
    store_value(b, address, upper_half(b, x))


@operation(types.void, types.int64, floats)
def store_float16(b, address, x):
    """Round 16 numbers to this type, and store them."""
    if has_half():
        store_value(b, address, b.fptrunc(x, vector(F16)))


@operation(floats, types.int64)
def four_bfloat16(b, address):
    """Four numbers, each four times."""
    few = b.zext(load_value(b, address, vector(I16, 4)), vector(I32, 4))
    return b.bitcast(b.shl(_each(b, few, 4), same(I32, 16)), vector(F32))


@operation(floats, types.int64)
def four_float16(b, address):
    """Four numbers, each four times."""
    if not has_half():
        return same(F32, 0.0)
    return _each(b, b.fpext(load_value(b, address, vector(F16, 4)), vector(F32, 4)), 4)


@operation(floats, types.int64)
def four_float32(b, address):
    """Four numbers, each four times."""
    return _each(b, load_value(b, address, vector(F32, 4)), 4)


@operation(floats, types.int64)
def four_bytes(b, address):
    """Four bytes as numbers, each four times."""
    return b.uitofp(_each(b, b.zext(load_value(b, address, vector(I8, 4)), vector(I32, 4)), 4), vector(F32))


@operation(floats, types.int64)
def four_powers(b, address):
    """Four powers of two by their exponent bytes, each four times: 0 is a subnormal number, 255 none."""
    bytes_ = _each(b, b.zext(load_value(b, address, vector(I8, 4)), vector(I32, 4)), 4)
    bits = b.shl(bytes_, same(I32, 23))
    bits = b.select(b.icmp_unsigned("==", bytes_, same(I32, 0)), same(I32, 0x00400000), bits)
    bits = b.select(b.icmp_unsigned("==", bytes_, same(I32, 255)), same(I32, 0x7FC00000), bits)
    return b.bitcast(bits, vector(F32))


def _each(b, few, times: int):
    return b.shuffle_vector(few, few, order(*(lane // times for lane in range(LANES))))


@operation(words, types.int64)
def load_words(b, address):
    """32 words."""
    return load_value(b, address, vector(I16, PAIRED))

# mypy: allow-untyped-defs, allow-untyped-calls
"""Integers in groups for the kernels of a CPU.

The definition rounds a weight to the type of its scale, and so do products, by a table of the 16 weights of a group for
codes of 4 bits. Without that the scale of a group could be multiplied with the sum of its products, which is faster:
it is done where weights need no rounding, since their scales have few digits.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from hotset.compiling import keep_callback
from hotset.formats import _code_rows as c
from hotset.formats import _pair_rows as p
from hotset.formats import _rows as r
from hotset.formats import _vector_memory as m
from hotset.formats import _vector_types as t
from hotset.formats import _vectors as v
from hotset.formats import _whole_rows as w

SCALES = {"float32": 0, "bfloat16": 1, "float16": 2}


@r.inlined
def scale_at(address, kind, number):
    """A scale of a type by its number."""
    return r.number_at(address + (4 if kind == 0 else 2) * number, kind)


@r.inlined
def group_of(settings, parts, shape, row, block):
    """The scale and the zero point of a block of 32 inputs."""
    bits, group, kind, zeros, _rounds, _type = settings
    number = row * (shape[r.INPUTS] // group) + 32 * block // group if group else row
    middle = m.uint8_at(parts[2] + number) if zeros else (8 if bits == 4 else 128)
    return v.spread(scale_at(parts[1], kind, number)), v.spread(np.float32(middle))


@r.inlined
def as_defined(numbers, settings):
    """Weights rounded to the scale's type, and to the type computed in."""
    return r.as_type(r.as_type(numbers, settings[2] if settings[4] else 0), settings[5])


@r.inlined
def table(settings, parts, shape, row, block):
    """The 16 weights of the group of a block; settings as those of `weights`."""
    scale, zero = group_of(settings, parts, shape, row, block)
    return as_defined(v.multiply(v.subtract(v.counting(), zero), scale), settings)


@r.inlined
def weights(settings, parts, shape, row, block):
    """32 weights of a row.

    Settings: bits, inputs of a group or 0, the scale's type, whether there are zero points, whether to round to the
    scale's type, and to which other type.
    """
    if settings[0] == 4:
        numbers = table(settings, parts, shape, row, block)
        codes = m.load_bytes(parts[0] + row * (shape[r.INPUTS] // 2) + 16 * block)
        return v.lookup(numbers, codes), v.lookup(numbers, v.shift_right(codes, 4))
    scale, zero = group_of(settings, parts, shape, row, block)
    at = parts[0] + row * shape[r.INPUTS] + 32 * block
    first = v.multiply(v.subtract(v.as_floats(m.load_bytes(at)), zero), scale)
    last = v.multiply(v.subtract(v.as_floats(m.load_bytes(at + 16)), zero), scale)
    return as_defined(first, settings), as_defined(last, settings)


@r.inlined
def four_scales(address, kind, number):
    """Four scales next to each other, each for four lanes."""
    if kind == 0:
        return m.four_float32(address + 4 * number)
    if kind == 1:
        return m.four_bfloat16(address + 2 * number)
    return m.four_float16(address + 2 * number)


@r.inlined
def factors(settings, parts, shape, row, block):
    """The scales of 128 codes of 4 bits, and how far their zero points are from the middle.

    Settings: what codes stand for, whether there are zero points, inputs of a group or 0, the scale's type.
    """
    _codes, zeros, group, kind = settings
    inputs = shape[r.INPUTS]
    first = min(128 * block, inputs - 128)
    number = row * (inputs // group) + first // group if group else row
    eight = v.spread(np.float32(8))
    offsets = v.zeros()
    if group == 32:
        scales = four_scales(parts[1], kind, number)
        if zeros:
            offsets = v.subtract(m.four_bytes(parts[2] + number), eight)
    elif group == 64:
        scales = v.in_halves(scale_at(parts[1], kind, number), scale_at(parts[1], kind, number + 1))
        if zeros:
            low, high = m.uint8_at(parts[2] + number), m.uint8_at(parts[2] + number + 1)
            offsets = v.subtract(v.in_halves(np.float32(low), np.float32(high)), eight)
    else:
        scales = v.spread(scale_at(parts[1], kind, number))
        if zeros:
            offsets = v.subtract(v.spread(np.float32(m.uint8_at(parts[2] + number))), eight)
    return scales, offsets


@cache
def row_kernels(
    dtype: str, bits: int, group: int, scales: str, zeros: bool, rounds: bool, outputs: int, inputs: int
) -> r.RowKernels | None:
    """The kernels of matrices of this shape in a format of integers; None where there are none."""
    if dtype not in r.TYPES or inputs % 32 or group % 32 or not outputs or not t.can_compute(dtype, scales):
        return None
    kind, own, shares = SCALES[scales], r.TYPES[dtype], 2 if bits == 4 else 1
    options = (bits, group, kind, int(zeros))
    expand = _expand((*options, 1, 0), bits == 4)
    pairs = dtype == "bfloat16" and t.has_pairs()
    fits = inputs >= 128 and (group in (32, 64) or (group % 128 == 0 and inputs % 128 == 0))
    if bits == 4 and not rounds and fits and t.has_lookup():
        product = _product_of_codes((c.MIDDLE_CODES, int(zeros), group, kind), pairs)
        return r.RowKernels(product, expand, w.arranged(128, 4 if pairs else 8, pairs, zeros), 128, pairs, zeros)
    if pairs:  # which round to bfloat16 by themselves
        product = _product_of_pairs((*options, int(rounds and scales != dtype), 0))
    else:
        product = _product((*options, int(rounds), own if rounds and kind != own else 0))
    return r.RowKernels(product, expand, w.arranged(32, shares, pairs, False), 32, pairs, False)


@cache
def _product(settings: tuple[int, ...]) -> int:
    def kernel(args):
        r.multiply(args, r.step_32, r.steps_32, weights, settings)

    return keep_callback(kernel)


@cache
def _product_of_pairs(settings: tuple[int, ...]) -> int:
    def by_table(args):
        r.multiply(args, p.step_table, p.steps_table, table, settings)

    def by_weights(args):
        r.multiply(args, p.step_rounded, p.steps_rounded, weights, settings)

    return keep_callback(by_table if settings[0] == 4 else by_weights)


@cache
def _product_of_codes(settings: tuple[int, ...], pairs: bool) -> int:
    def by_pairs(args):
        r.multiply(args, c.step_pairs, c.steps_pairs, factors, settings)

    def by_floats(args):
        r.multiply(args, c.step_codes, c.steps_codes, factors, settings)

    return keep_callback(by_pairs if pairs else by_floats)


@cache
def _expand(settings: tuple[int, ...], in_turn: bool) -> int:
    def kernel(args):
        w.expand(args, weights, settings, in_turn)

    return keep_callback(kernel)

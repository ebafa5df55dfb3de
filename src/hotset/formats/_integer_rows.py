# mypy: allow-untyped-defs, allow-untyped-calls
"""Integers in groups for the kernels of a CPU.

The definition rounds a weight to the type of its scale. Where the type computed in has more digits, so do products, by
a table of the 16 rounded weights of a group. Elsewhere they go without: the scale of a group is multiplied with the sum
of its products, which is three times as fast, and within what the type computed in can tell.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from hotset.compiling import keep_callback
from hotset.formats import _code_rows as c
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
def as_scale(numbers, kind):
    """Numbers rounded to the type of a scale."""
    if kind == 1:
        return v.rounded_bfloat16(numbers)
    if kind == 2:
        return v.rounded_float16(numbers)
    return numbers


@r.inlined
def weights(settings, parts, shape, row, block):
    """32 weights of a row; settings: bits, inputs of a group or 0, the scale's type, whether there are zero points, and
    whether to round to the scale's type."""
    bits, group, kind, zeros, rounds = settings
    inputs = shape[r.INPUTS]
    number = row * (inputs // group) + 32 * block // group if group else row
    middle = m.uint8_at(parts[2] + number) if zeros else (8 if bits == 4 else 128)
    scale, zero = v.spread(scale_at(parts[1], kind, number)), v.spread(np.float32(middle))
    if bits == 4:
        table = v.multiply(v.subtract(v.counting(), zero), scale)
        table = as_scale(table, kind) if rounds else table
        codes = m.load_bytes(parts[0] + row * (inputs // 2) + 16 * block)
        return v.lookup(table, codes), v.lookup(table, v.shift_right(codes, 4))
    at = parts[0] + row * inputs + 32 * block
    first = v.multiply(v.subtract(v.as_floats(m.load_bytes(at)), zero), scale)
    last = v.multiply(v.subtract(v.as_floats(m.load_bytes(at + 16)), zero), scale)
    return (as_scale(first, kind), as_scale(last, kind)) if rounds else (first, last)


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
    kind = SCALES[scales]
    exact = (bits, group, kind, int(zeros), 1)
    expand = _expand(exact, bits == 4)
    fits = inputs >= 128 and (group in (32, 64) or group % 128 == 0) and (inputs % 128 == 0 or group in (32, 64))
    if bits == 4 and not rounds and fits and t.has_lookup():
        pairs = dtype == "bfloat16" and t.has_pairs()
        product = _product_of_codes((c.MIDDLE_CODES, int(zeros), group, kind), pairs)
        return r.RowKernels(product, expand, w.arranged(128, 4 if pairs else 8, pairs, zeros), 128, pairs, zeros)
    product = _product((*exact[:4], int(rounds)))
    return r.RowKernels(product, expand, w.arranged(32, 2 if bits == 4 else 1, False, False), 32, False, False)


@cache
def _product(settings: tuple[int, ...]) -> int:
    def kernel(args):
        r.multiply(args, r.step_32, r.steps_32, weights, settings)

    return keep_callback(kernel)


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

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
# ruff: noqa: RUF005, SIM102, SIM108 - Triton's language has no other way to say these
"""The two kernels of an expert whose matrices are packed: 16 bytes of codes are one thread's load, decoded by PTX.

Such 16 bytes are a unit. The threads of a warp lie along a row, a unit each; so many units side by side are a chunk. A
program loads what it needs of its rows at once, without masks: places beyond a row's end are its last unit, and the
input is zero there. `order_kernel` brings the model's input into the order that threads want it in, and the first
kernel writes what the second one reads.

Phases are those of the kernels for tiles, see there: one binary serves all, so that they cannot differ in a bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hotset.engine.kernels.activations import rounded
from hotset.engine.kernels.triton_kernels import (
    _EARLY,
    _KEEP,
    _LAST,
    _LATE,
    _biased,
    _is_wanted,
    _note_time,
)
from hotset.engine.kernels.unit_loads import inputs_of, load_codes, place_of, plus


@triton.jit
def order_kernel(
    x, ordered, k: tl.constexpr, padded: tl.constexpr, unit: tl.constexpr, order: tl.constexpr, lanes: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Bring the inputs of every token into the order of the first product, as float32, with zeros behind them."""
    token = tl.program_id(0)
    number = tl.program_id(1) * block + tl.arange(0, block)
    given = tl.load(x + token * k + number, mask=number < k, other=0.0).to(tl.float32)
    tl.store(ordered + token * padded + place_of(number, unit, order, lanes), given, mask=number < padded)


@triton.jit
def _addresses(parts, strides, row):
    """The addresses of a matrix's parts, as numbers; three, whether there are so many or not."""
    first = parts[0].to(tl.int64) + row * strides[0]
    if len(parts) > 1:
        second = parts[1].to(tl.int64) + row * strides[1] * (parts[1].dtype.element_ty.primitive_bitwidth // 8)
    else:
        second = first
    if len(parts) > 2:
        third = parts[2].to(tl.int64) + row * strides[2] * (parts[2].dtype.element_ty.primitive_bitwidth // 8)
    else:
        third = second
    return first, second, third


@triton.jit
def _whole(matrix, rows, inside, shape: tl.constexpr):
    """The scale of the whole matrix that rows belong to, where matrices below each other have one."""
    pointer = matrix[2].to(tl.pointer_type(tl.float32))
    return tl.load(pointer + rows // shape[6], mask=inside, other=1.0)


@triton.jit
def _scaled(product, matrix, rows, inside, shape: tl.constexpr):
    """A product times the scale of its whole matrix, or divided by it."""
    if shape[5] == 0:
        return product
    elif shape[5] == 1:  # noqa: RET505 - Triton wants all arms of a choice at compile time
        return product * _whole(matrix, rows, inside, shape)
    else:
        return tl.div_rn(product, _whole(matrix, rows, inside, shape))


@triton.jit
def _two_rows(
    x, matrix, first, second, two: tl.constexpr, k: tl.constexpr, shape: tl.constexpr,
    multiply: tl.constexpr, constraints: tl.constexpr, rows: tl.constexpr, lanes: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
    """One input times two times so many rows of a matrix, or only the first, with all loads of a round under way."""
    units: tl.constexpr = k // shape[0]
    chunks: tl.constexpr = (units + lanes - 1) // lanes
    own = tl.arange(0, lanes)[None, :]
    total = tl.zeros((rows, lanes), tl.float32)
    other = total
    for step in tl.range(0, (chunks + unroll - 1) // unroll):
        begin = step * (unroll * lanes)
        at = tl.minimum(begin + own, units - 1)
        codes = load_codes(matrix, first[:, None], at, k, shape)
        if two:
            codes = codes + load_codes(matrix, second[:, None], at, k, shape)
        for turn in tl.static_range(1, unroll):
            at = tl.minimum(begin + turn * lanes + own, units - 1)
            codes = codes + load_codes(matrix, first[:, None], at, k, shape)
            if two:
                codes = codes + load_codes(matrix, second[:, None], at, k, shape)
        for turn in tl.static_range(unroll):
            given = inputs_of(x + (begin + turn * lanes).to(tl.int64) * (shape[0] * 4) + own * 16, shape[0], lanes)
            if two:
                total = plus(total, codes, 2 * turn, given, own, shape, multiply, constraints)
                other = plus(other, codes, 2 * turn + 1, given, own, shape, multiply, constraints)
            else:
                total = plus(total, codes, turn, given, own, shape, multiply, constraints)
    return tl.sum(total, axis=1), tl.sum(other, axis=1)


@triton.jit(do_not_specialize=["phase", "pair_row", "pair_late", "stamp"])
def up_units_kernel(
    x, w, bias, h, pair_row, pair_late, phase, stamp, strides, bias_stride,
    n: tl.constexpr, k: tl.constexpr, top_k: tl.constexpr, activate: tl.constexpr, alpha: tl.constexpr,
    limit: tl.constexpr, gated: tl.constexpr, interleaved: tl.constexpr, dtype: tl.constexpr, has_bias: tl.constexpr,
    clocked: tl.constexpr, x_padded: tl.constexpr, h_padded: tl.constexpr, h_unit: tl.constexpr,
    h_order: tl.constexpr, h_lanes: tl.constexpr, shape: tl.constexpr, multiply: tl.constexpr,
    constraints: tl.constexpr, rows: tl.constexpr, lanes: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
    """h[pair] = the gate of x[token] times the first matrix, n columns of it, for so many columns of one pair."""
    pair = tl.program_id(0)
    if clocked:
        _note_time(stamp + 1, phase == _LATE)
    row = tl.load(pair_row + pair)
    if not _is_wanted(row, tl.load(pair_late + pair), phase):
        return
    at = row.to(tl.int64)
    matrix = _addresses(w, strides, at)
    biases = bias + at * bias_stride
    token = x.to(tl.int64) + (pair // top_k) * (x_padded * 4)
    columns = tl.program_id(1) * rows + tl.arange(0, rows)
    inside = columns < n
    own = tl.minimum(columns, n - 1)
    if gated and interleaved:
        first, second = own * 2, own * 2 + 1
    else:
        first, second = own, own + n
    gate, up = _two_rows(token, matrix, first, second, gated, k, shape, multiply, constraints, rows, lanes, unroll)
    gate = _biased(_scaled(gate, matrix, first, inside, shape), biases, first, inside, has_bias, dtype)
    if gated:
        up = _biased(_scaled(up, matrix, second, inside, shape), biases, second, inside, has_bias, dtype)
    else:
        up = gate
    result = rounded(activate(gate, up, alpha, limit, dtype), dtype)
    target = h + pair * h_padded
    tl.store(target + place_of(columns, h_unit, h_order, h_lanes), result, mask=inside)
    if h_padded > n:
        if tl.program_id(1) == 0:
            behind = n + tl.arange(0, triton.next_power_of_2(h_padded - n))
            places = place_of(behind, h_unit, h_order, h_lanes)
            tl.store(target + places, tl.zeros(behind.shape, tl.float32), mask=behind < h_padded)


@triton.jit
def _pairs_rows(
    h, matrix, take, first, n: tl.constexpr, k: tl.constexpr, shape: tl.constexpr, multiply: tl.constexpr,
    constraints: tl.constexpr, group: tl.constexpr, rows: tl.constexpr, lanes: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
    """The inputs of some pairs times a few rows of their matrices: of each row a tensor [group].

    A pair that is not taken loads one unit over and over, and comes to nothing of use.
    """
    units: tl.constexpr = k // shape[0]
    chunks: tl.constexpr = (units + lanes - 1) // lanes
    own = tl.arange(0, lanes)[None, :]
    zero = tl.zeros((group, lanes), tl.float32)
    totals = (zero,)
    for _ in tl.static_range(1, rows):
        totals = totals + (zero,)
    for step in tl.range(0, (chunks + unroll - 1) // unroll):
        begin = step * (unroll * lanes)
        at = tl.where(take[:, None], tl.minimum(begin + own, units - 1), 0)
        codes = load_codes(matrix, tl.where(take, first, 0)[:, None], at, k, shape)
        for number in tl.static_range(1, rows * unroll):
            at = tl.where(take[:, None], tl.minimum(begin + (number // rows) * lanes + own, units - 1), 0)
            row = tl.where(take, tl.minimum(first + number % rows, n - 1), 0)
            codes = codes + load_codes(matrix, row[:, None], at, k, shape)
        for turn in tl.static_range(unroll):
            given = inputs_of(h + (begin + turn * lanes).to(tl.int64) * (shape[0] * 4) + own * 16, shape[0], lanes)
            sums = (plus(totals[0], codes, turn * rows, given, own, shape, multiply, constraints),)
            for number in tl.static_range(1, rows):
                added = plus(totals[number], codes, turn * rows + number, given, own, shape, multiply, constraints)
                sums = sums + (added,)
            totals = sums
    return totals


@triton.jit(do_not_specialize=["phase", "pair_row", "pair_late", "weights", "stamp"])
def down_units_kernel(
    h, w, bias, weights, raw, out, pair_row, pair_late, phase, stamp, strides, bias_stride,
    n: tl.constexpr, k: tl.constexpr, top_k: tl.constexpr, has_bias: tl.constexpr, clocked: tl.constexpr,
    summed: tl.constexpr, group: tl.constexpr, wide: tl.constexpr, h_padded: tl.constexpr, shape: tl.constexpr,
    multiply: tl.constexpr, constraints: tl.constexpr, rows: tl.constexpr, lanes: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
    """out[token] = the weighted sum of what its experts make of h, for a few columns of one token.

    Phases are those of `down_kernel`. Experts lie in different warps, whose sum is one reduction in a fixed order.
    """
    token = tl.program_id(0)
    mine = tl.arange(0, wide)
    its_row = tl.load(pair_row + token * top_k + mine, mask=mine < top_k, other=-1)
    its_late = tl.load(pair_late + token * top_k + mine, mask=mine < top_k, other=0)
    waits = tl.max(((its_row >= 0) & (its_late != 0)).to(tl.int32), axis=0)
    if (phase == _LATE) & (waits == 0):
        return
    first = tl.program_id(1) * rows
    dtype = raw.dtype.element_ty
    totals = (0.0,)
    for _ in tl.static_range(1, rows):
        totals = totals + (0.0,)
    for begin in tl.static_range(0, top_k, group):
        number = begin + tl.arange(0, group)
        pairs = token * top_k + number
        row = tl.load(pair_row + pairs, mask=number < top_k, other=-1)
        late = tl.load(pair_late + pairs, mask=number < top_k, other=0)
        weight = tl.load(weights + pairs, mask=row >= 0, other=0.0).to(tl.float32)
        take = _is_wanted(row, late, phase)
        at = tl.where(take, row, 0).to(tl.int64)
        matrix = _addresses(w, strides, at[:, None])
        inputs = h.to(tl.int64) + (tl.where(take, pairs, 0) * (h_padded * 4))[:, None]
        sums = _pairs_rows(inputs, matrix, take, first, n, k, shape, multiply, constraints, group, rows, lanes, unroll)
        earlier = ((phase == _LATE) | (phase == _LAST)) & (row >= 0) & (late == 0)
        keep = ((phase == _EARLY) & (waits != 0)) | (phase == _KEEP)
        added = _weighted(
            tl.sum(sums[0], axis=1), first, take, earlier, keep, row, pairs, weight, matrix, bias,
            at * bias_stride, raw, n, shape, has_bias, summed, dtype,
        )  # fmt: skip
        new = (totals[0] + added,)
        for other in tl.static_range(1, rows):
            added = _weighted(
                tl.sum(sums[other], axis=1), first + other, take, earlier, keep, row, pairs, weight, matrix, bias,
                at * bias_stride, raw, n, shape, has_bias, summed, dtype,
            )  # fmt: skip
            new = new + (totals[other] + added,)
        totals = new
    done = (phase != _KEEP) & ((phase != _EARLY) | (waits == 0))
    for column in tl.static_range(rows):
        result = rounded(totals[column], summed).to(out.dtype.element_ty)
        tl.store(out + token * n + first + column, result, mask=done & (first + column < n))
    if clocked:
        _note_time(stamp, phase == _EARLY)


@triton.jit
def _weighted(
    product, column, take, earlier, keep, row, pairs, weight, matrix, bias, bias_at, raw, n: tl.constexpr,
    shape: tl.constexpr, has_bias: tl.constexpr, summed: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """One column of some pairs: rounded, biased, kept or found, weighted, and summed."""
    taken = take & (column < n)
    if shape[5] != 0:
        product = _scaled(product, matrix_rows(matrix), column + row * 0, taken, shape)
    product = rounded(product, dtype)
    if has_bias:
        product = rounded(product + tl.load(bias + bias_at + column, mask=taken, other=0.0).to(tl.float32), dtype)
    places = raw + pairs * n + column
    tl.store(places, product.to(dtype), mask=taken & keep)
    known = tl.load(places, mask=earlier & (column < n), other=0.0).to(tl.float32)
    product = tl.where(take, product, tl.where(earlier, known, 0.0))
    return tl.sum(rounded(product * weight, summed), axis=0)


@triton.jit
def matrix_rows(matrix):
    """Addresses without the dimension of units."""
    return tl.reshape(matrix[0], (matrix[0].shape[0],)), matrix[1], tl.reshape(matrix[2], (matrix[2].shape[0],))

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The two kernels of an expert: the first multiplies and gates, the second multiplies, weights and sums.

A pair is one token with one of its experts; late pairs are those whose expert is still on its way in the early phase.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from hotset.engine.kernels.activations import rounded

_ALL = tl.constexpr(0)
_EARLY = tl.constexpr(1)
_LATE = tl.constexpr(2)
_KEEP = tl.constexpr(3)
_LAST = tl.constexpr(4)


@triton.jit
def _is_wanted(row, late, phase):
    """Whether pairs are to be computed; a row below zero is an expert of another machine."""
    return (row >= 0) & ((phase == _ALL) | ((late != 0) == ((phase == _LATE) | (phase == _LAST))))


@triton.jit
def _note_time(stamp, now):
    """Have the first program note the time, in nanoseconds."""
    if now & (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(stamp, globaltimer().to(tl.int64))


@triton.jit
def _parts_at(parts, strides, row):
    """Where the parts of the matrices in some rows begin."""
    if len(parts) == 1:
        return (parts[0] + row * strides[0],)
    elif len(parts) == 2:  # noqa: RET505 - Triton wants all arms of a choice at compile time
        return (parts[0] + row * strides[0], parts[1] + row * strides[1])
    elif len(parts) == 3:
        return (parts[0] + row * strides[0], parts[1] + row * strides[1], parts[2] + row * strides[2])
    else:
        tl.static_assert(len(parts) == 4)
        return (
            parts[0] + row * strides[0], parts[1] + row * strides[1], parts[2] + row * strides[2],
            parts[3] + row * strides[3],
        )  # fmt: skip


@triton.jit
def _plus(total, tile, values, rows: tl.constexpr, block_k: tl.constexpr, lane: tl.constexpr):
    """Add the products of a tile to sums of its shape, or of a lane-th of its depth.

    A lane is what one load brings to a thread: summed at once, its products take one register, not eight.
    """
    tile = tile.to(tl.float32)
    values = tl.broadcast_to(values, tile.shape)
    if lane == 1:
        return tl.fma(tile, values, total)
    else:  # noqa: RET505 - Triton wants both arms of a choice at compile time
        parts = tl.sum(tl.reshape(tile * values, (rows, block_k // lane, lane)), axis=2)
        return total + tl.reshape(parts, total.shape)


@triton.jit
def _times(
    x, matrix, columns, inside, n: tl.constexpr, k: tl.constexpr, load: tl.constexpr, settings: tl.constexpr,
    dtype: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, stages: tl.constexpr, unroll: tl.constexpr,
    lane: tl.constexpr,
):  # fmt: skip
    """One row times some columns of one matrix."""
    total = tl.zeros((block_n, block_k // lane), tl.float32)
    for start in tl.range(0, k, block_k, num_stages=stages, loop_unroll_factor=unroll):
        depth = start + tl.arange(0, block_k)
        there = depth < k
        tile = load(matrix, columns[:, None], inside[:, None], start, block_k, n, k, settings)
        values = tl.load(x + depth, mask=there, other=0.0)
        values = values.to(dtype).to(tl.float32)[None, :]
        total = _plus(total, tile, values, block_n, block_k, lane)
    return tl.sum(total, axis=1)


@triton.jit
def _times_both(
    x, matrix, first, second, inside, n: tl.constexpr, k: tl.constexpr, load: tl.constexpr, settings: tl.constexpr,
    dtype: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, stages: tl.constexpr, unroll: tl.constexpr,
    lane: tl.constexpr,
):  # fmt: skip
    """One row times some columns of both halves of one matrix, with the loads of both under way at once."""
    total = tl.zeros((block_n, block_k // lane), tl.float32)
    other = tl.zeros((block_n, block_k // lane), tl.float32)
    for start in tl.range(0, k, block_k, num_stages=stages, loop_unroll_factor=unroll):
        depth = start + tl.arange(0, block_k)
        there = depth < k
        tile = load(matrix, first[:, None], inside[:, None], start, block_k, n, k, settings)
        twin = load(matrix, second[:, None], inside[:, None], start, block_k, n, k, settings)
        values = tl.load(x + depth, mask=there, other=0.0)
        values = values.to(dtype).to(tl.float32)[None, :]
        total = _plus(total, tile, values, block_n, block_k, lane)
        other = _plus(other, twin, values, block_n, block_k, lane)
    return tl.sum(total, axis=1), tl.sum(other, axis=1)


@triton.jit
def _biased(product, bias, columns, inside, has_bias: tl.constexpr, dtype: tl.constexpr):
    """A product as stock has it: rounded before the bias is added, and again after."""
    product = rounded(product, dtype)
    if has_bias:
        product = rounded(product + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32), dtype)
    return product


@triton.jit(do_not_specialize=["phase", "pair_row", "pair_late", "stamp"])
def up_kernel(
    x, w, bias, h, pair_row, pair_late, phase, stamp, strides, bias_stride,
    n: tl.constexpr, k: tl.constexpr, top_k: tl.constexpr, activate: tl.constexpr, alpha: tl.constexpr,
    limit: tl.constexpr, gated: tl.constexpr, interleaved: tl.constexpr, load: tl.constexpr, settings: tl.constexpr,
    has_bias: tl.constexpr, clocked: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
    stages: tl.constexpr, unroll: tl.constexpr, lane: tl.constexpr,
):  # fmt: skip
    """h[pair] = the gate of x[token] times the first matrix, n columns of it, for one block of columns of one pair.

    Pairs come first in the order of programs: those of one expert read the same block at the same time, once from
    memory. The phase is no constant: one binary serves all phases, so that they cannot differ in a bit. `w` and
    `strides` are the parts of the matrices of all rows, `load` what makes a tile of them (see hotset.formats).
    """
    pair = tl.program_id(0)
    if clocked:
        _note_time(stamp + 1, phase == _LATE)
    row = tl.load(pair_row + pair)
    if not _is_wanted(row, tl.load(pair_late + pair), phase):
        return
    dtype = h.dtype.element_ty
    matrix = _parts_at(w, strides, row.to(tl.int64))
    biases = bias + row.to(tl.int64) * bias_stride
    token = x + (pair // top_k) * k
    columns = tl.program_id(1) * block_n + tl.arange(0, block_n)
    inside = columns < n
    if gated and interleaved:
        both = tl.program_id(1) * (2 * block_n) + tl.arange(0, 2 * block_n)
        product = _times(
            token, matrix, both, both < 2 * n, 2 * n, k, load, settings, dtype, 2 * block_n, block_k, stages, unroll,
            lane,
        )  # fmt: skip
        product = _biased(product, biases, both, both < 2 * n, has_bias, dtype)
        gate, up = tl.split(tl.reshape(product, (block_n, 2)))
    elif gated:
        gate, up = _times_both(
            token, matrix, columns, columns + n, inside, 2 * n, k, load, settings, dtype, block_n, block_k, stages,
            unroll, lane,
        )  # fmt: skip
        gate = _biased(gate, biases, columns, inside, has_bias, dtype)
        up = _biased(up, biases, columns + n, inside, has_bias, dtype)
    else:
        gate = _times(
            token, matrix, columns, inside, n, k, load, settings, dtype, block_n, block_k, stages, unroll, lane
        )
        gate = _biased(gate, biases, columns, inside, has_bias, dtype)
        up = gate
    result = activate(gate, up, alpha, limit, dtype)
    tl.store(h + pair * n + columns, result.to(dtype), mask=inside)


@triton.jit
def _pairs_times(
    h, matrices, pairs, take, columns, inside, n: tl.constexpr, k: tl.constexpr, load: tl.constexpr,
    settings: tl.constexpr, group: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, stages: tl.constexpr,
    unroll: tl.constexpr, lane: tl.constexpr,
):  # fmt: skip
    """The rows of some pairs times some columns of their matrices, all pairs side by side: [group, block_n]."""
    total = tl.zeros((group, block_n, block_k // lane), tl.float32)
    for start in tl.range(0, k, block_k, num_stages=stages, loop_unroll_factor=unroll):
        depth = start + tl.arange(0, block_k)
        there = depth < k
        wanted = take[:, None, None] & inside[None, :, None]
        tile = load(matrices, columns[None, :, None], wanted, start, block_k, n, k, settings)
        values = tl.load(
            h + pairs[:, None] * k + depth[None, :], mask=take[:, None] & there[None, :], other=0.0
        ).to(tl.float32)  # fmt: skip
        total = _plus(total, tile, values[:, None, :], group * block_n, block_k, lane)
    return tl.sum(total, axis=2)


@triton.jit(do_not_specialize=["phase", "pair_row", "pair_late", "weights", "stamp"])
def down_kernel(
    h, w, bias, weights, raw, out, pair_row, pair_late, phase, stamp, strides, bias_stride,
    n: tl.constexpr, k: tl.constexpr, top_k: tl.constexpr, load: tl.constexpr, settings: tl.constexpr,
    has_bias: tl.constexpr, clocked: tl.constexpr, summed: tl.constexpr, group: tl.constexpr, lanes: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr,
    stages: tl.constexpr, unroll: tl.constexpr, lane: tl.constexpr,
):  # fmt: skip
    """out[token] = the weighted sum of what its experts make of h, for one block of columns of one token.

    Where an expert is late, the early phase sums nothing: each pair's result goes to `raw`, where the late phase finds
    it. Where none is, the early phase does all, and the late one nothing. For work in more than two parts, all of them
    but the last are kept (`_KEEP`), whatever is late, and the last (`_LAST`) sums for every token.
    """
    token = tl.program_id(0)
    mine = tl.arange(0, lanes)
    its_row = tl.load(pair_row + token * top_k + mine, mask=mine < top_k, other=-1)
    its_late = tl.load(pair_late + token * top_k + mine, mask=mine < top_k, other=0)
    waits = tl.max(((its_row >= 0) & (its_late != 0)).to(tl.int32), axis=0)
    if (phase == _LATE) & (waits == 0):
        return
    columns = tl.program_id(1) * block_n + tl.arange(0, block_n)
    inside = columns < n
    dtype = h.dtype.element_ty
    total = tl.zeros((block_n,), tl.float32)
    for first in tl.static_range(0, top_k, group):
        number = first + tl.arange(0, group)
        real = number < top_k
        pairs = token * top_k + number
        row = tl.load(pair_row + pairs, mask=real, other=-1)
        late = tl.load(pair_late + pairs, mask=real, other=0)
        weight = tl.load(weights + pairs, mask=row >= 0, other=0.0).to(tl.float32)  # here, to arrive with the rest
        take = _is_wanted(row, late, phase)
        at = tl.where(take, row, 0).to(tl.int64)
        result = _pairs_times(
            h, _parts_at(w, strides, at[:, None, None]), pairs, take, columns, inside, n, k, load, settings, group,
            block_n, block_k, stages, unroll, lane,
        )  # fmt: skip
        result = rounded(result, dtype)
        taken = take[:, None] & inside[None, :]
        if has_bias:
            added = tl.load(bias + (at * bias_stride)[:, None] + columns[None, :], mask=taken, other=0.0)
            result = rounded(result + added.to(tl.float32), dtype)
        places = raw + pairs[:, None] * n + columns[None, :]
        if ((phase == _EARLY) & (waits != 0)) | (phase == _KEEP):
            tl.store(places, result.to(dtype), mask=taken)
        if (phase == _LATE) | (phase == _LAST):
            earlier = (row >= 0) & (late == 0)
            known = tl.load(places, mask=earlier[:, None] & inside[None, :], other=0.0).to(tl.float32)
            result = tl.where(take[:, None], result, known)
        weighted = rounded(result * weight[:, None], summed)
        for i in tl.static_range(group):
            # One after another, as the router has them; a sum over the axis would take its own order.
            total += tl.sum(tl.where(number[:, None] == first + i, weighted, 0.0), axis=0)
    if (phase != _KEEP) & ((phase != _EARLY) | (waits == 0)):
        tl.store(out + token * n + columns, rounded(total, summed).to(out.dtype.element_ty), mask=inside)
    if clocked:
        _note_time(stamp, phase == _EARLY)

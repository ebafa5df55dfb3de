"""Rows of weights on the device, one for each expert that a token may have chosen: listed, added up and learnt."""

from __future__ import annotations

import triton
import triton.language as tl

from hotset.policies import nextuse as host

_SIGNATURES = tl.constexpr(host.SIGNATURES)
_ROW_RATE, _ROW_BOOST = tl.constexpr(host.ROW_RATE), tl.constexpr(host.ROW_BOOST)
_ROW_SLOWS = tl.constexpr(host.ROW_SLOWS)


@triton.jit
def list_rows(
    state, chosen, ring, base, is_first, layer, stream, number,
    experts: tl.constexpr, top_k: tl.constexpr, length: tl.constexpr, depth: tl.constexpr, row_lanes: tl.constexpr,
):  # fmt: skip
    """List the rows of what was chosen, here and in the layers before, here a pass ago, and that of the signature."""
    row = tl.arange(0, row_lanes)
    part, place = row // top_k, row % top_k
    here = tl.load(chosen + place, mask=part == 0, other=-1)
    here = tl.where((here >= 0) & (here < experts), here, -1).to(tl.int32)
    before = (part > 0) & (part < depth) & (part <= layer)
    earlier = tl.load(ring + (layer - part) * top_k + place, mask=before, other=-1).to(tl.int32)
    ago = tl.load(state.routes + base * top_k + place, mask=(part == depth) & (is_first == 0), other=-1)
    signed = tl.load(state.signature + stream.to(tl.int64) * length + number % length)
    expert = tl.maximum(tl.maximum(here, earlier), ago)
    listed = tl.where(row == (depth + 1) * top_k, (depth + 1) * experts + (signed % _SIGNATURES).to(tl.int32),
                      tl.where(expert >= 0, part * experts + expert, -1))  # fmt: skip
    position = tl.cumsum((listed >= 0).to(tl.int32), axis=0)
    tl.store(state.rows + position, listed, mask=listed >= 0)
    tl.store(state.rows, tl.max(position, axis=0))


@triton.jit
def add_rows(state, context, value, padded: tl.constexpr, lanes: tl.constexpr, at_a_time: tl.constexpr):
    """Add the rows to the log-odds, one after the other as on the host; many of them on their way at once."""
    expert = tl.arange(0, lanes)
    held = tl.load(state.rows)
    start = 0
    while start < held:
        for place in tl.static_range(at_a_time):
            there = start + place < held
            row = tl.load(state.rows + 1 + start + place, mask=there, other=0)
            value += tl.load(context + row * padded + expert, mask=(expert < padded) & there, other=0.0)
        start += at_a_time
    return value


@triton.jit
def learn_rows(
    active, context, learnt, surprise, held, padded: tl.constexpr, lanes: tl.constexpr, chunk: tl.constexpr
):  # fmt: skip
    """The same for the rows that the prediction was made of: new ones learn faster."""
    expert = tl.arange(0, lanes)
    start = 0
    while start < held:
        place = start + tl.arange(0, chunk)
        there = place < held
        at = tl.load(active + 1 + place, mask=there, other=0)
        times = tl.load(learnt + at, mask=there, other=0.0)
        spot = context + at[:, None] * padded + expert[None, :]
        inside = there[:, None] & (expert < padded)[None, :]
        row = tl.load(spot, mask=inside, other=0.0)
        slowed = times.to(tl.float64) / _ROW_SLOWS + 1.0
        boost = tl.full((chunk,), _ROW_BOOST, tl.float64) / slowed
        step = ((boost + 1.0) * _ROW_RATE).to(tl.float32)
        tl.debug_barrier()
        tl.store(spot, row + step[:, None] * surprise[None, :], mask=inside)
        tl.store(learnt + at, times + 1.0, mask=there)
        start += chunk

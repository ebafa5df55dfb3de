"""Streams on the device: which request each of them follows, the passes that begin, and where each was at such a place.

The twin of hotset.policies._streams for decode steps of one token for each request.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hotset.policies import _streams as host

_PLACES, _FAR = tl.constexpr(host.PLACES), tl.constexpr(host.FAR)
_NEVER = tl.constexpr(1 << 30)
_LATEST = tl.constexpr((1 << 63) - 1)


@triton.jit
def find_streams(
    state, index, requests, asked, layer, tick,
    layers: tl.constexpr, experts: tl.constexpr, tokens: tl.constexpr, top_k: tl.constexpr, width: tl.constexpr,
    streams: tl.constexpr, stream_lanes: tl.constexpr, length: tl.constexpr,
):  # fmt: skip
    """Give every token's request a stream, and begin a pass where one begins.

    Returns, of each stream, its token or -1, whether it begins a request here, the first of the passes under way, all
    its passes, how many passes of all lie between two of them, and whether it goes on, or waits longer than it used to.
    """
    stream, pair = tl.arange(0, stream_lanes), tl.arange(0, width)
    inside = stream < streams
    owner = tl.load(state.owner + stream, mask=inside, other=-1)
    turn = tl.load(state.turn + stream, mask=inside, other=_LATEST)
    at = tl.load(state.at + stream, mask=inside, other=0)
    passes = tl.load(state.passes + stream, mask=inside, other=0)
    first = tl.load(state.first + stream, mask=inside, other=0)
    last = tl.load(state.last + stream, mask=inside, other=0)
    gap = tl.load(state.gap + stream, mask=inside, other=1.0)
    begins = tl.load(state.begins + stream * layers + layer, mask=inside, other=0) == 1
    clock = tl.load(state.clock)
    token_of = tl.full((stream_lanes,), -1, tl.int32)
    new = token_of >= 0
    for token in tl.static_range(tokens):
        alive = tl.max(tl.where(pair // top_k == token, asked, -1), axis=0) >= 0
        request = tl.load(requests + token)
        mine = inside & (owner == request)
        oldest = inside & (turn == tl.min(turn, axis=0))
        found = tl.min(tl.where(mine, stream, stream_lanes), axis=0)
        is_new = found == stream_lanes
        found = tl.where(is_new, tl.min(tl.where(oldest, stream, stream_lanes), axis=0), found)
        taken = (stream == found) & alive
        new = new | (taken & is_new)
        owner = tl.where(taken, request, owner)
        turn = tl.where(taken, tick, turn)
        token_of = tl.where(taken, token, token_of)
    at = tl.where(new, _NEVER, at)
    gap = tl.where(new, 1.0, gap)
    last = tl.where(new, 0, last)
    begins = begins | new

    live = token_of >= 0
    moves = live & (layer <= at)
    moving = tl.max(moves.to(tl.int32), axis=0)
    clock += moving
    waited = (clock - last).to(tl.float64) - gap
    gap = tl.where(moves & (last > 0), gap + waited * 0.25, gap)
    last = tl.where(moves, clock, last)
    first = tl.where(moves, passes + 1, first)
    passes += moves.to(tl.int64)
    tl.debug_barrier()  # no thread may still be loading what is stored here
    tl.store(state.owner + stream, owner, mask=live)
    tl.store(state.turn + stream, turn, mask=live)
    tl.store(state.at + stream, tl.zeros((stream_lanes,), tl.int32) + layer, mask=live)
    tl.store(state.passes + stream, passes, mask=live)
    tl.store(state.first + stream, first, mask=live)
    tl.store(state.last + stream, last, mask=live)
    tl.store(state.gap + stream, gap, mask=live)
    tl.store(state.clock, clock)
    _begin_elsewhere(state, new, layer, layers, streams, stream_lanes)
    tl.store(state.begins + stream * layers + layer, tl.zeros((stream_lanes,), tl.int32), mask=live)
    if moving > 0:
        _note_places(
            state, index, moves, token_of, passes, begins, layers, experts, top_k, streams, stream_lanes, length
        )  # fmt: skip
    goes_on = inside & (passes > 0) & ((clock - last).to(tl.float64) <= gap * 1.25 - 0.5)
    return token_of, begins, first, passes, gap, goes_on


@triton.jit
def next_stream(left, stream_lanes: tl.constexpr):
    """The first stream of those that are left; past all of them if none is."""
    stream = tl.arange(0, stream_lanes)
    return tl.min(tl.where(left, stream, stream_lanes), axis=0)


@triton.jit
def of_stream(values, which, stream_lanes: tl.constexpr):
    """What a vector over streams has for one of them."""
    return tl.sum(tl.where(tl.arange(0, stream_lanes) == which, values, 0), axis=0)


@triton.jit
def _begin_elsewhere(
    state, new, layer, layers: tl.constexpr, streams: tl.constexpr, stream_lanes: tl.constexpr
):  # fmt: skip
    """Have a stream that took a request begin it in all other layers, too."""
    left = new
    stream = next_stream(left, stream_lanes)
    while stream < streams:
        for start in range(0, layers, 32):
            other = start + tl.arange(0, 32)
            there = (other < layers) & (other != layer)
            tl.store(state.begins + stream * layers + other, tl.full((32,), 1, tl.int32), mask=there)
        left = left & (tl.arange(0, stream_lanes) != stream)
        stream = next_stream(left, stream_lanes)


@triton.jit
def _note_places(
    state, index, moves, token_of, passes, begins,
    layers: tl.constexpr, experts: tl.constexpr, top_k: tl.constexpr, streams: tl.constexpr,
    stream_lanes: tl.constexpr, length: tl.constexpr,
):  # fmt: skip
    """Find where the signature of each pass that begins, and its pair, were met before; one stream after the other."""
    left = moves
    stream = next_stream(left, stream_lanes)
    while stream < streams:
        token, number = of_stream(token_of, stream, stream_lanes), of_stream(passes, stream, stream_lanes)
        is_first = of_stream(begins.to(tl.int32), stream, stream_lanes) > 0
        begin = stream.to(tl.int64) * length
        at = begin + number % length
        for start in range(0, layers * top_k, 128):
            place = start + tl.arange(0, 128)
            empty = tl.full((128,), -1, tl.int16)
            tl.store(state.history + at * (layers * top_k) + place, empty, mask=place < layers * top_k)
        before = tl.load(state.signature + begin + (number - 1) % length)
        own = _signature(index + token * top_k, experts, top_k)
        pair = (before * 7919 + own) % _PLACES
        paired = (before >= 0) & (is_first == 0)
        met = tl.load(state.places + own)
        pair_met = tl.load(state.places + _PLACES + pair, mask=paired, other=0)
        here = number * streams + stream
        tl.debug_barrier()
        tl.store(state.signature + at, own)
        tl.store(state.found + at * 2, met)
        tl.store(state.found + at * 2 + 1, pair_met)
        tl.store(state.places + own, here)
        tl.store(state.places + _PLACES + pair, here, mask=paired)
        tl.debug_barrier()
        left = left & (tl.arange(0, stream_lanes) != stream)
        stream = next_stream(left, stream_lanes)


@triton.jit
def _signature(chosen, experts: tl.constexpr, top_k: tl.constexpr):
    """A hash of the set of experts that a token chose; what is no expert of the layer counts as -1, as on the host."""
    total = tl.zeros((), tl.int64)
    product = tl.full((), 1, tl.int64)
    for k in tl.static_range(top_k):
        expert = tl.load(chosen + k)
        expert = tl.where((expert >= 0) & (expert < experts), expert, -1)
        mixed = ((expert + 1) * 2654435761) & 0xFFFFFFFF
        mixed = mixed ^ (mixed >> 15)
        total += mixed
        product = (product * (mixed | 1)) & 0xFFFFFFFF
    return (((total ^ (product >> 7)) * 40503) >> 4) % _PLACES


@triton.jit
def recall(
    state, which: tl.constexpr, layer, stream, number, passes,
    layers: tl.constexpr, top_k: tl.constexpr, lanes: tl.constexpr, streams: tl.constexpr,
    stream_lanes: tl.constexpr, length: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """How often each expert was used after the place where this one was met before: next, soon, and later."""
    expert = tl.arange(0, lanes)
    place = tl.load(state.found + (stream.to(tl.int64) * length + number % length) * 2 + which)
    whose, at = place % streams, place // streams
    all_passes = of_stream(passes, whose, stream_lanes)
    last = tl.where(whose == stream, number - 1, all_passes)
    known = (place > 0) & (all_passes - at < length - 1)  # or written over since
    held = tl.where(known, tl.minimum(last - at, _FAR), 0).to(tl.int32) * top_k
    packed = tl.zeros((lanes,), tl.int32)  # all three in one number, so that one sum finds them
    start = 0
    while start < held:
        entry = start + tl.arange(0, chunk)
        step = entry // top_k + 1
        spot = ((whose * length + (at + step) % length) * layers + layer) * top_k + entry % top_k
        used = tl.load(state.history + spot, mask=entry < held, other=-1).to(tl.int32)
        worth = tl.where(step == 1, 1, tl.where(step < 5, 256, 65536))
        packed += tl.sum(tl.where(used[:, None] == expert[None, :], worth[:, None], 0), axis=0)
        start += chunk
    soon, later = (packed >> 8) & 255, packed >> 16
    return (packed & 255).to(tl.float32), soon.to(tl.float32) * 0.333, later.to(tl.float32) * 0.125

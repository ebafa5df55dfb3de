"""The next use on the device: before the plan, a kernel follows each stream, learns and predicts as the host does.

One program takes the tokens of an event in turn, in the order of their streams, since what one stream teaches the next
predicts from. Sums run in the host's order, and products are not fused into them: all is the same to the last bit. What one thread stores
and another loads goes through memory, with a barrier between.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from hotset.engine.device.policies import DevicePolicy, EventFollower
from hotset.engine.device.policies._use_streams import find_streams, next_stream, of_stream, recall
from hotset.policies import _regression as shared
from hotset.policies import _use_features as features
from hotset.policies import nextuse as host
from hotset.shape import ModelShape

Tensor = torch.Tensor

_RATES, _COMMON, _FEATURES = (
    tl.constexpr(features.RATES), tl.constexpr(features.COMMON), tl.constexpr(features.FEATURES)
)  # fmt: skip
_MEAN, _LIFT, _BIAS, _RECALL = (
    tl.constexpr(features.MEAN), tl.constexpr(features.LIFT), tl.constexpr(features.BIAS),
    tl.constexpr(features.RECALL),
)  # fmt: skip
_SMOOTH, _RARE = tl.constexpr(features.SMOOTH), tl.constexpr(features.RARE)
_LANES, _FORGET, _MIN_ENERGY = (
    tl.constexpr(shared.LANES), tl.constexpr(shared.FORGET), tl.constexpr(shared.MIN_ENERGY)
)  # fmt: skip
_RATE, _ROW_RATE, _ROW_BOOST, _ROW_SLOWS = (
    tl.constexpr(host.RATE), tl.constexpr(host.ROW_RATE), tl.constexpr(host.ROW_BOOST), tl.constexpr(host.ROW_SLOWS)
)  # fmt: skip
_CHURN_RATE, _PRIOR, _SIGNATURES = (
    tl.constexpr(host.CHURN_RATE), tl.constexpr(host.PRIOR), tl.constexpr(host.SIGNATURES)
)  # fmt: skip
_RATE_ROWS, _ROWS = tl.constexpr(8), tl.constexpr(32)  # powers of two that hold all rates, and all features
_RATES_ON_HOST, _MOST_TOKENS = features.RATES, 16
_TILE = 8192  # values of rows at a time


class NextUseTensors(NamedTuple):
    """What the device needs of the state, and how much of each rate so many tokens replace."""

    value: Tensor
    worth: Tensor
    features: Tensor
    rates: Tensor
    seen: Tensor
    common: Tensor
    common_seen: Tensor
    shared: Tensor
    own: Tensor
    shared_energy: Tensor
    own_energy: Tensor
    follows: Tensor
    followed: Tensor
    context: Tensor
    learnt: Tensor
    active: Tensor
    routes: Tensor
    churn: Tensor
    history: Tensor
    places: Tensor
    found: Tensor
    signature: Tensor
    owner: Tensor
    turn: Tensor
    at: Tensor
    passes: Tensor
    first: Tensor
    last: Tensor
    gap: Tensor
    begins: Tensor
    clock: Tensor
    scratch: Tensor
    rows: Tensor
    fresh: Tensor  # float32 [_RATE_ROWS], of one token
    lately: Tensor  # float64 [_MOST_TOKENS + 1], of so many tokens


@triton.jit
def load_state(state, layer, experts: tl.constexpr, lanes: tl.constexpr):
    """What the kernel before this one has made of the event."""
    padded: tl.constexpr = (experts + _LANES - 1) // _LANES * _LANES
    expert = tl.arange(0, lanes)
    return tl.load(state.worth + layer * padded + expert, mask=expert < experts, other=0.0)


@triton.jit
def observe_and_score(
    state, found, layer, tick, passes, resident, slots, used, counts, slot_of, num_used, num_missing,
    experts: tl.constexpr, lanes: tl.constexpr, variant: tl.constexpr,
):  # fmt: skip
    """The discounted next use, as the kernel before this one has left it."""
    return found


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["index"])
def follow_event(
    index, requests, layer, table, state,
    layers: tl.constexpr, experts: tl.constexpr, lanes: tl.constexpr, tokens: tl.constexpr, top_k: tl.constexpr,
    width: tl.constexpr, k_lanes: tl.constexpr, streams: tl.constexpr, stream_lanes: tl.constexpr,
    length: tl.constexpr, depth: tl.constexpr, row_lanes: tl.constexpr, at_a_time: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Learn from how well an event was predicted in each stream, then predict the next; run by one program."""
    padded: tl.constexpr = (experts + _LANES - 1) // _LANES * _LANES
    expert, pair = tl.arange(0, lanes), tl.arange(0, width)
    asked = tl.load(index + pair, mask=pair < tokens * top_k, other=-1)
    asked = tl.where((asked >= 0) & (asked < experts), asked, -1).to(tl.int32)
    slot_of = tl.load(table.slot_of + layer * experts + expert, mask=expert < experts, other=0)
    counts = tl.sum((asked[:, None] == expert[None, :]).to(tl.int32), axis=0)
    both = tl.sum((counts > 0).to(tl.int32) + (((counts > 0) & (slot_of < 0)).to(tl.int32) << 16), axis=0)
    num_used, num_missing = both & 0xFFFF, both >> 16
    if num_used > 0:  # an event of sentinels alone is none
        token_of, begins, first, passes, goes_on = find_streams(
            state, index, requests, asked, layer, tl.load(table.clock) + 1,
            layers, tokens, top_k, width, streams, stream_lanes, length,
        )  # fmt: skip
        live = tl.sum((token_of >= 0).to(tl.int32), axis=0)
        ever, lately = _common_rates(state, layer, counts, live, padded, lanes)
        discount = _discount(state, layer, tl.load(table.resident + layer), num_missing)
        rate = _RATE / tl.sqrt(live.to(tl.float64))
        left = token_of >= 0
        stream = next_stream(left, stream_lanes)
        while stream < streams:
            token, number = of_stream(token_of, stream, stream_lanes), of_stream(first, stream, stream_lanes)
            is_first = of_stream(begins.to(tl.int32), stream, stream_lanes) > 0
            _pass(
                state, index + token * top_k, layer, stream, number, is_first, passes, ever, lately, discount, rate,
                layers, experts, padded, lanes, top_k, k_lanes, streams, stream_lanes, length, depth, row_lanes,
                at_a_time, chunk,
            )  # fmt: skip
            left = left & (tl.arange(0, stream_lanes) != stream)
            stream = next_stream(left, stream_lanes)
        _add_up(state, layer, goes_on, lately, layers, padded, lanes, streams, stream_lanes)


@triton.jit
def _common_rates(state, layer, counts, tokens, padded: tl.constexpr, lanes: tl.constexpr):
    """Rates of use of all streams together: of all time, and lately."""
    expert = tl.arange(0, lanes)
    inside = expert < padded
    place = state.common + layer * 2 * padded + expert
    rate, late_rate = tl.load(place, mask=inside, other=0.0), tl.load(place + padded, mask=inside, other=0.0)
    seen = tl.load(state.common_seen + layer) + tokens.to(tl.float64)
    ever = tokens.to(tl.float64) / seen
    lately = tl.load(state.lately + tokens)
    lately = tl.where(lately > ever, lately, ever).to(tl.float32)
    used = (counts.to(tl.float64) / tokens.to(tl.float64)).to(tl.float32)
    rate += ever.to(tl.float32) * (used - rate)
    late_rate += lately * (used - late_rate)
    tl.debug_barrier()
    tl.store(place, rate, mask=inside)
    tl.store(place + padded, late_rate, mask=inside)
    tl.store(state.common_seen + layer, seen)
    return rate, late_rate


@triton.jit
def _discount(state, layer, resident, num_missing):
    """What a use is worth a pass later: more where residents stay longer."""
    churn = tl.load(state.churn + layer)
    churn += (num_missing.to(tl.float64) - churn) * _CHURN_RATE
    tl.debug_barrier()
    tl.store(state.churn + layer, churn)
    stay = tl.maximum(resident, 1).to(tl.float64) / tl.where(churn > _RARE, churn, _RARE)
    stay = tl.sqrt(stay)
    return stay / (stay + 1.0)


@triton.jit
def _pass(
    state, chosen, layer, stream, number, is_first, passes, ever, lately, discount, rate,
    layers: tl.constexpr, experts: tl.constexpr, padded: tl.constexpr, lanes: tl.constexpr, top_k: tl.constexpr,
    k_lanes: tl.constexpr, streams: tl.constexpr, stream_lanes: tl.constexpr, length: tl.constexpr,
    depth: tl.constexpr, row_lanes: tl.constexpr, at_a_time: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """One token of one stream: count what followed what, predict, and learn from the prediction before.

    All that is known is loaded before anything is stored, but for the rows of weights.
    """
    most: tl.constexpr = (depth + 1) * top_k + 2
    expert, k = tl.arange(0, lanes), tl.arange(0, k_lanes)
    inside = expert < padded
    base = stream.to(tl.int64) * layers + layer
    ring = state.history + (stream.to(tl.int64) * length + number % length) * (layers * top_k)
    routes = tl.load(chosen + k, mask=k < top_k, other=-1)
    routes = tl.where((routes >= 0) & (routes < experts), routes, -1).to(tl.int32)
    previous = tl.load(state.routes + base * top_k + k, mask=(k < top_k) & (is_first == 0), other=-1)
    used = tl.max((routes[:, None] == expert[None, :]).to(tl.float32), axis=0)
    before = tl.load(state.value + base * padded + expert, mask=inside, other=0.0)
    held = tl.load(state.active + base * most)
    held = tl.where(is_first, -1, held)
    seen = tl.where(is_first, _PRIOR, tl.load(state.seen + base)) + 1.0
    spot, follows, followed, led = _followers(state, layer, previous, used, experts, padded, lanes)
    rates = _aged_rates(state, base, is_first, lately, used, seen, padded, lanes)
    _list_rows(state, chosen, ring, base, is_first, layer, stream, number, experts, top_k, length, depth, row_lanes)
    mean, lift = _transitions(state, chosen, layer, previous, used, ever, experts, padded, lanes, top_k)
    tl.debug_barrier()  # the rows are listed
    value = _weigh_rates(state, layer, base, is_first, lately, used, seen, padded, lanes)
    value += _weight(state, layer, _COMMON) * tl.sqrt_rn(ever)
    value += _weight(state, layer, _COMMON + 1) * tl.sqrt_rn(lately)
    value += _weight(state, layer, _MEAN) * mean
    value += _weight(state, layer, _LIFT) * lift
    bias = (expert < experts).to(tl.float32)
    value += _weight(state, layer, _BIAS) * bias
    near, soon, far = recall(
        state, 0, layer, stream, number, passes, layers, top_k, lanes, streams, stream_lanes, length, chunk
    )
    value += _weight(state, layer, _RECALL) * near
    value += _weight(state, layer, _RECALL + 1) * soon
    value += _weight(state, layer, _RECALL + 2) * far
    near_2, soon_2, far_2 = recall(
        state, 1, layer, stream, number, passes, layers, top_k, lanes, streams, stream_lanes, length, chunk
    )
    value += _weight(state, layer, _RECALL + 3) * near_2
    value += _weight(state, layer, _RECALL + 4) * soon_2
    value += _weight(state, layer, _RECALL + 5) * far_2
    context = state.context + layer.to(tl.int64) * (((depth + 1) * experts + _SIGNATURES) * padded)
    value = _add_rows(state, context, value, padded, lanes, at_a_time)

    target = tl.where(used > 0, 1.0, discount * _logistic(value))
    surprise = (target - _logistic(before)).to(tl.float32)
    surprise = tl.where(expert < experts, surprise, 0.0)
    tl.store(state.scratch + 2 * padded + expert, surprise, mask=inside)
    tl.debug_barrier()
    if held >= 0:
        _learn_weights(state, layer, base, rate, experts, padded)
        learnt = state.learnt + layer * ((depth + 1) * experts + _SIGNATURES)
        _learn_rows(state.active + base * most, context, learnt, surprise, held, padded, lanes, chunk)
    tl.debug_barrier()
    x = state.features + base * (_FEATURES * padded) + expert
    _store_tile(state.rates + base * (_RATES * padded), rates, padded, lanes)
    _store_tile(state.features + base * (_FEATURES * padded), tl.sqrt_rn(rates), padded, lanes)
    tl.store(x + _COMMON * padded, tl.sqrt_rn(ever), mask=inside)
    tl.store(x + (_COMMON + 1) * padded, tl.sqrt_rn(lately), mask=inside)
    tl.store(x + _MEAN * padded, mean, mask=inside)
    tl.store(x + _LIFT * padded, lift, mask=inside)
    tl.store(x + _BIAS * padded, bias, mask=inside)
    tl.store(x + _RECALL * padded, near, mask=inside)
    tl.store(x + (_RECALL + 1) * padded, soon, mask=inside)
    tl.store(x + (_RECALL + 2) * padded, far, mask=inside)
    tl.store(x + (_RECALL + 3) * padded, near_2, mask=inside)
    tl.store(x + (_RECALL + 4) * padded, soon_2, mask=inside)
    tl.store(x + (_RECALL + 5) * padded, far_2, mask=inside)
    tl.store(state.value + base * padded + expert, value, mask=inside)
    tl.store(state.seen + base, seen)
    tl.store(spot, follows + 1.0, mask=(previous[:, None] >= 0) & (used[None, :] > 0))
    tl.store(state.followed + layer * experts + expert, followed + 1.0, mask=led)
    tl.store(ring + layer * top_k + k, routes.to(tl.int16), mask=k < top_k)
    tl.store(state.routes + base * top_k + k, routes, mask=k < top_k)
    row = tl.arange(0, row_lanes)
    listed = tl.load(state.rows + row, mask=row < most, other=0)
    tl.store(state.active + base * most + row, listed, mask=row <= tl.load(state.rows))
    tl.debug_barrier()  # the next stream goes on from here


@triton.jit
def _followers(
    state, layer, previous, used, experts: tl.constexpr, padded: tl.constexpr, lanes: tl.constexpr
):  # fmt: skip
    """How often each expert followed those of the pass before, where that is counted, and how often these were."""
    expert = tl.arange(0, lanes)
    table = state.follows + layer.to(tl.int64) * (experts * padded)
    spot = table + previous[:, None] * padded + expert[None, :]
    follows = tl.load(spot, mask=(previous[:, None] >= 0) & (used[None, :] > 0), other=0.0)
    led = tl.max((previous[:, None] == expert[None, :]).to(tl.int32), axis=0) > 0
    return spot, follows, tl.load(state.followed + layer * experts + expert, mask=led, other=0.0), led


@triton.jit
def _aged_rates(state, base, is_first, lately, used, seen, padded: tl.constexpr, lanes: tl.constexpr):
    """The rates of a stream, a token older; a request begins with those that all streams had lately."""
    rate, expert = tl.arange(0, _RATE_ROWS), tl.arange(0, lanes)
    there = (rate[:, None] < _RATES) & (expert[None, :] < padded)
    spot = state.rates + base * (_RATES * padded) + rate[:, None] * padded + expert[None, :]
    rates = tl.where(is_first, lately[None, :], tl.load(spot, mask=there, other=0.0))
    fresh = tl.where(rate == _RATES - 1, (1.0 / seen).to(tl.float32), tl.load(state.fresh + rate))
    return rates + fresh[:, None] * (used[None, :] - rates)


@triton.jit
def _weigh_rates(state, layer, base, is_first, lately, used, seen, padded: tl.constexpr, lanes: tl.constexpr):
    """What the same rates add to the log-odds, one after the other as on the host."""
    expert = tl.arange(0, lanes)
    inside = expert < padded
    value = tl.zeros((lanes,), tl.float32)
    for number in tl.static_range(_RATES):
        rate = tl.load(state.rates + base * (_RATES * padded) + number * padded + expert, mask=inside, other=0.0)
        rate = tl.where(is_first, lately, rate)
        fresh = tl.load(state.fresh + number)
        if number == _RATES - 1:
            fresh = (1.0 / seen).to(tl.float32)
        rate += fresh * (used - rate)
        value += _weight(state, layer, number) * tl.sqrt_rn(rate)
    return value


@triton.jit
def _transitions(
    state, chosen, layer, previous, used, ever,
    experts: tl.constexpr, padded: tl.constexpr, lanes: tl.constexpr, top_k: tl.constexpr,
):  # fmt: skip
    """What usually follows the experts that a token chose: the mean probability, and the summed lift.

    What this pass adds to their rows is not stored yet.
    """
    expert = tl.arange(0, lanes)
    inside = expert < padded
    table = state.follows + layer.to(tl.int64) * (experts * padded)
    mean, lift = tl.zeros((lanes,), tl.float32), tl.zeros((lanes,), tl.float32)
    usual = ever + _RARE
    held = 0
    for place in tl.static_range(top_k):
        before = tl.load(chosen + place)
        there = (before >= 0) & (before < experts)
        counted = tl.max((previous == before).to(tl.int32), axis=0) > 0
        row = tl.load(table + before * padded + expert, mask=inside & there, other=0.0)
        row = tl.where(counted, row + used, row)
        times = tl.load(state.followed + layer * experts + before, mask=there, other=0.0)
        times += tl.where(counted, 1.0, 0.0)
        scale = tl.div_rn(tl.full((1,), 1.0, tl.float32), times.to(tl.float32) + _SMOOTH)
        probability = (row + usual * _SMOOTH) * scale
        mean = tl.where(there, mean + probability, mean)
        lift = tl.where(there, lift + tl.div_rn(probability - usual, probability + usual), lift)
        held += there.to(tl.int32)
    share = (1.0 / tl.maximum(held, 1).to(tl.float64)).to(tl.float32)
    return tl.sqrt_rn(mean * share), lift


@triton.jit
def _list_rows(
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
def _add_rows(state, context, value, padded: tl.constexpr, lanes: tl.constexpr, at_a_time: tl.constexpr):
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
def _learn_weights(state, layer, base, rate, experts: tl.constexpr, padded: tl.constexpr):
    """One step of temporal differences, for the shared weights and the layer's own."""
    feature, lane = tl.arange(0, _ROWS), tl.arange(0, _LANES)
    there = feature < _FEATURES
    rows = state.features + base * (_FEATURES * padded) + feature[:, None] * padded + lane[None, :]
    place = layer * _FEATURES + feature
    shared = tl.load(state.shared + feature, mask=there, other=0.0)
    shared_energy = tl.load(state.shared_energy + feature, mask=there, other=1.0)
    own = tl.load(state.own + place, mask=there, other=0.0)
    own_energy = tl.load(state.own_energy + place, mask=there, other=1.0)
    sums = tl.zeros((_ROWS, _LANES), tl.float64)
    for start in tl.static_range(0, padded, _LANES):
        surprise = tl.load(state.scratch + 2 * padded + start + lane)
        product = surprise[None, :] * tl.load(rows + start, mask=there[:, None], other=0.0)
        sums += product.to(tl.float64)
    gradient = _add_lanes(sums) / experts
    square = gradient * gradient + _MIN_ENERGY
    shared_energy = shared_energy * _FORGET + square
    own_energy = own_energy * _FORGET + square
    tl.debug_barrier()
    tl.store(state.shared_energy + feature, shared_energy, mask=there)
    tl.store(state.own_energy + place, own_energy, mask=there)
    tl.store(state.shared + feature, shared + rate * gradient / tl.sqrt(shared_energy), mask=there)
    tl.store(state.own + place, own + rate * gradient / tl.sqrt(own_energy), mask=there)


@triton.jit
def _add_lanes(sums):
    """The eight lanes of each row added in the host's order: neighbours first."""
    even, odd = tl.split(tl.reshape(sums, (_ROWS, 4, 2)))
    even, odd = tl.split(tl.reshape(even + odd, (_ROWS, 2, 2)))
    even, odd = tl.split(even + odd)
    return even + odd


@triton.jit
def _learn_rows(
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


@triton.jit
def _store_tile(place, rows, padded: tl.constexpr, lanes: tl.constexpr):
    """Store one row per rate."""
    rate, expert = tl.arange(0, _RATE_ROWS), tl.arange(0, lanes)
    there = (rate[:, None] < _RATES) & (expert[None, :] < padded)
    tl.store(place + rate[:, None] * padded + expert[None, :], rows, mask=there)


@triton.jit
def _add_up(
    state, layer, goes_on, lately, layers: tl.constexpr, padded: tl.constexpr, lanes: tl.constexpr,
    streams: tl.constexpr, stream_lanes: tl.constexpr,
):  # fmt: skip
    """The score of each expert: that any stream that goes on uses it, as if streams were independent."""
    expert = tl.arange(0, lanes)
    inside = expert < padded
    unused = tl.full((lanes,), 1.0, tl.float64)
    left = goes_on
    stream = next_stream(left, stream_lanes)
    alone = stream >= streams
    while stream < streams:
        place = (stream.to(tl.int64) * layers + layer) * padded + expert
        unused = unused * (1.0 - _logistic(tl.load(state.value + place, mask=inside, other=0.0)))
        left = left & (tl.arange(0, stream_lanes) != stream)
        stream = next_stream(left, stream_lanes)
    worth = tl.where(alone, lately.to(tl.float64) - 1.0, 0.0 - unused)
    tl.store(state.worth + layer * padded + expert, worth, mask=inside)


@triton.jit
def _logistic(x):
    """The host's logistic function: multiplications only, repeated squaring."""
    x = x.to(tl.float64)
    power = 1.0 - tl.minimum(tl.abs(x), 24.0) / 256.0
    for _ in tl.static_range(8):
        power = power * power
    small = power / (power + 1.0)
    return tl.where(x > 0, 1.0 - small, small)


@triton.jit
def _weight(state, layer, feature):
    """A feature's weight in this layer."""
    return (tl.load(state.shared + feature) + tl.load(state.own + layer * _FEATURES + feature)).to(tl.float32)


class Following:
    """Launches the kernel that follows an event of so many tokens, each of a request of its own."""

    def __init__(self, table: Any, state: NextUseTensors, shape: ModelShape, tokens: int) -> None:
        self.requests = torch.arange(tokens, dtype=torch.int64, device=state.value.device)
        self._table, self._state = table, state
        streams, length = state.history.shape[:2]
        experts, top_k = shape.experts, shape.top_k
        lanes, most = _lanes(experts, 16), state.rows.shape[0]
        row_lanes = _lanes(most)
        self._warps = 4 if lanes <= 128 else 8
        self._constants = {
            "layers": shape.layers,
            "experts": experts,
            "lanes": lanes,
            "tokens": tokens,
            "top_k": top_k,
            "width": _lanes(tokens * top_k),
            "k_lanes": _lanes(top_k),
            "streams": streams,
            "stream_lanes": _lanes(streams),
            "length": length,
            "depth": (state.context.shape[1] - host.SIGNATURES) // experts - 1,
            "row_lanes": row_lanes,
            "at_a_time": min(row_lanes, 32),
            "chunk": max(min(row_lanes, _TILE // lanes), 8),
        }

    def __call__(self, layer: int, index: Tensor) -> None:
        """Follow one event: index (int64) names each pair's expert, or one that does not exist."""
        launch: Any = follow_event[(1,)]
        launch(
            index, self.requests, layer, self._table, self._state, **self._constants, num_warps=self._warps,
            enable_fp_fusion=False,
        )  # fmt: skip


def _lanes(count: int, least: int = 2) -> int:
    """The length of a vector that holds so many."""
    found: int = max(triton.next_power_of_2(count), least)
    return found


def _tensors(state: Any) -> NextUseTensors:
    fresh = torch.zeros(_RATE_ROWS.value, dtype=torch.float32)
    fresh[: _RATES_ON_HOST - 1] = torch.tensor([1.0 - 0.5 ** (1.0 / half_life) for half_life in features.HALF_LIVES])
    lately = [1.0 - 0.5 ** (tokens / features.COMMON_HALF_LIFE) for tokens in range(_MOST_TOKENS + 1)]
    device = state.rates.device
    return NextUseTensors(
        **state._asdict(), fresh=fresh.to(device), lately=torch.tensor(lately, dtype=torch.float64, device=device)
    )


def _follower(table: Any, state: Any, shape: ModelShape, tokens: int) -> EventFollower:
    return Following(table, state, shape, tokens)


DEVICE = DevicePolicy(
    load_state,
    observe_and_score,
    tensors=_tensors,
    follower=_follower,
    most_tokens=lambda policy, shape: policy.sizes(shape)[1],  # a request has a stream of its own
)

"""The next use on the device: before the plan, a kernel follows each stream, learns and predicts as the host does.

One program takes the tokens of an event in turn, in the order of their streams, since what one stream teaches the next
predicts from. Sums run in the host's order, and products are not fused into them: all is the same to the last bit. What
one thread stores and another loads goes through memory, with a barrier between.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from hotset.engine.device.policies import DevicePolicy, EventFollower
from hotset.engine.device.policies._use_rates import (
    aged_rates,
    common_rates,
    followers,
    store_tile,
    transitions,
    weigh_rates,
)
from hotset.engine.device.policies._use_rows import add_rows, learn_rows, list_rows
from hotset.engine.device.policies._use_streams import find_streams, next_stream, of_stream, recall
from hotset.engine.device.policies._use_weights import learn_weights, logistic, weight
from hotset.policies import _regression as shared
from hotset.policies import _use_features as features
from hotset.policies import nextuse as host
from hotset.shape import ModelShape

Tensor = torch.Tensor

_COMMON, _FEATURES, _MEAN = tl.constexpr(features.COMMON), tl.constexpr(features.FEATURES), tl.constexpr(features.MEAN)
_LIFT, _BIAS, _RECALL = tl.constexpr(features.LIFT), tl.constexpr(features.BIAS), tl.constexpr(features.RECALL)
_RARE, _RATES = tl.constexpr(features.RARE), tl.constexpr(features.RATES)
_RATE, _CHURN_RATE, _PRIOR = tl.constexpr(host.RATE), tl.constexpr(host.CHURN_RATE), tl.constexpr(host.PRIOR)
_LANES, _SIGNATURES = tl.constexpr(shared.LANES), tl.constexpr(host.SIGNATURES)
_MOST_TOKENS = 16
_TILE = 4096  # values of rows at a time: more would not fit into registers


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
    fresh: Tensor  # float32 [8], of one token
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
        token_of, begins, first, passes, gap, goes_on = find_streams(
            state, index, requests, asked, layer, tl.load(table.clock) + 1,
            layers, experts, tokens, top_k, width, streams, stream_lanes, length,
        )  # fmt: skip
        live = tl.sum((token_of >= 0).to(tl.int32), axis=0)
        ever, lately = common_rates(state, layer, counts, live, padded, lanes)
        stay = _stay(state, layer, tl.load(table.resident + layer), num_missing)
        left = token_of >= 0
        stream = next_stream(left, stream_lanes)
        while stream < streams:
            token, number = of_stream(token_of, stream, stream_lanes), of_stream(first, stream, stream_lanes)
            is_first = of_stream(begins.to(tl.int32), stream, stream_lanes) > 0
            apart = of_stream(gap, stream, stream_lanes)  # passes of all from one of its own to the next
            root, rate = tl.sqrt(stay / apart), _RATE / tl.sqrt(live.to(tl.float64) * apart)
            discount = root / (root + 1.0)
            _pass(
                state, index + token * top_k, layer, stream, number, is_first, passes, ever, lately, discount, rate,
                layers, experts, padded, lanes, top_k, k_lanes, streams, stream_lanes, length, depth, row_lanes,
                at_a_time, chunk,
            )  # fmt: skip
            left = left & (tl.arange(0, stream_lanes) != stream)
            stream = next_stream(left, stream_lanes)
        _add_up(state, layer, goes_on, lately, layers, padded, lanes, streams, stream_lanes)


@triton.jit
def _stay(state, layer, resident, num_missing):
    """How many passes residents of the layer stay."""
    churn = tl.load(state.churn + layer)
    churn += (num_missing.to(tl.float64) - churn) * _CHURN_RATE
    tl.debug_barrier()
    tl.store(state.churn + layer, churn)
    return tl.maximum(resident, 1).to(tl.float64) / tl.where(churn > _RARE, churn, _RARE)


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
    spot, follows, followed, led = followers(state, layer, previous, used, experts, padded, lanes)
    rates = aged_rates(state, base, is_first, lately, used, seen, padded, lanes)
    list_rows(state, chosen, ring, base, is_first, layer, stream, number, experts, top_k, length, depth, row_lanes)
    mean, lift = transitions(state, chosen, layer, previous, used, ever, experts, padded, lanes, top_k)
    tl.debug_barrier()  # the rows are listed
    value = weigh_rates(state, layer, base, is_first, lately, used, seen, padded, lanes)
    value += weight(state, layer, _COMMON) * tl.sqrt_rn(ever)
    value += weight(state, layer, _COMMON + 1) * tl.sqrt_rn(lately)
    value += weight(state, layer, _MEAN) * mean
    value += weight(state, layer, _LIFT) * lift
    bias = (expert < experts).to(tl.float32)
    value += weight(state, layer, _BIAS) * bias
    near, soon, far = recall(
        state, 0, layer, stream, number, passes, layers, top_k, lanes, streams, stream_lanes, length, chunk
    )
    value += weight(state, layer, _RECALL) * near
    value += weight(state, layer, _RECALL + 1) * soon
    value += weight(state, layer, _RECALL + 2) * far
    near_2, soon_2, far_2 = recall(
        state, 1, layer, stream, number, passes, layers, top_k, lanes, streams, stream_lanes, length, chunk
    )
    value += weight(state, layer, _RECALL + 3) * near_2
    value += weight(state, layer, _RECALL + 4) * soon_2
    value += weight(state, layer, _RECALL + 5) * far_2
    context = state.context + layer.to(tl.int64) * (((depth + 1) * experts + _SIGNATURES) * padded)
    value = add_rows(state, context, value, padded, lanes, at_a_time)

    target = tl.where(used > 0, 1.0, discount * logistic(value))
    surprise = (target - logistic(before)).to(tl.float32)
    surprise = tl.where(expert < experts, surprise, 0.0)
    tl.store(state.scratch + 2 * padded + expert, surprise, mask=inside)
    tl.debug_barrier()
    if held >= 0:
        learn_weights(state, layer, base, rate, experts, padded)
        learnt = state.learnt + layer * ((depth + 1) * experts + _SIGNATURES)
        learn_rows(state.active + base * most, context, learnt, surprise, held, padded, lanes, chunk)
    tl.debug_barrier()
    x = state.features + base * (_FEATURES * padded) + expert
    store_tile(state.rates + base * (_RATES * padded), rates, padded, lanes)
    store_tile(state.features + base * (_FEATURES * padded), tl.sqrt_rn(rates), padded, lanes)
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
        unused = unused * (1.0 - logistic(tl.load(state.value + place, mask=inside, other=0.0)))
        left = left & (tl.arange(0, stream_lanes) != stream)
        stream = next_stream(left, stream_lanes)
    worth = tl.where(alone, lately.to(tl.float64) - 1.0, 0.0 - unused)
    tl.store(state.worth + layer * padded + expert, worth, mask=inside)


class Following:
    """Launches the kernel that follows an event of so many tokens, each of a request of its own."""

    def __init__(self, table: Any, state: NextUseTensors, shape: ModelShape, tokens: int) -> None:
        self.requests = torch.arange(tokens, dtype=torch.int64, device=state.value.device)
        self._table, self._state = table, state
        streams, length = state.history.shape[:2]
        experts, top_k = shape.experts, shape.top_k
        lanes, most = _lanes(experts, 16), state.rows.shape[0]
        row_lanes = _lanes(most)
        self._warps = 4 if lanes <= 64 else 8
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
    fresh = torch.zeros(8, dtype=torch.float32)
    fresh[: len(features.HALF_LIVES)] = torch.tensor(
        [1.0 - 0.5 ** (1.0 / half_life) for half_life in features.HALF_LIVES]
    )
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

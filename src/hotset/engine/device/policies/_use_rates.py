"""Rates of use and transitions on the device: the twin of hotset.policies._use_features, for one token of a stream."""

from __future__ import annotations

import triton
import triton.language as tl

from hotset.engine.device.policies._use_weights import weight
from hotset.policies import _use_features as host

_RATES = tl.constexpr(host.RATES)
_SMOOTH, _RARE = tl.constexpr(host.SMOOTH), tl.constexpr(host.RARE)
_RATE_ROWS = tl.constexpr(8)  # a power of two that holds all rates


@triton.jit
def common_rates(state, layer, counts, tokens, padded: tl.constexpr, lanes: tl.constexpr):
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
def followers(
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
def aged_rates(state, base, is_first, lately, used, seen, padded: tl.constexpr, lanes: tl.constexpr):
    """The rates of a stream, a token older; a request begins with those that all streams had lately."""
    rate, expert = tl.arange(0, _RATE_ROWS), tl.arange(0, lanes)
    there = (rate[:, None] < _RATES) & (expert[None, :] < padded)
    spot = state.rates + base * (_RATES * padded) + rate[:, None] * padded + expert[None, :]
    rates = tl.where(is_first, lately[None, :], tl.load(spot, mask=there, other=0.0))
    fresh = tl.where(rate == _RATES - 1, (1.0 / seen).to(tl.float32), tl.load(state.fresh + rate))
    return rates + fresh[:, None] * (used[None, :] - rates)


@triton.jit
def weigh_rates(state, layer, base, is_first, lately, used, seen, padded: tl.constexpr, lanes: tl.constexpr):
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
        value += weight(state, layer, number) * tl.sqrt_rn(rate)
    return value


@triton.jit
def transitions(
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
def store_tile(place, rows, padded: tl.constexpr, lanes: tl.constexpr):
    """Store one row per rate."""
    rate, expert = tl.arange(0, _RATE_ROWS), tl.arange(0, lanes)
    there = (rate[:, None] < _RATES) & (expert[None, :] < padded)
    tl.store(place + rate[:, None] * padded + expert[None, :], rows, mask=there)

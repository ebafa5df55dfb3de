"""The default policy on the device: the same learning as the host's, bit for bit.

Every sum runs in the host's order and in float64, and products are not fused into sums: the kernel is to be compiled
with `enable_fp_fusion=False`. What one thread computes and another needs goes through memory, with a barrier between.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from hotset.engine.device.policies import DevicePolicy
from hotset.policies import _regression as shared
from hotset.policies import blend as host

Tensor = torch.Tensor

_RATES, _FEATURES = tl.constexpr(host.RATES), tl.constexpr(host.FEATURES)
_MEAN, _LIFT, _BIAS = tl.constexpr(host.MEAN), tl.constexpr(host.LIFT), tl.constexpr(host.BIAS)
_LANES = tl.constexpr(shared.LANES)
_LEARN_RATE, _FORGET = tl.constexpr(shared.LEARN_RATE), tl.constexpr(shared.FORGET)
_MIN_ENERGY = tl.constexpr(shared.MIN_ENERGY)
_SPELL, _CHURN_RATE = tl.constexpr(host.SPELL), tl.constexpr(host.CHURN_RATE)
_SMOOTH, _RARE = tl.constexpr(host.SMOOTH), tl.constexpr(host.RARE)
_ROWS = tl.constexpr(16)  # powers of two that hold all features, all rates, and rows of transitions at a time
_RATE_ROWS = tl.constexpr(8)
_AT_A_TIME = tl.constexpr(8)


class BlendTensors(NamedTuple):
    """What the device needs of the state, and how much of a rate one token replaces."""

    value: Tensor
    worth: Tensor
    churn: Tensor
    rates: Tensor
    features: Tensor
    seen: Tensor
    shared: Tensor
    own: Tensor
    shared_energy: Tensor
    own_energy: Tensor
    follows: Tensor
    followed: Tensor
    previous: Tensor
    scratch: Tensor
    fresh: Tensor  # float64 [_RATE_ROWS]


@triton.jit
def load_state(state, layer, experts: tl.constexpr, lanes: tl.constexpr):
    """What is known of the layer's experts, the weights, and who was used by the pass before."""
    padded: tl.constexpr = (experts + _LANES - 1) // _LANES * _LANES
    expert, rate = tl.arange(0, lanes), tl.arange(0, _RATE_ROWS)
    value = tl.load(state.value + layer * padded + expert, mask=expert < padded, other=0.0)
    place = (layer * _RATES + rate[:, None]) * padded + expert[None, :]
    inside = (rate[:, None] < _RATES) & (expert[None, :] < padded)
    rates = tl.load(state.rates + place, mask=inside, other=0.0)
    known = tl.load(state.seen + layer), tl.load(state.churn + layer), value, rates, tl.load(state.fresh + rate)
    return known, _load_weights(state, layer), _load_previous(state, layer, experts, lanes)


@triton.jit
def _load_weights(state, layer):
    """The shared weights and their energies, then the layer's own."""
    feature = tl.arange(0, _ROWS)
    there, own = feature < _FEATURES, layer * _FEATURES + feature
    shared = tl.load(state.shared + feature, mask=there, other=0.0)
    shared_energy = tl.load(state.shared_energy + feature, mask=there, other=1.0)
    weights = tl.load(state.own + own, mask=there, other=0.0)
    return shared, shared_energy, weights, tl.load(state.own_energy + own, mask=there, other=1.0)


@triton.jit
def _load_previous(state, layer, experts: tl.constexpr, lanes: tl.constexpr):
    """How many experts the pass before used, the first of them, and how often each expert was followed."""
    expert, row = tl.arange(0, lanes), tl.arange(0, _ROWS)
    previous = state.previous + layer * (experts + 1)
    before = tl.load(previous + 1 + row, mask=row < experts, other=-1)
    followed = tl.load(state.followed + layer * experts + expert, mask=expert < experts, other=0.0)
    return tl.load(previous), before, followed


@triton.jit
def observe_and_score(
    state, found, layer, tick, passes, resident, slots, used, counts, slot_of, num_used, num_missing,
    experts: tl.constexpr, lanes: tl.constexpr, variant: tl.constexpr,
):  # fmt: skip
    """Learn from how well this event was predicted, then observe it and predict the next."""
    padded: tl.constexpr = (experts + _LANES - 1) // _LANES * _LANES
    expert = tl.arange(0, lanes)
    known, weights, previous = found
    seen, churn, value, rates, fresh = known
    live = num_used > 0
    learns = live & (seen > 0)
    hits = tl.where(used, 1.0, 0.0).to(tl.float64)
    surprise = tl.where(expert < experts, hits - _logistic(value), 0.0)
    fresh = tl.where(tl.arange(0, _RATE_ROWS) == _RATES - 1, 1.0 / (seen + 1.0), fresh)
    rates += fresh[:, None] * (hits[None, :] - rates)
    churn += (num_missing.to(tl.float64) - churn) * _CHURN_RATE
    if variant == 1:
        _follow(state, previous, layer, used, num_used, experts, padded, lanes)
    tl.debug_barrier()
    tl.store(state.scratch + expert, hits, mask=(expert < padded) & live)
    tl.store(state.scratch + padded + expert, surprise, mask=(expert < padded) & learns)
    _store_rows(state.rates + layer * _RATES * padded, rates, live, padded, lanes)
    tl.store(state.seen + layer, seen + 1.0, mask=live)
    tl.store(state.churn + layer, churn, mask=live)
    tl.debug_barrier()
    mean = tl.zeros((lanes,), tl.float64)
    lift = tl.zeros((lanes,), tl.float64)
    if variant == 1:
        mean, lift = _transitions(state, layer, num_used, experts, padded, lanes)
    _learn(state, weights, layer, learns, experts, padded)
    features = state.features + layer * _FEATURES * padded
    _store_rows(features, tl.sqrt(rates), live, padded, lanes)
    tl.store(features + _MEAN * padded + expert, mean, mask=(expert < padded) & live)
    tl.store(features + _LIFT * padded + expert, lift, mask=(expert < padded) & live)
    tl.debug_barrier()
    stay = resident.to(tl.float64) / tl.where(churn > _RARE, churn, _RARE)
    discount = tl.full((1,), _SPELL, tl.float64) / (stay + _SPELL)
    return _predict_next(state, layer, mean, lift, discount, live, padded, lanes)


@triton.jit
def _logistic(x):
    """The host's logistic function: multiplications only, repeated squaring."""
    power = 1.0 - tl.minimum(tl.abs(x), 24.0) / 256.0
    for _ in tl.static_range(8):
        power = power * power
    small = power / (power + 1.0)
    return tl.where(x > 0, 1.0 - small, small)


@triton.jit
def _store_rows(place, rows, live, padded: tl.constexpr, lanes: tl.constexpr):
    """Store one row per rate."""
    rate, expert = tl.arange(0, _RATE_ROWS), tl.arange(0, lanes)
    inside = (rate[:, None] < _RATES) & (expert[None, :] < padded)
    tl.store(place + rate[:, None] * padded + expert[None, :], rows, mask=inside & live)


@triton.jit
def _follow(state, found, layer, used, num_used, experts: tl.constexpr, padded: tl.constexpr, lanes: tl.constexpr):
    """Count which experts follow which, and remember these for the next pass."""
    expert, row = tl.arange(0, lanes), tl.arange(0, _ROWS)
    held, before, followed = found
    live = num_used > 0
    previous = state.previous + layer * (experts + 1)
    table = state.follows + layer.to(tl.int64) * experts * padded
    led = tl.zeros((lanes,), tl.int32)
    start = 0
    while start < held:
        before = tl.where(start + row < held, before, -1)
        spot = table + before[:, None] * padded + expert[None, :]
        there = (before[:, None] >= 0) & used[None, :]
        uses = tl.load(spot, mask=there, other=0.0)
        led = tl.maximum(led, tl.max((before[:, None] == expert[None, :]).to(tl.int32), axis=0))
        tl.debug_barrier()
        tl.store(spot, uses + 1.0, mask=there)
        start += _ROWS
        before = tl.load(previous + 1 + start + row, mask=start + row < held, other=-1)
    tl.debug_barrier()
    tl.store(state.followed + layer * experts + expert, followed + 1.0, mask=(led > 0) & live)
    tl.store(previous + tl.cumsum(used.to(tl.int32), axis=0), expert, mask=used)
    tl.store(previous, num_used, mask=live)


@triton.jit
def _transitions(state, layer, held, experts: tl.constexpr, padded: tl.constexpr, lanes: tl.constexpr):
    """Two views of what follows the experts just used: the mean probability, and the summed lift over the base rate."""
    expert = tl.arange(0, lanes)
    inside = expert < padded
    previous = state.previous + layer * (experts + 1)
    table = state.follows + layer.to(tl.int64) * experts * padded
    usual = tl.load(state.rates + (layer * _RATES + _RATES - 1) * padded + expert, mask=inside, other=0.0) + _RARE
    mean = tl.zeros((lanes,), tl.float64)
    lift = tl.zeros((lanes,), tl.float64)
    start = 0
    while start < held:
        for place in tl.static_range(_AT_A_TIME):  # unrolled, so that the rows are all on their way at once
            there = start + place < held
            before = tl.load(previous + 1 + start + place, mask=there, other=0)
            row = tl.load(table + before * padded + expert, mask=inside & there, other=0.0).to(tl.float64)
            scale = 1.0 / (tl.load(state.followed + layer * experts + before) + _SMOOTH)
            probability = (row + usual * _SMOOTH) * scale
            mean = tl.where(there, mean + probability, mean)
            lift = tl.where(there, lift + (probability - usual) / (probability + usual), lift)
        start += _AT_A_TIME
    return tl.sqrt(mean / tl.maximum(held, 1).to(tl.float64)), lift


@triton.jit
def _learn(state, weights, layer, live, experts: tl.constexpr, padded: tl.constexpr):
    """One step on the log-likelihood of what was used, for the shared weights and the layer's own."""
    feature = tl.arange(0, _ROWS)
    lane = tl.arange(0, _LANES)
    there = feature < _FEATURES
    rows = state.features + (layer * _FEATURES + feature[:, None]) * padded + lane[None, :]
    sums = tl.zeros((_ROWS, _LANES), tl.float64)
    for start in tl.static_range(0, padded, _LANES):
        surprise = tl.load(state.scratch + padded + start + lane)
        sums += surprise[None, :] * tl.load(rows + start, mask=there[:, None], other=0.0)
    gradient = _add_lanes(sums) / experts
    square = gradient * gradient + _MIN_ENERGY
    shared, shared_energy, own, own_energy = weights
    shared_energy = shared_energy * _FORGET + square
    own_energy = own_energy * _FORGET + square
    tl.debug_barrier()
    place, there = layer * _FEATURES + feature, there & live
    tl.store(state.shared_energy + feature, shared_energy, mask=there)
    tl.store(state.own_energy + place, own_energy, mask=there)
    tl.store(state.shared + feature, shared + gradient * _LEARN_RATE / tl.sqrt(shared_energy), mask=there)
    tl.store(state.own + place, own + gradient * _LEARN_RATE / tl.sqrt(own_energy), mask=there)


@triton.jit
def _add_lanes(sums):
    """The eight lanes of each row added in the host's order: neighbours first."""
    even, odd = tl.split(tl.reshape(sums, (_ROWS, 4, 2)))
    even, odd = tl.split(tl.reshape(even + odd, (_ROWS, 2, 2)))
    even, odd = tl.split(even + odd)
    return even + odd


@triton.jit
def _predict_next(state, layer, mean, lift, discount, live, padded: tl.constexpr, lanes: tl.constexpr):
    """Fill the layer's probabilities and scores for its next pass; returns the scores."""
    expert = tl.arange(0, lanes)
    inside = expert < padded
    features = state.features + layer * _FEATURES * padded + expert
    worth = tl.zeros((lanes,), tl.float64) + _weight(state, layer, _BIAS)
    for rate in tl.static_range(_RATES):
        worth += _weight(state, layer, rate) * tl.load(features + rate * padded, mask=inside, other=0.0)
    passing = _weight(state, layer, _MEAN) * mean + _weight(state, layer, _LIFT) * lift
    value = worth + passing
    worth += discount * passing
    tl.store(state.value + layer * padded + expert, value, mask=inside & live)
    tl.store(state.worth + layer * padded + expert, worth, mask=inside & live)
    return worth


@triton.jit
def _weight(state, layer, feature):
    """A feature's weight in this layer."""
    return tl.load(state.shared + feature) + tl.load(state.own + layer * _FEATURES + feature)


def _tensors(state: Any) -> BlendTensors:
    fresh = torch.zeros(_RATE_ROWS.value, dtype=torch.float64)
    fresh[: len(host.HALF_LIVES)] = torch.tensor(
        [1.0 - 0.5 ** (1.0 / half_life) for half_life in host.HALF_LIVES], dtype=torch.float64
    )
    return BlendTensors(**state._asdict(), fresh=fresh.to(state.rates.device))


DEVICE = DevicePolicy(
    load_state,
    observe_and_score,
    tensors=_tensors,
    variant=lambda _, state: int(state.follows.shape[0] > 0),
    least_warps=4,
)

"""The few weights of features on the device: what they are, and one step of learning."""

from __future__ import annotations

import triton
import triton.language as tl

from hotset.policies import _regression as shared
from hotset.policies import _use_features as host

_FEATURES, _ROWS = tl.constexpr(host.FEATURES), tl.constexpr(32)  # a power of two that holds all of them
_LANES, _FORGET = tl.constexpr(shared.LANES), tl.constexpr(shared.FORGET)
_MIN_ENERGY = tl.constexpr(shared.MIN_ENERGY)


@triton.jit
def learn_weights(state, layer, base, rate, experts: tl.constexpr, padded: tl.constexpr):
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
def logistic(x):
    """The host's logistic function: multiplications only, repeated squaring."""
    x = x.to(tl.float64)
    power = 1.0 - tl.minimum(tl.abs(x), 24.0) / 256.0
    for _ in tl.static_range(8):
        power = power * power
    small = power / (power + 1.0)
    return tl.where(x > 0, 1.0 - small, small)


@triton.jit
def weight(state, layer, feature):
    """A feature's weight in this layer."""
    return (tl.load(state.shared + feature) + tl.load(state.own + layer * _FEATURES + feature)).to(tl.float32)

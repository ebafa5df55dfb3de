"""The tokens before: an expert that the layer used a token ago is used again more often than one unused for long."""

# ruff: noqa: ARG001 - every forecast's functions take the same arguments
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hotset.forecasts._learnt import Rates, count, learnt, mix_rates, spread, start_rates, tokens_ahead
from hotset.forecasts.base import Forecast, Seen, compiled
from hotset.shape import ModelShape

AGES = (1, 2, 3, 5, 8, 16, 32)
"""The last ages of all buckets but the last, in tokens; the last holds what is older or was never used."""

_WEIGHT = 8.0  # trials that a bucket's even start counts for
_NEVER = -(1 << 40)
_TIE = 1e-4  # experts of one bucket are ordered by their rate of use, with no say beyond that


class PreviousState(NamedTuple):
    """When each expert was last used, and how often experts of each age were used next."""

    rates: Rates
    clock: Any  # int64 [layers], tokens
    last: Any  # int64 [layers, experts], on that clock
    cells: Any  # float64 [layers, buckets, 2], hits and trials


@compiled
def bucket_of(age: int) -> Any:
    """The first bucket that reaches up to this age."""
    bucket = 0
    for limit in AGES:
        bucket += age > limit
    return bucket


@compiled
def observe(state: PreviousState, seen: Seen) -> None:
    """Judge the buckets by new tokens, then note what was used; of a prompt, about when its last token to do so ran."""
    layer = seen.layer
    if seen.phase == 1:
        for e in range(state.last.shape[1]):
            bucket = bucket_of(state.clock[layer] - state.last[layer, e] + 1)
            count(state.cells[layer, bucket], 0.0, float(seen.tokens))
        for i in range(len(seen.experts)):
            bucket = bucket_of(state.clock[layer] - state.last[layer, seen.experts[i]] + 1)
            state.cells[layer, bucket, 0] += seen.counts[i]
    mix_rates(state.rates, seen)
    state.clock[layer] += seen.tokens
    for i in range(len(seen.experts)):
        state.last[layer, seen.experts[i]] = state.clock[layer] - seen.tokens // (seen.counts[i] + 1)


@compiled
def probabilities(state: PreviousState, seen: Seen, target: int, distance: int, out: Any) -> None:
    """What the expert's age has meant in the target layer so far."""
    rate = state.rates.rate[target]
    even = _even(rate)
    for e in range(len(out)):
        bucket = bucket_of(state.clock[target] - state.last[target, e] + 1)
        out[e] = learnt(state.cells[target, bucket], even, _WEIGHT) + _TIE * rate[e]
    spread(out, tokens_ahead(seen, target))


@compiled
def _even(rate: Any) -> Any:
    total = 0.0
    for e in range(len(rate)):
        total += rate[e]
    return total / len(rate)


@dataclass(frozen=True, kw_only=True)
class Previous(Forecast, name="previous", observe=observe, probabilities=probabilities):
    """The probability of each expert by how many tokens ago its layer used it."""

    def start(self, shape: ModelShape) -> PreviousState:
        """Nothing was ever used, and every age is alike."""
        return PreviousState(
            start_rates(shape),
            np.zeros(shape.layers, np.int64),
            np.full((shape.layers, shape.experts), _NEVER, np.int64),
            np.zeros((shape.layers, len(AGES) + 1, 2)),
        )


FORECAST = Previous

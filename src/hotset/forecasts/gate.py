"""The routers themselves: what the next layers' routers make of this layer's input, and how often they are right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hotset.forecasts._learnt import Rates, count, learnt, mix_rates, spread, start_rates, tokens_ahead
from hotset.forecasts.base import MAX_DISTANCE, Forecast, Seen, compiled
from hotset.shape import ModelShape

OWN_WEIGHT, ALL_WEIGHT = 24.0, 8.0
"""Trials that the probability of all layers counts for in a layer's own, and the even start in that of all layers."""

RANK_START = 0.5
"""The probability that a prediction of any rank is right, before anything is counted."""
_REST = 0.4  # of the rate of use, for an expert that was not predicted


class GateState(NamedTuple):
    """The predictions that wait for their layer, and how often those of each rank were right."""

    rates: Rates
    pending: Any  # int16 [distances, layers, experts]: best first, then -1
    several: Any  # uint8 [distances, layers], whether the predictions are of several tokens together
    all_cells: Any  # float64 [2, distances, experts + 1, 2]: by rank, over all layers; the last: not predicted
    own_cells: Any  # float64 [2, distances, layers, experts + 1, 2]
    rank: Any  # int32 [experts], of the predictions at hand


@compiled
def observe(state: GateState, seen: Seen) -> None:
    """Judge the predictions that were made for this layer, then take in those made from it."""
    for d in range(MAX_DISTANCE):
        if state.pending[d, seen.layer, 0] >= 0:
            _judge(state, d, seen)
            state.pending[d, seen.layer, 0] = -1
    mix_rates(state.rates, seen)
    layers = state.pending.shape[1]
    for d in range(min(MAX_DISTANCE, layers)):
        target = (seen.layer + d + 1) % layers
        _keep(state.pending[d, target], seen, d)
        state.several[d, target] = seen.tokens > 1


@compiled
def probabilities(state: GateState, seen: Seen, target: int, distance: int, out: Any) -> None:
    """What a prediction of this rank has been worth; the rest in proportion to the rate of use."""
    rate, d = state.rates.rate[target], distance - 1
    for e in range(len(out)):
        out[e] = rate[e]
    tokens = tokens_ahead(seen, target)
    spread(out, tokens)
    if distance > MAX_DISTANCE or state.pending[d, target, 0] < 0:
        return
    several = state.several[d, target]
    _rank(state, state.pending[d, target])
    for e in range(len(out)):
        out[e] = expected(state, several, d, target, state.rank[e], out[e])


@compiled
def expected(state: GateState, several: int, d: int, layer: int, rank: int, rate: float) -> Any:
    """The layer's own record, leaning on that of all layers while it is short."""
    shared = learnt(state.all_cells[several, d, rank], _REST if rank == len(state.rank) else RANK_START, ALL_WEIGHT)
    own = learnt(state.own_cells[several, d, layer, rank], shared, OWN_WEIGHT)
    return min(rate * own, 1.0) if rank == len(state.rank) else own


@compiled
def _judge(state: GateState, d: int, seen: Seen) -> None:
    several, none = state.several[d, seen.layer], len(state.rank)
    _rank(state, state.pending[d, seen.layer])
    everywhere, here = state.all_cells[several, d], state.own_cells[several, d, seen.layer]
    rate = state.rates.rate[seen.layer]
    for e in range(none):
        trials = 1.0
        if state.rank[e] == none:
            trials = 1.0 - (1.0 - rate[e]) ** seen.tokens if seen.tokens > 1 else rate[e]
        count(everywhere[state.rank[e]], 0.0, trials)
        count(here[state.rank[e]], 0.0, trials)
    for i in range(len(seen.experts)):
        everywhere[state.rank[seen.experts[i]], 0] += 1.0
        here[state.rank[seen.experts[i]], 0] += 1.0


@compiled
def _rank(state: GateState, predicted: Any) -> None:
    """Which expert was predicted at which rank; the number of experts stands for none."""
    for e in range(len(state.rank)):
        state.rank[e] = len(state.rank)
    for r in range(len(predicted)):
        if predicted[r] < 0:
            return
        state.rank[predicted[r]] = r


@compiled
def _keep(row: Any, seen: Seen, d: int) -> None:
    """Copy the predictions without gaps and repetitions."""
    kept = 0
    if d < seen.predictions.shape[0]:
        for i in range(seen.predictions.shape[1]):
            expert, known = seen.predictions[d, i], False
            for j in range(kept):
                known |= row[j] == expert
            if expert >= 0 and not known:
                row[kept] = expert
                kept += 1
    if kept < len(row):
        row[kept] = -1


@dataclass(frozen=True, kw_only=True)
class Gate(Forecast, name="gate", observe=observe, probabilities=probabilities, needs="predictions", on_device=True):
    """The probability of each expert by the rank at which the target layer's router predicted it."""

    def start(self, shape: ModelShape) -> GateState:
        """No prediction waits, and every rank is right half of the time."""
        layers, experts = shape.layers, shape.experts
        return GateState(
            start_rates(shape),
            np.full((MAX_DISTANCE, layers, experts), -1, np.int16),
            np.zeros((MAX_DISTANCE, layers), np.uint8),
            np.zeros((2, MAX_DISTANCE, experts + 1, 2)),
            np.zeros((2, MAX_DISTANCE, layers, experts + 1, 2)),
            np.zeros(experts, np.int32),
        )


FORECAST = Gate

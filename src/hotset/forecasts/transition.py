"""The path through the layers: which experts usually follow the experts that an earlier layer just used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hotset.forecasts._learnt import Rates, mix_rates, spread, start_rates, tokens_ahead
from hotset.forecasts.base import MAX_DISTANCE, Forecast, Seen, compiled
from hotset.shape import ModelShape

SMOOTH = 4.0
"""A row of the table starts as this many tokens of the rate of use."""

_TABLE_BYTES = 64 << 20  # for one distance; a model whose table takes more goes without


class TransitionState(NamedTuple):
    """Counts of which experts of a layer came after which of the layers before it."""

    rates: Rates
    follows: Any  # float32 [distances, layers, experts, experts], or empty: uses after each expert
    followed: Any  # float64 [distances, layers, experts]
    trail: Any  # int32 [distances, 2 + experts]: layer and size of the latest events, newest first, and their experts


@compiled
def observe(state: TransitionState, seen: Seen) -> None:
    """Count what followed what, where both are of one token each, and remember these experts."""
    if state.follows.shape[0] > 0 and seen.tokens == 1:
        for d in range(MAX_DISTANCE):
            if state.trail[d, 0] == _before(seen.layer, d + 1, state.follows.shape[1]):
                _add(state.follows[d, seen.layer], state.followed[d, seen.layer], state.trail[d], seen)
    mix_rates(state.rates, seen)
    _remember(state.trail, seen)


@compiled
def probabilities(state: TransitionState, seen: Seen, target: int, distance: int, out: Any) -> None:
    """The mean, over the experts just used, of what followed each."""
    rate = state.rates.rate[target]
    if state.follows.shape[0] == 0 or distance > MAX_DISTANCE:
        for e in range(len(out)):
            out[e] = rate[e]
    else:
        _mean(state, seen, target, distance - 1, out)
    spread(out, tokens_ahead(seen, target))


@compiled
def add_lift(state: TransitionState, seen: Seen, target: int, distance: int, out: Any) -> None:
    """The sum, over the experts just used, of what each says for and against: naive Bayes, bounded.

    A lift (p - rate) / (p + rate) is the hyperbolic tangent of half the log ratio.
    """
    for e in range(len(out)):
        out[e] = 0.0
    if state.follows.shape[0] == 0 or distance > MAX_DISTANCE:
        return
    rate, uses = state.rates.rate[target], _uses(seen)
    for i in range(len(seen.experts)):
        row = state.follows[distance - 1, target, seen.experts[i]]
        scale = 1.0 / (state.followed[distance - 1, target, seen.experts[i]] + SMOOTH)
        share = seen.counts[i] * len(seen.experts) / uses
        for e in range(len(out)):
            probability = (row[e] + SMOOTH * rate[e]) * scale
            out[e] += share * (probability - rate[e]) / (probability + rate[e] + 1e-9)


@compiled
def _mean(state: TransitionState, seen: Seen, target: int, d: int, out: Any) -> None:
    rate, uses = state.rates.rate[target], _uses(seen)
    for e in range(len(out)):
        out[e] = 0.0
    for i in range(len(seen.experts)):
        row = state.follows[d, target, seen.experts[i]]
        share = seen.counts[i] / uses / (state.followed[d, target, seen.experts[i]] + SMOOTH)
        for e in range(len(out)):
            out[e] += share * (row[e] + SMOOTH * rate[e])


@compiled
def _uses(seen: Seen) -> Any:
    total = 0
    for i in range(len(seen.counts)):
        total += seen.counts[i]
    return total


@compiled
def _before(layer: int, distance: int, layers: int) -> Any:
    return (layer - distance) % layers


@compiled
def _add(follows: Any, followed: Any, trail: Any, seen: Seen) -> None:
    for i in range(trail[1]):
        source = trail[2 + i]
        followed[source] += 1.0
        row = follows[source]
        for j in range(len(seen.experts)):
            row[seen.experts[j]] += np.float32(1.0)


@compiled
def _remember(trail: Any, seen: Seen) -> None:
    """Push the event; one of several tokens is kept as empty, for who follows whom is not known."""
    for d in range(len(trail) - 1, 0, -1):
        for i in range(2 + trail[d - 1, 1]):
            trail[d, i] = trail[d - 1, i]
    trail[0, 0] = seen.layer
    trail[0, 1] = len(seen.experts) if seen.tokens == 1 else 0
    for i in range(trail[0, 1]):
        trail[0, 2 + i] = seen.experts[i]


@dataclass(frozen=True, kw_only=True)
class Transition(Forecast, name="transition", observe=observe, probabilities=probabilities):
    """The probability of each expert given those just used, 1 to 3 layers before.

    A table takes layers x experts x experts x 4 bytes per distance; where that is above 64 MiB, the rate of use stands
    in for it.
    """

    def start(self, shape: ModelShape) -> TransitionState:
        """Nothing has followed anything."""
        layers, experts = shape.layers, shape.experts
        distances = MAX_DISTANCE if table_bytes(shape) <= _TABLE_BYTES else 0
        trail = np.zeros((MAX_DISTANCE, 2 + experts), np.int32)
        trail[:, 0] = -1
        return TransitionState(
            start_rates(shape),
            np.zeros((distances, layers, experts, experts), np.float32),
            np.zeros((MAX_DISTANCE, layers, experts)),
            trail,
        )


def table_bytes(shape: ModelShape) -> int:
    """What the table of one distance takes."""
    return 4 * shape.layers * shape.experts**2


FORECAST = Transition

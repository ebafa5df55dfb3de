"""Requests of the past: what those most like the running one used is likely to be used again (arXiv 2401.14361)."""

# ruff: noqa: ARG001 - every forecast's functions take the same arguments
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hotset.forecasts._learnt import Rates, log_odds, mix_rates, spread, start_rates, tokens_ahead
from hotset.forecasts.base import Forecast, Seen, compiled
from hotset.policies._regression import step
from hotset.policies.eam import (
    CAPACITY,
    MAX_CAPACITY,
    MAX_NEAREST,
    EamState,
    empty_state,
    match,
    take,
    total_of,
    uses_of,
)  # fmt: skip
from hotset.shape import ModelShape

SMOOTH = 4.0
"""A predicted row starts as this many tokens of the rate of use: a short request has not used all it likes."""

_MIN_SLOPE = 0.05  # what is predicted more must never become less likely


class EamForecastState(NamedTuple):
    """Past requests and the running one, the rates of use, and how predictions become probabilities."""

    requests: EamState
    rates: Rates
    top_k: Any  # float64 [1]
    line: Any  # float64 [2], slope and offset of the log-odds
    energy: Any  # float64 [2], sums of squared gradients that fade (AdaGrad that forgets)


@compiled
def observe(state: EamForecastState, seen: Seen) -> None:
    """Judge the prediction by new tokens, take them into the running request, and look for past ones like it."""
    if seen.phase == 1:
        _learn(state, seen)
    take(state.requests, seen.layer, seen.experts, seen.counts, seen.phase, seen.request)
    match(state.requests, seen.phase)
    mix_rates(state.rates, seen)


@compiled
def probabilities(state: EamForecastState, seen: Seen, target: int, distance: int, out: Any) -> None:
    """The share of a token's uses that the expert has in the nearest requests, as a probability.

    The paper's nearness, 1 - distance / layers, says what to fetch first. It is alike for a whole layer.
    """
    phase = 1 if target <= seen.layer else seen.phase
    for e in range(len(out)):
        value = state.line[0] * log_odds(_raw(state, phase, target, e)) + state.line[1]
        out[e] = 1.0 / (1.0 + math.exp(-value))
    spread(out, tokens_ahead(seen, target))


@compiled
def _raw(state: EamForecastState, phase: int, layer: int, expert: int) -> Any:
    uses = uses_of(state.requests, phase, layer, expert) + SMOOTH * state.rates.rate[layer, expert]
    return min(uses / (total_of(state.requests, phase, layer) / state.top_k[0] + SMOOTH), 1.0)


@compiled
def _learn(state: EamForecastState, seen: Seen) -> None:
    """One step on the log-likelihood of what was used."""
    slope, offset = 0.0, 0.0
    experts, at = state.requests.running.shape[3], 0
    for e in range(experts):
        odds = log_odds(_raw(state, 1, seen.layer, e))
        surprise = -1.0 / (1.0 + math.exp(-state.line[0] * odds - state.line[1]))
        if at < len(seen.experts) and seen.experts[at] == e:
            surprise += seen.counts[at] / seen.tokens
            at += 1
        slope += surprise * odds / experts
        offset += surprise / experts
    step(state.line, state.energy, 0, slope)
    step(state.line, state.energy, 1, offset)
    state.line[0] = max(state.line[0], _MIN_SLOPE)


@dataclass(frozen=True, kw_only=True)
class Eam(Forecast, name="eam", observe=observe, probabilities=probabilities):
    """The probability of each expert by its uses in the `nearest` of `capacity` past requests."""

    capacity: int = CAPACITY
    nearest: int = 1

    def check(self) -> None:
        """Sizes within reason."""
        self.require(
            1 <= self.capacity <= MAX_CAPACITY and 1 <= self.nearest <= MAX_NEAREST,
            f"capacity must be 1 to {MAX_CAPACITY} requests, and nearest 1 to {MAX_NEAREST} of them",
        )

    def start(self, shape: ModelShape) -> EamForecastState:
        """No request is stored, and predictions are taken at their word."""
        return EamForecastState(
            requests=empty_state(shape, self.capacity, self.nearest, 0.0),
            rates=start_rates(shape),
            top_k=np.array([float(shape.top_k)]),
            line=np.array([1.0, 0.0]),
            energy=np.full(2, 1e-3),
        )


FORECAST = Eam

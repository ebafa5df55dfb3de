"""All that is known, weighed: a logistic regression over the other forecasts, learnt while the model runs.

What the members say is taken as log-odds against the rate of use, so a member that knows nothing adds nothing. There
is one vector of weights per distance; where the target lies in the next pass, whose token is not known yet, there is
another, and two more for passes of several tokens, where the question is whether any of them uses an expert.

Likeness of requests (eam) is no member: it adds less than 0.05 points of recall for more than half as much time again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hotset.forecasts import gate, previous, token, transition
from hotset.forecasts._learnt import Rates, log_odds, mix_rates, spread, start_rates, tokens_ahead
from hotset.forecasts.base import MAX_DISTANCE, Forecast, Seen, compiled
from hotset.policies._regression import dot, logistic, padded, step
from hotset.shape import ModelShape

HALF_LIVES = (1.0, 3.0, 8.0, 24.0, 72.0, 240.0)
RATES = len(HALF_LIVES)
BIAS, BASE, AGE = RATES, RATES + 1, RATES + 2
COMMON = RATES + 3
"""Features of a layer alone: its recent rates of use, a constant, the rate of all time, and its experts' ages."""

MEAN, LIFT, WORD, ROUTER, EARLIER = 0, 1, 2, 3, 4
MEMBERS = 5
"""Features by distance: transitions in two views, the token, the routers, and what was predicted a layer ago."""


class BestState(NamedTuple):
    """What the members know, their last words on every layer, and the weights of these."""

    rates: Rates
    previous: previous.PreviousState
    transition: transition.TransitionState
    token: token.TokenState
    gate: gate.GateState
    recent: Any  # float64 [layers, half-lives, padded experts], recent rates of use
    common: Any  # float64 [layers, COMMON, padded experts]
    members: Any  # float64 [distances, layers, MEMBERS, padded experts]
    value: Any  # float64 [distances, layers, padded experts], log-odds of use
    kind: Any  # int8 [distances, layers], of predictions; 0: of this pass, 1: of the next, 2 and 3: of several tokens
    weights: (
        Any  # float64 [kinds, distances, COMMON + MEMBERS]: in the pass and in the next, the same for several tokens
    )
    energy: Any  # as weights: sums of squared gradients that fade (AdaGrad that forgets)
    scratch: Any  # float64 [2, padded experts]


@compiled
def observe(state: BestState, seen: Seen) -> None:
    """Learn from how well this event was predicted, let the members learn, then predict from it."""
    if seen.phase == 1:
        _learn(state, seen)
    previous.observe(state.previous, seen)
    transition.observe(state.transition, seen)
    token.observe(state.token, seen)
    gate.observe(state.gate, seen)
    mix_rates(state.rates, seen)
    _mix_recent(state, seen)
    _describe(state, seen)
    layers = len(state.recent)
    for d in range(MAX_DISTANCE):
        state.kind[d, seen.layer] = -1
    for d in range(min(MAX_DISTANCE, layers)):
        _predict_next(state, seen, (seen.layer + d + 1) % layers, d)


@compiled
def probabilities(state: BestState, seen: Seen, target: int, distance: int, out: Any) -> None:
    """The probabilities as weighed when the layer was observed."""
    d = distance - 1
    if distance > MAX_DISTANCE or state.kind[d, target] < 0:
        for e in range(len(out)):
            out[e] = state.rates.rate[target, e]
        spread(out, tokens_ahead(seen, target))
    else:
        for e in range(len(out)):
            out[e] = logistic(state.value[d, target, e])


@compiled
def _learn(state: BestState, seen: Seen) -> None:
    """One step on the log-likelihood of what was used, at every distance from which it was predicted."""
    surprise = state.scratch[0]
    for d in range(MAX_DISTANCE):
        kind = state.kind[d, seen.layer]
        if kind >= 0:
            value = state.value[d, seen.layer]
            for e in range(len(value)):
                surprise[e] = -logistic(value[e])
            for i in range(len(seen.experts)):
                surprise[seen.experts[i]] += 1.0
            _step(state, surprise, seen.layer, d, kind)


@compiled
def _step(state: BestState, surprise: Any, layer: int, d: int, kind: int) -> None:
    weights, energy = state.weights[kind, d], state.energy[kind, d]
    experts = state.rates.rate.shape[1]
    for f in range(COMMON + MEMBERS):
        row = state.common[layer, f] if f < COMMON else state.members[d, layer, f - COMMON]
        gradient = dot(surprise, row) / experts
        step(weights, energy, f, gradient)


@compiled
def _mix_recent(state: BestState, seen: Seen) -> None:
    """Age the recent rates by this event's tokens and mix in what they used."""
    used = state.scratch[0]
    for e in range(len(used)):
        used[e] = 0.0
    for i in range(len(seen.experts)):
        used[seen.experts[i]] = seen.counts[i] / seen.tokens
    for r in range(RATES):
        row, fresh = state.recent[seen.layer, r], 1.0 - 0.5 ** (seen.tokens / HALF_LIVES[r])
        for e in range(len(row)):
            row[e] += fresh * (used[e] - row[e])


@compiled
def _describe(state: BestState, seen: Seen) -> None:
    """Fill the features of the layer alone, which hold until its next event."""
    features, rate = state.common[seen.layer], state.rates.rate[seen.layer]
    for r in range(RATES):
        row, recent = features[r], state.recent[seen.layer, r]
        for e in range(len(row)):
            row[e] = math.sqrt(recent[e])
    base = features[BASE]
    for e in range(len(rate)):
        base[e] = log_odds(rate[e])
    out = state.scratch[1, : len(rate)]
    previous.probabilities(state.previous, seen, seen.layer, 1, out)
    _compare(state, seen.layer, out, features[AGE])


@compiled
def _compare(state: BestState, layer: int, probability: Any, row: Any) -> None:
    """What a member's probabilities say beyond the rate of use."""
    base = state.common[layer, BASE]
    for e in range(len(probability)):
        row[e] = log_odds(probability[e]) - base[e]


@compiled
def _predict_next(state: BestState, seen: Seen, target: int, d: int) -> None:
    """Ask the members about a layer ahead and weigh their answers."""
    rows = state.members[d, target]
    out = state.scratch[1, : state.rates.rate.shape[1]]
    transition.probabilities(state.transition, seen, target, d + 1, out)
    _compare(state, target, out, rows[MEAN])
    transition.add_lift(state.transition, seen, target, d + 1, rows[LIFT, : len(out)])
    token.probabilities(state.token, seen, target, d + 1, out)
    _compare(state, target, out, rows[WORD])
    gate.probabilities(state.gate, seen, target, d + 1, out)
    _compare(state, target, out, rows[ROUTER])
    _recall_earlier(state, target, d, rows[EARLIER])
    kind = (1 if target <= seen.layer else 0) + (2 if tokens_ahead(seen, target) > 1 else 0)
    state.kind[d, target] = kind
    _weigh(state, target, d, state.weights[kind, d])


@compiled
def _recall_earlier(state: BestState, target: int, d: int, row: Any) -> None:
    base, known = state.common[target, BASE], d + 1 < MAX_DISTANCE and state.kind[d + 1, target] >= 0
    for e in range(len(row)):
        row[e] = state.value[d + 1, target, e] - base[e] if known else 0.0


@compiled
def _weigh(state: BestState, target: int, d: int, weights: Any) -> None:
    value = state.value[d, target]
    for e in range(len(value)):
        value[e] = 0.0
    for f in range(COMMON + MEMBERS):
        row = state.common[target, f] if f < COMMON else state.members[d, target, f - COMMON]
        weight = weights[f]
        for e in range(len(value)):
            value[e] += weight * row[e]


@dataclass(frozen=True, kw_only=True)
class Best(Forecast, name="best", observe=observe, probabilities=probabilities, uses_tokens=True):
    """The probability of each expert by everything that is known, weighed by how well it has predicted so far."""

    def start(self, shape: ModelShape) -> BestState:
        """Trust the rate of use and the routers fully, the others a little, until evidence says otherwise."""
        layers, width = shape.layers, padded(shape.experts)
        weights = np.zeros((4, MAX_DISTANCE, COMMON + MEMBERS))
        weights[..., BASE], weights[..., COMMON + ROUTER] = 1.0, 1.0
        weights[:2, :, [AGE, COMMON + MEAN, COMMON + WORD]] = 0.3  # of several tokens, each would repeat the routers
        common = np.zeros((layers, COMMON, width))
        common[:, BIAS, : shape.experts] = 1.0
        return BestState(
            start_rates(shape),
            previous.Previous().start(shape),
            transition.Transition().start(shape),
            token.Token().start(shape),
            gate.Gate().start(shape),
            np.zeros((layers, RATES, width)),
            common,
            np.zeros((MAX_DISTANCE, layers, MEMBERS, width)),
            np.zeros((MAX_DISTANCE, layers, width)),
            np.full((MAX_DISTANCE, layers), -1, np.int8),
            weights,
            np.full(weights.shape, 1e-3),
            np.zeros((2, width)),
        )


FORECAST = Best

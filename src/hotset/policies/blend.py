"""The default: the probability that an expert is used at its layer's next pass, learnt online.

Rates of use at several half-lives, and what usually follows the experts just used, are the features of a logistic
regression. Its weights are learnt while the model runs, one shared vector plus a correction per layer. LRU (only the
shortest half-life) and LFU (only the infinite one) are special cases, so no option has to say which regime it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hotset.policies._regression import FORGET, LEARN_RATE, MIN_ENERGY, dot, logistic, padded
from hotset.policies.base import EventView, Grid, Policy, compiled
from hotset.shape import ModelShape

HALF_LIVES = (1.0, 3.0, 8.0, 24.0, 72.0, 240.0)
RATES = len(HALF_LIVES) + 1  # and the rate of all time
MEAN, LIFT, BIAS = RATES, RATES + 1, RATES + 2
FEATURES = RATES + 3

SPELL = 10.0  # passes; a resident that stays so long takes half of what holds for the next pass only
CHURN_RATE = 0.02
SMOOTH = 4.0  # a transition row starts as this many tokens of the all-time rate
RARE = 1e-3
_TABLE_BYTES = 64 << 20  # above this the transition table stays off unless asked for


class BlendState(NamedTuple):
    """What is known of each expert, and the weights that turn it into a probability."""

    value: Grid  # log-odds of use at the next pass; rows padded
    worth: Grid  # the score: the same, with less weight on what will have passed by then
    churn: Any  # float64 [layers], experts missing per pass, lately
    rates: Any  # float64 [layers, RATES, padded experts]
    features: Any  # float64 [layers, FEATURES, padded experts]
    seen: Any  # float64 [layers], tokens
    shared: Any  # float64 [FEATURES]
    own: Any  # float64 [layers, FEATURES]
    shared_energy: Any  # float64 [FEATURES], sums of squared gradients that fade (AdaGrad that forgets)
    own_energy: Any  # float64 [layers, FEATURES]
    follows: Any  # float32 [layers, experts, padded experts], or empty: uses after each expert
    followed: Any  # float64 [layers, experts]
    previous: Any  # int32 [layers, experts + 1]: how many experts the last pass used, then which
    scratch: Any  # float64 [3, padded experts]


@compiled
def observe(state: BlendState, table: Any, event: EventView) -> None:
    """Learn from how well this event was predicted, then take it in and predict the next."""
    used = state.scratch[0]
    for e in range(len(used)):
        used[e] = 0.0
    for i in range(len(event.experts)):
        used[event.experts[i]] = event.counts[i] / event.tokens if event.phase == 0 else 1.0
    if event.phase == 1:
        if state.seen[event.layer] > 0:
            _learn(state, event.layer, used)
        _update_rates(state, event.layer, used, 1.0)
        if state.follows.shape[0] > 0:
            _follow(state, event)
    else:
        _update_rates(state, event.layer, used, float(event.tokens))
        state.previous[event.layer, 0] = 0
    _predict_next(state, event.layer, _discount(state, table, event))


@compiled
def score(state: BlendState, table: Any, event: EventView, layer: int, expert: int) -> Any:
    """The log-odds of use at the layer's next passes."""
    return state.worth[layer, expert]


@compiled
def _discount(state: BlendState, table: Any, event: EventView) -> Any:
    """How much of the transitions to believe: they speak of the next pass, and a resident stays for many."""
    missing = 0
    for expert in event.experts:
        missing += table.slot_of[event.layer, expert] < 0
    if event.phase == 1:
        state.churn[event.layer] += CHURN_RATE * (missing - state.churn[event.layer])
    stay = table.resident[event.layer] / max(state.churn[event.layer], RARE)
    return SPELL / (SPELL + stay)


@compiled
def _learn(state: BlendState, layer: int, used: Any) -> None:
    """One step on the log-likelihood of what was used, for the shared weights and the layer's own.

    Steps are scaled by recent gradients (AdaGrad that forgets).
    """
    num_experts = state.followed.shape[1]
    surprise, value = state.scratch[1], state.value[layer]
    for e in range(len(surprise)):
        surprise[e] = used[e] - logistic(value[e])
    for e in range(num_experts, len(surprise)):
        surprise[e] = 0.0
    for f in range(FEATURES):
        gradient = dot(surprise, state.features[layer, f]) / num_experts
        square = gradient * gradient + MIN_ENERGY
        state.shared_energy[f] = FORGET * state.shared_energy[f] + square
        state.own_energy[layer, f] = FORGET * state.own_energy[layer, f] + square
        state.shared[f] += LEARN_RATE * gradient / math.sqrt(state.shared_energy[f])
        state.own[layer, f] += LEARN_RATE * gradient / math.sqrt(state.own_energy[layer, f])


@compiled
def _update_rates(state: BlendState, layer: int, used: Any, tokens: float) -> None:
    """Age every rate by so many tokens and mix in what was used."""
    state.seen[layer] += tokens
    for r in range(RATES):
        fresh = tokens / state.seen[layer]
        if r < RATES - 1:
            fresh = 1.0 - 0.5 ** (tokens / HALF_LIVES[r])
        rate = state.rates[layer, r]
        for e in range(len(rate)):
            rate[e] += fresh * (used[e] - rate[e])


@compiled
def _follow(state: BlendState, event: EventView) -> None:
    """Count which experts follow which, and remember these for the next pass."""
    layer, previous = event.layer, state.previous[event.layer]
    for i in range(previous[0]):
        before = previous[1 + i]
        state.followed[layer, before] += 1.0
        row = state.follows[layer, before]
        for j in range(len(event.experts)):
            row[event.experts[j]] += 1.0
    previous[0] = len(event.experts)
    for j in range(len(event.experts)):
        previous[1 + j] = event.experts[j]


@compiled
def _predict_next(state: BlendState, layer: int, discount: float) -> None:
    """Fill the layer's features, probabilities and scores for its next pass."""
    features, value, worth = state.features[layer], state.value[layer], state.worth[layer]
    bias = state.shared[BIAS] + state.own[layer, BIAS]
    for e in range(len(worth)):
        worth[e] = bias
    for r in range(RATES):
        row, rate = features[r], state.rates[layer, r]
        weight = state.shared[r] + state.own[layer, r]
        for e in range(len(row)):
            row[e] = math.sqrt(rate[e])
            worth[e] += weight * row[e]
    _transitions(state, layer)
    mean_weight = state.shared[MEAN] + state.own[layer, MEAN]
    lift_weight = state.shared[LIFT] + state.own[layer, LIFT]
    for e in range(len(value)):
        passing = mean_weight * features[MEAN, e] + lift_weight * features[LIFT, e]
        value[e] = worth[e] + passing
        worth[e] += discount * passing


@compiled
def _transitions(state: BlendState, layer: int) -> None:
    """Two views of what follows the experts just used: the mean probability, and the summed lift over the base rate.

    The lift (p - base) / (p + base) is the hyperbolic tangent of half the log ratio: naive Bayes, bounded.
    """
    mean, lift = state.features[layer, MEAN], state.features[layer, LIFT]
    for e in range(len(mean)):
        mean[e] = 0.0
        lift[e] = 0.0
    held = state.previous[layer, 0]
    if held == 0:
        return
    base = state.rates[layer, RATES - 1]
    for i in range(held):
        before = state.previous[layer, 1 + i]
        row = state.follows[layer, before]
        scale = 1.0 / (state.followed[layer, before] + SMOOTH)
        for e in range(len(mean)):
            usual = base[e] + RARE
            probability = (row[e] + SMOOTH * usual) * scale
            mean[e] += probability
            lift[e] += (probability - usual) / (probability + usual)
    for e in range(len(mean)):
        mean[e] = math.sqrt(mean[e] / held)


@dataclass(frozen=True, kw_only=True)
class Blend(Policy, name="blend", observe=observe, score=score):
    """The least likely to be used at its layer's next pass is evicted, or is not given a slot at all.

    `transitions` is on, off, or auto: on while its table (layers x experts x experts) stays below 64 MiB.
    """

    persisted: ClassVar[dict[str, str]] = {
        "shared": "mean",
        "own": "mean",
        "follows": "sum",
        "followed": "sum",
    }
    admit: str = "score"
    transitions: str = "auto"

    def check(self) -> None:
        """Transitions are a switch with three positions."""
        self.require(
            self.transitions in ("on", "off", "auto"), f'transitions is on, off or auto, not "{self.transitions}"'
        )

    def start(self, shape: ModelShape) -> BlendState:
        """Even weights: an average of all rates, until evidence says otherwise."""
        layers, experts = shape.layers, shape.experts
        width = padded(experts)
        shared = np.ones(FEATURES)
        shared[MEAN], shared[LIFT], shared[BIAS] = 0.0, 0.0, -4.0
        small = layers * experts * width * 4 <= _TABLE_BYTES
        wants_table = self.transitions == "on" or (self.transitions == "auto" and small)
        table = (layers, experts, width) if wants_table else (0, experts, width)
        features = np.zeros((layers, FEATURES, width))
        features[:, BIAS, :experts] = 1.0
        return BlendState(
            value=np.full((layers, width), shared[BIAS]),
            worth=np.full((layers, width), shared[BIAS]),
            churn=np.full(layers, float(shape.top_k)),
            rates=np.zeros((layers, RATES, width)),
            features=features,
            seen=np.zeros(layers),
            shared=shared,
            own=np.zeros((layers, FEATURES)),
            shared_energy=np.full(FEATURES, 1e-3),
            own_energy=np.full((layers, FEATURES), 1e-3),
            follows=np.zeros(table, np.float32),
            followed=np.zeros((layers, experts)),
            previous=np.zeros((layers, experts + 1), np.int32),
            scratch=np.zeros((3, width)),
        )


POLICY = Blend

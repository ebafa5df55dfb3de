"""What a prediction of the next use is made of: rates, what usually followed, and what followed at such places."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hotset.policies._streams import recall
from hotset.policies.base import EventView, compiled, compiled_unchecked

HALF_LIVES = (1.0, 3.0, 8.0, 24.0, 72.0, 240.0)
RATES = len(HALF_LIVES) + 1  # and the rate of all time
COMMON = RATES  # rates of all streams together: of all time, and of the last thousand tokens
MEAN, LIFT, BIAS, RECALL = RATES + 2, RATES + 3, RATES + 4, RATES + 5
FEATURES = RECALL + 6
COMMON_HALF_LIFE = 1000.0  # tokens
SMOOTH = 4.0
"""A transition row starts as this many tokens of the common rate."""
RARE = 1e-3


@compiled
def common_rates(state: Any, event: EventView) -> None:
    """Rates of use of all streams together."""
    layer, tokens = event.layer, float(event.tokens)
    state.common_seen[layer] += tokens
    ever = tokens / state.common_seen[layer]
    lately = max(1.0 - 0.5 ** (tokens / COMMON_HALF_LIFE), ever)
    rates, used = state.common[layer], state.scratch[0]
    for e in range(len(used)):
        used[e] = 0.0
    for i in range(len(event.experts)):
        used[event.experts[i]] = event.counts[i] / tokens
    for e in range(len(used)):
        rates[0, e] += np.float32(ever) * (used[e] - rates[0, e])
        rates[1, e] += np.float32(lately) * (used[e] - rates[1, e])


@compiled
def age_rates(state: Any, stream: int, layer: int, tokens: int) -> None:
    """Age the rates of a stream by so many tokens, and mix in what they used."""
    used = state.scratch[0]
    state.seen[stream, layer] += tokens
    for r in range(RATES):
        fresh = tokens / state.seen[stream, layer]
        if r < RATES - 1:
            fresh = 1.0 - 0.5 ** (tokens / HALF_LIVES[r])
        rate, share = state.rates[stream, layer, r], np.float32(fresh)
        for e in range(len(rate)):
            rate[e] += share * (used[e] - rate[e])


@compiled
def count_followers(state: Any, stream: int, layer: int) -> None:
    """Count what followed the experts of the stream's pass before."""
    used = state.scratch[0]
    for k in range(state.routes.shape[2]):
        before = state.routes[stream, layer, k]
        if before < 0:
            continue
        state.followed[layer, before] += 1.0
        row = state.follows[layer, before]
        for e in range(len(row)):
            row[e] += used[e]


@compiled_unchecked
def fill_features(state: Any, event: EventView, stream: int, token: int, at: int) -> None:
    """What the prediction is made of: rates, transitions, and what followed at such a place before."""
    layer = event.layer
    x, rates, common = state.scratch[3:], state.rates[stream, layer], state.common[layer]
    for r in range(RATES):
        for e in range(x.shape[1]):
            x[r, e] = math.sqrt(rates[r, e])
    for r in range(2):
        for e in range(x.shape[1]):
            x[COMMON + r, e] = math.sqrt(common[r, e])
    for f in range(MEAN, FEATURES):
        for e in range(x.shape[1]):
            x[f, e] = 0.0
    for e in range(state.followed.shape[1]):
        x[BIAS, e] = 1.0
    transitions(state, event, token)
    found = state.found[stream, at % state.found.shape[1]]
    for which in range(2):
        if found[which] > 0:
            recall(state, x, RECALL + 3 * which, layer, found[which], at * len(state.owner) + stream)


@compiled_unchecked
def transitions(state: Any, event: EventView, token: int) -> None:
    """What usually follows the experts that a token chose: the mean probability, and the summed lift."""
    layer, x = event.layer, state.scratch[3:]
    common = state.common[layer]
    held = 0
    mean, lift = x[MEAN], x[LIFT]
    smooth, rare, one = np.float32(SMOOTH), np.float32(RARE), np.float32(1.0)
    for k in range(event.routes.shape[1]):
        before = event.routes[token, k]
        if before < 0:
            continue
        held += 1
        row = state.follows[layer, before]
        scale = np.float32(one / (np.float32(state.followed[layer, before]) + smooth))
        for e in range(len(mean)):
            usual = common[0, e] + rare
            probability = (row[e] + smooth * usual) * scale
            mean[e] += probability
            lift[e] += (probability - usual) / (probability + usual)
    share = np.float32(one / max(held, 1))
    for e in range(len(mean)):
        mean[e] = math.sqrt(mean[e] * share)

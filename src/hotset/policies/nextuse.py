"""The expected, discounted next use of every expert, learnt online for each stream of requests by itself.

Of every token it is known which experts it chose in this layer and in those before it. Each of these experts has a row
of weights, one for every expert of the layer: how much sooner, or later, that one is used. Beside these rows stand
features: rates of use, what usually followed, and what followed where a stream was before. What is predicted is the
discounted next use: 1 for an expert that is used in the stream's next pass, and g times its own prediction for one that
is not (temporal differences). The score of an expert adds up over streams.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hotset.policies._regression import FORGET, MIN_ENERGY, dot, logistic, padded
from hotset.policies._streams import FAR, PLACES, find_streams, followed_tokens, stream_of
from hotset.policies._use_features import (
    FEATURES,
    RARE,
    RATES,
    age_rates,
    common_rates,
    count_followers,
    fill_features,
)
from hotset.policies.base import EventView, Policy, compiled, compiled_unchecked
from hotset.shape import ModelShape

START = (
    0.56, -0.34, 1.04, 1.58, 0.8, -1.1, 1.12, 0.12, -1.09, -1.17, 0.26, -1.87, 0.28, -0.07, -0.13, 0.44, 0.03, -0.24,
)  # fmt: skip
"""Weights to begin with, of the features in their order: what 25 requests to gpt-oss-20b came to."""
DEPTHS = (8, 4, 2, 1)
"""Layers whose experts have rows, this one among them: the most that keep the tables within their bounds."""
SIGNATURES = 256
"""Rows by the set of experts that a token chose in the first layer: it stands for the token's identity."""
STREAMS = 16
"""Requests that are followed at a time, where memory allows it."""
AUTO = "auto"
RATE = 0.01
ROW_RATE, ROW_BOOST, ROW_SLOWS = 0.01, 4.0, 8.0
CHURN_RATE = 0.02
PRIOR = 64.0
"""Tokens that the rates of a request begin with."""
_TABLE_BYTES = 256 << 20
_STREAM_BYTES = 128 << 20


class NextUseState(NamedTuple):
    """What is known of each expert in each stream, and the weights that turn it into a prediction."""

    value: Any  # float32 [streams, layers, padded experts], log-odds of the discounted next use
    worth: Any  # float64 [layers, padded experts], the score
    features: Any  # float32 [streams, layers, FEATURES, padded experts]
    rates: Any  # float32 [streams, layers, RATES, padded experts]
    seen: Any  # float64 [streams, layers], tokens
    common: Any  # float32 [layers, 2, padded experts], rates of all streams
    common_seen: Any  # float64 [layers], tokens
    shared: Any  # float64 [FEATURES], weights
    own: Any  # float64 [layers, FEATURES]
    shared_energy: Any  # float64 [FEATURES], sums of squared gradients that fade
    own_energy: Any  # float64 [layers, FEATURES]
    follows: Any  # float32 [layers, experts, padded experts], uses after each expert
    followed: Any  # float64 [layers, experts]
    context: Any  # float32 [layers, rows, padded experts], weights of rows
    learnt: Any  # float32 [layers, rows], how often each was learnt from
    active: Any  # int32 [streams, layers, 1 + most rows], how many rows are active, then which
    routes: Any  # int32 [streams, layers, top_k], experts of the last pass; -1 for none
    churn: Any  # float64 [layers], experts missing per pass, lately
    history: Any  # int16 [streams, passes, layers, top_k], a ring
    places: Any  # int64 [2, PLACES], stream and pass where a signature, or a pair of them, was last met; 0 for none
    found: Any  # int64 [streams, passes, 2], where those of a pass were met before; 0 for none
    signature: Any  # int64 [streams, passes], or -1
    owner: Any  # int64 [streams], the request of each, or -1
    turn: Any  # int64 [streams], the event that served it last
    at: Any  # int32 [streams], the layer of that event
    passes: Any  # int64 [streams], passes of each, those under way included: a token is one
    first: Any  # int64 [streams], the first of those under way
    last: Any  # int64 [streams], the decode pass, of all, that served it last
    gap: Any  # float64 [streams], decode passes between two of its own
    begins: Any  # int32 [streams, layers], whether the next event is the first of a request
    clock: Any  # int64 [1], decode passes of all streams
    scratch: Any  # float32 [3 + FEATURES, padded experts]
    rows: Any  # int32 [1 + most rows], scratch


@compiled
def observe(state: NextUseState, table: Any, event: EventView) -> None:
    """Learn from how well this event was predicted in each stream, then predict the next."""
    common_rates(state, event)
    live = find_streams(state, event)
    if live == 0:  # what each token chose is not known
        _add_up(state, event.layer)
        return
    stay = _stay(state, table, event)
    for stream in range(len(state.owner)):
        if state.turn[stream] == event.tick:
            apart = state.gap[stream] if event.phase == 1 else 1.0  # passes of all from one of its own to the next
            rate = RATE / math.sqrt(live * apart)  # so many others learn before a prediction is put right
            _follow_stream(state, event, stream, _discount(stay / apart), rate)
    _add_up(state, event.layer)


@compiled
def score(state: NextUseState, table: Any, event: EventView, layer: int, expert: int) -> Any:
    """The discounted next use, summed over streams."""
    return state.worth[layer, expert]


@compiled
def _stay(state: NextUseState, table: Any, event: EventView) -> Any:
    """How many passes residents of the layer stay."""
    missing = 0
    for expert in event.experts:
        missing += table.slot_of[event.layer, expert] < 0
    if event.phase == 1:
        state.churn[event.layer] += CHURN_RATE * (missing - state.churn[event.layer])
    return max(table.resident[event.layer], 1) / max(state.churn[event.layer], RARE)


@compiled
def _discount(stay: float) -> Any:
    """What a use is worth a pass later: more where residents stay longer."""
    root = math.sqrt(stay)
    return root / (1.0 + root)


@compiled
def _begin_request(state: NextUseState, stream: int, layer: int) -> None:
    """A request begins with the rates that all streams had lately."""
    state.begins[stream, layer] = 0
    state.seen[stream, layer] = PRIOR
    state.active[stream, layer, 0] = -1
    rates, common = state.rates[stream, layer], state.common[layer]
    for r in range(RATES):
        for e in range(rates.shape[1]):
            rates[r, e] = common[1, e]
    for k in range(state.routes.shape[2]):
        state.routes[stream, layer, k] = -1


@compiled
def _follow_stream(state: NextUseState, event: EventView, stream: int, discount: float, rate: float) -> None:
    """Take in the tokens of one stream: the end of a prompt one by one, and what came before as rates only."""
    layer, several, tokens = event.layer, len(event.requests) > 1, 0
    for token in range(len(event.requests)):
        tokens += not several or stream_of(state, event.requests[token]) == stream
    if state.begins[stream, layer] == 1:
        _begin_request(state, stream, layer)
    one_by_one = followed_tokens(state, event, tokens)
    if one_by_one < tokens:
        _take_rest(state, event, stream, tokens - one_by_one)
    at, skipped = state.first[stream], tokens - one_by_one
    for token in range(len(event.requests)):
        if several and stream_of(state, event.requests[token]) != stream:
            continue
        if skipped > 0:
            skipped -= 1
            continue
        _pass(state, event, stream, token, at, discount, rate)
        at += 1


@compiled
def _take_rest(state: NextUseState, event: EventView, stream: int, tokens: int) -> None:
    """The tokens that are not taken one by one: what a prompt begins with, or what a decode step verified before."""
    layer, used, several, left = event.layer, state.scratch[0], len(event.requests) > 1, tokens
    for e in range(len(used)):
        used[e] = 0.0
    for token in range(len(event.requests)):
        if left == 0 or (several and stream_of(state, event.requests[token]) != stream):
            continue
        left -= 1
        for k in range(event.routes.shape[1]):
            if event.routes[token, k] >= 0:
                used[event.routes[token, k]] += np.float32(1.0 / tokens)
    age_rates(state, stream, layer, tokens)
    for k in range(state.routes.shape[2]):
        state.routes[stream, layer, k] = -1
    state.active[stream, layer, 0] = -1


@compiled
def _pass(
    state: NextUseState, event: EventView, stream: int, token: int, at: int, discount: float, rate: float
) -> None:  # fmt: skip
    """One token of one stream: count what followed what, predict, and learn from the prediction before."""
    layer, used = event.layer, state.scratch[0]
    for e in range(len(used)):
        used[e] = 0.0
    for k in range(event.routes.shape[1]):
        if event.routes[token, k] >= 0:
            used[event.routes[token, k]] = 1.0
    count_followers(state, stream, layer)
    age_rates(state, stream, layer, 1)
    fill_features(state, event, stream, token, at)
    _fill_rows(state, event, stream, token, at)
    _predict(state, layer)
    if state.active[stream, layer, 0] >= 0:
        _learn(state, stream, layer, discount, rate)
    _keep(state, event, stream, token, at)


@compiled
def _fill_rows(state: NextUseState, event: EventView, stream: int, token: int, at: int) -> None:
    """The rows of what was chosen: in this layer and those before it, in this layer a pass ago, and the signature."""
    layer, rows, experts = event.layer, state.rows, state.followed.shape[1]
    top_k = min(event.routes.shape[1], state.routes.shape[2])
    depth, count = (state.context.shape[1] - SIGNATURES) // experts - 1, 0
    for k in range(top_k):
        if event.routes[token, k] >= 0:
            count += 1
            rows[count] = event.routes[token, k]
    length = state.history.shape[1]
    ring = state.history[stream, at % length]
    for d in range(1, min(depth, layer + 1)):
        for k in range(top_k):
            if ring[layer - d, k] >= 0:
                count += 1
                rows[count] = d * experts + ring[layer - d, k]
    for k in range(top_k):
        if state.routes[stream, layer, k] >= 0:
            count += 1
            rows[count] = depth * experts + state.routes[stream, layer, k]
    count += 1
    rows[count] = (depth + 1) * experts + state.signature[stream, at % length] % SIGNATURES
    rows[0] = count


@compiled_unchecked
def _predict(state: NextUseState, layer: int) -> None:
    """Log-odds from features and rows, into the scratch."""
    value, x = state.scratch[1], state.scratch[3:]
    for e in range(len(value)):
        value[e] = 0.0
    for f in range(FEATURES):
        weight = np.float32(state.shared[f] + state.own[layer, f])
        for e in range(len(value)):
            value[e] += weight * x[f, e]
    for i in range(state.rows[0]):
        row = state.context[layer, state.rows[1 + i]]
        for e in range(len(value)):
            value[e] += row[e]


@compiled_unchecked
def _learn(state: NextUseState, stream: int, layer: int, discount: float, rate: float) -> None:
    """One step of temporal differences: what was used counts 1, what was not its discounted prediction."""
    used, value, surprise = state.scratch[0], state.scratch[1], state.scratch[2]
    before, x, experts = state.value[stream, layer], state.features[stream, layer], state.followed.shape[1]
    for e in range(len(surprise)):
        target = 1.0 if used[e] > 0 else discount * logistic(value[e])
        surprise[e] = target - logistic(before[e])
    for e in range(experts, len(surprise)):
        surprise[e] = 0.0
    for f in range(FEATURES):
        gradient = dot(surprise, x[f]) / experts
        square = gradient * gradient + MIN_ENERGY
        state.shared_energy[f] = FORGET * state.shared_energy[f] + square
        state.own_energy[layer, f] = FORGET * state.own_energy[layer, f] + square
        state.shared[f] += rate * gradient / math.sqrt(state.shared_energy[f])
        state.own[layer, f] += rate * gradient / math.sqrt(state.own_energy[layer, f])
    active = state.active[stream, layer]
    for i in range(active[0]):
        at = active[1 + i]
        step = np.float32(ROW_RATE * (1.0 + ROW_BOOST / (1.0 + state.learnt[layer, at] / ROW_SLOWS)))
        state.learnt[layer, at] += 1
        row = state.context[layer, at]
        for e in range(len(row)):
            row[e] += step * surprise[e]


@compiled
def _keep(state: NextUseState, event: EventView, stream: int, token: int, at: int) -> None:
    """Keep the prediction and what it was made of, for the next pass to learn from."""
    layer, x = event.layer, state.scratch[3:]
    value, features = state.value[stream, layer], state.features[stream, layer]
    for e in range(len(value)):
        value[e] = state.scratch[1, e]
    for f in range(FEATURES):
        for e in range(len(value)):
            features[f, e] = x[f, e]
    for i in range(state.rows[0] + 1):
        state.active[stream, layer, i] = state.rows[i]
    ring = state.history[stream, at % state.history.shape[1], layer]
    for k in range(min(event.routes.shape[1], len(ring))):
        ring[k] = event.routes[token, k]
        state.routes[stream, layer, k] = event.routes[token, k]


@compiled_unchecked
def _add_up(state: NextUseState, layer: int) -> None:
    """The score of each expert: that any stream that goes on uses it, as if streams were independent."""
    worth, alone = state.worth[layer], True
    for e in range(len(worth)):
        worth[e] = 1.0
    for stream in range(len(state.owner)):
        waits = state.clock[0] - state.last[stream]
        if state.passes[stream] == 0 or waits > 1.25 * state.gap[stream] - 0.5:
            continue
        value, alone = state.value[stream, layer], False
        for e in range(len(worth)):
            worth[e] *= 1.0 - logistic(value[e])
    for e in range(len(worth)):
        worth[e] = state.common[layer, 1, e] - 1.0 if alone else -worth[e]


@dataclass(frozen=True, kw_only=True)
class NextUse(Policy, name="nextuse", observe=observe, score=score):
    """The experts that are used latest, and least, from now on leave, those of the event itself among them.

    `depth` is of how many layers the experts have rows, `streams` how many requests are followed at a time, and
    `passes` how many passes back places are remembered. Tables and streams take 256 and 128 MiB at most by `auto`.
    """

    needs_routes: ClassVar[bool] = True
    persisted: ClassVar[dict[str, str]] = {
        "shared": "mean",
        "own": "mean",
        "follows": "sum",
        "followed": "sum",
        "context": "mean",
        "learnt": "sum",
    }
    admit: str = "late"
    depth: str = "auto"
    streams: str = "auto"
    passes: int = 1024

    def check(self) -> None:
        """Bounds of what is kept."""
        self.require(_in(self.depth, 1, 16), f"depth is auto or 1 to 16 layers, not {self.depth}")
        self.require(_in(self.streams, 1, 256), f"streams is auto or 1 to 256, not {self.streams}")
        self.require(FAR < self.passes <= 1 << 16, f"passes is {FAR + 1} to {1 << 16}, not {self.passes}")

    def sizes(self, shape: ModelShape) -> tuple[int, int]:
        """The depth of rows and the number of streams, so that neither takes too much memory."""
        width = padded(shape.experts)
        of_rows = 4 * shape.layers * width
        found = [d for d in DEPTHS if of_rows * ((d + 1) * shape.experts + SIGNATURES) <= _TABLE_BYTES]
        depth = int(self.depth) if self.depth != AUTO else (found or [1])[0]
        of_stream = shape.layers * (4 * width * (FEATURES + RATES + 1) + 2 * shape.top_k * self.passes)
        streams = int(self.streams) if self.streams != AUTO else min(max(_STREAM_BYTES // of_stream, 1), STREAMS)
        return depth, streams

    def start(self, shape: ModelShape) -> NextUseState:
        """Weights that another model's routing came to, and nothing known of this one's."""
        layers, experts, top_k, width = shape.layers, shape.experts, shape.top_k, padded(shape.experts)
        depth, streams = self.sizes(shape)
        rows, most = (depth + 1) * experts + SIGNATURES, (depth + 1) * top_k + 2
        f32, i32 = np.float32, np.int32
        return NextUseState(
            value=np.full((streams, layers, width), -4.0, f32),
            worth=np.full((layers, width), -1.0),
            features=np.zeros((streams, layers, FEATURES, width), f32),
            rates=np.zeros((streams, layers, RATES, width), f32),
            seen=np.zeros((streams, layers)),
            common=np.zeros((layers, 2, width), f32),
            common_seen=np.zeros(layers),
            shared=np.array(START),
            own=np.zeros((layers, FEATURES)),
            shared_energy=np.full(FEATURES, 1e-3),
            own_energy=np.full((layers, FEATURES), 1e-3),
            follows=np.zeros((layers, experts, width), f32),
            followed=np.zeros((layers, experts)),
            context=np.zeros((layers, rows, width), f32),
            learnt=np.zeros((layers, rows), f32),
            active=np.zeros((streams, layers, most), i32),
            routes=np.full((streams, layers, top_k), -1, i32),
            churn=np.full(layers, float(top_k)),
            history=np.full((streams, self.passes, layers, top_k), -1, np.int16),
            places=np.zeros((2, PLACES), np.int64),
            found=np.zeros((streams, self.passes, 2), np.int64),
            signature=np.full((streams, self.passes), -1, np.int64),
            owner=np.full(streams, -1, np.int64),
            turn=np.full(streams, -1, np.int64),
            at=np.full(streams, 1 << 30, i32),
            passes=np.zeros(streams, np.int64),
            first=np.zeros(streams, np.int64),
            last=np.zeros(streams, np.int64),
            gap=np.ones(streams),
            begins=np.ones((streams, layers), i32),
            clock=np.zeros(1, np.int64),
            scratch=np.zeros((3 + FEATURES, width), f32),
            rows=np.zeros(most, i32),
        )


def _in(word: str, least: int, most: int) -> bool:
    """Whether an option is auto, or a whole number within bounds."""
    return word == AUTO or (word.isdecimal() and least <= int(word) <= most)


POLICY = NextUse

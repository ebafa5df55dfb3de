"""Events as forecasts see them, made by hand or drawn at random, and a forecast that runs as a live model runs it."""

from __future__ import annotations

from typing import Any

import numpy as np

from hotset.forecasts import MAX_DISTANCE, Forecast, Seen
from hotset.forecasts._kernel import steps_of
from hotset.shape import ModelShape
from hotset.trace import Trace

SHAPE = ModelShape(layers=4, experts=10, top_k=3)


def seen(layer: int, experts: list[int], **changes: Any) -> Seen:
    """An event of one new token, unless changed."""
    parts: dict[str, Any] = {"tokens": 1, "phase": 1, "request": 0, "token": -1} | changes
    counts = parts.pop("counts", [1] * len(experts))
    predictions = np.asarray(parts.pop("predictions", np.empty((0, 0))), np.int16)
    return Seen(
        layer, np.array(experts, np.int32), np.array(counts, np.int32), parts["tokens"], parts["phase"],
        parts["request"], parts["token"], predictions,
    )  # fmt: skip


class Live:
    """A forecast as the engine runs it: event by event."""

    def __init__(self, forecast: Forecast, shape: ModelShape) -> None:
        self.steps, self.state, self.shape = steps_of(type(forecast)), forecast.start(shape), shape

    def observe(self, event: Seen) -> None:
        """Let it learn from an event."""
        self.steps.observe(self.state, *event)

    def probabilities(self, event: Seen, distance: int) -> Any:
        """What it says after an event of the layer so many further on."""
        out = np.empty(self.shape.experts)
        self.steps.probabilities(self.state, *event, (event.layer + distance) % self.shape.layers, distance, out)
        return out


def random_trace(shape: ModelShape = SHAPE, requests: int = 8, new: int = 12, seed: int = 0, batch: int = 1) -> Trace:
    """Prompts of five tokens, then passes of `batch`; paths depend on the token, predictions on the truth."""
    rng = np.random.default_rng(seed)
    habit = rng.random((20, shape.layers, shape.experts))
    prompt, tokens = 5, requests * (5 + new)
    request, place = np.divmod(np.arange(tokens), prompt + new)
    phase = place >= prompt
    ids = rng.integers(0, 20, tokens)
    scores = habit[ids] + 0.5 * rng.random((tokens, shape.layers, shape.experts))
    experts = np.argsort(-scores, axis=-1)[..., : shape.top_k].astype(np.int16)
    within = np.where(place < prompt, 0, 1 + (place - prompt) // batch)
    step = np.cumsum(np.diff(request * 1000 + within, prepend=0) != 0)
    return Trace(
        shape, experts, request.astype(np.int32), step.astype(np.int32), phase.astype(np.uint8),
        token_ids=ids.astype(np.int32), predictions=_predictions(scores, rng),
    )  # fmt: skip


def _predictions(scores: Any, rng: np.random.Generator) -> Any:
    found = np.full((*scores.shape[:2], MAX_DISTANCE, 4), -1, np.int16)
    for d in range(MAX_DISTANCE):
        noisy = scores + 0.3 * (d + 1) * rng.random(scores.shape)
        found[:, d + 1 :, d] = np.argsort(-noisy, axis=-1)[:, d + 1 :, :4]
    return found


def events_of(trace: Trace) -> list[Seen]:
    """The events as the engine would report them; the predictions of several tokens together, best voted first."""
    table = trace.events()
    found = []
    for i in range(len(table)):
        own = slice(table.start[i], table.start[i + 1])
        layer, rows = int(table.layer[i]), np.flatnonzero(trace.step == np.unique(trace.step)[table.step[i]])
        ids = trace.token_ids
        token = int(ids[rows[0]]) if ids is not None and len(rows) == 1 else -1
        found.append(
            Seen(layer, table.expert[own], table.count[own], int(table.tokens[i]), int(table.phase[i]),
                 int(table.request[i]), token, _told(trace, rows, layer))
        )  # fmt: skip
    return found


def _told(trace: Trace, rows: Any, layer: int) -> Any:
    if trace.predictions is None:
        return np.empty((0, 0), np.int16)
    told = np.full((MAX_DISTANCE, trace.shape.experts), -1, np.int16)
    for d in range(min(trace.predictions.shape[2], MAX_DISTANCE)):
        target = layer + d + 1
        if target < trace.shape.layers:
            row = _union(trace.predictions[rows, target, d])
            told[d, : len(row)] = row
    return told


def _union(predictions: Any) -> list[int]:
    if len(predictions) == 1:
        return [int(expert) for expert in predictions[0] if expert >= 0]
    votes: dict[int, int] = {}
    for row in predictions:
        for rank, expert in enumerate(row):
            if expert >= 0:
                votes[int(expert)] = votes.get(int(expert), 0) + len(row) - rank
    return sorted(votes, key=lambda expert: (-votes[expert], expert))[: len(predictions[0])]

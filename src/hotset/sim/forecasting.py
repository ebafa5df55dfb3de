"""Judges forecasts on a trace: how many of the experts used had been named, and what a probability is worth."""

# ruff: noqa: F821 - observe and probabilities are bound per forecast
from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.checks import number, texts, whole
from hotset.errors import HotsetError
from hotset.forecasts import MAX_DISTANCE, Forecast, Seen, names, parse
from hotset.forecasts._kernel import bind
from hotset.plugins import install, resolve
from hotset.prefetch.votes import rank_votes
from hotset.trace import Phase, Trace
from hotset.trace.events import EventTable

BINS = 10
"""Probabilities are sorted into so many bins of equal width to see what they are worth."""

_PACE_EVENTS = 4000  # enough to time a forecast
_MIN_PROBABILITY = 1e-6  # a wrong certainty costs this much log-loss, not everything
HITS, HITS_TWICE, USED, PICKED, PICKED_TWICE, LOG_LOSS, BRIER, ASKED, JUDGED = range(9)
SUMS = 9

PREFETCH_SOURCES = tuple(sorted((Path(__file__).parents[1] / "prefetch").glob("*.py")))
"""What of `hotset.prefetch` may end up in the machine code of a loop."""

observe: Callable[..., None]
probabilities: Callable[..., None]


_REMEDIES = {"predictions": "record it with --record-lookahead 3", "token_ids": "hotset trace record keeps them"}


@dataclass(frozen=True)
class Score:
    """How well one forecast predicted events so many layers ahead; figures are of targets in the same pass.

    `recall` is the share of the experts used that were among the k most likely (k: top_k for each token of the event),
    `next_pass_recall` the same where the target lies in the next pass, whose token is not known yet.
    """

    forecast: str
    distance: int
    events: int
    recall: float | None
    precision: float | None
    recall_2k: float | None
    precision_2k: float | None
    log_loss: float | None
    brier: float | None
    calibration_error: float | None
    next_pass_recall: float | None
    us_per_event: float
    recall_by_layer: list[float | None]
    bins: list[tuple[float, float, int]]  # mean probability, share used, number of probabilities; of all targets


@dataclass(frozen=True)
class Evaluation:
    """The scores of all forecasts on one trace, and on what they were judged."""

    judged: str
    scores: list[Score] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The evaluation as plain values, for JSON."""
        return asdict(self)


class EventArrays(NamedTuple):
    """A trace as the compiled loop walks over it."""

    start: Any
    layer: Any
    tokens: Any
    phase: Any
    request: Any
    expert: Any
    count: Any
    step: Any
    bounds: Any  # int64 [passes + 1], tokens of each pass
    token_ids: Any  # int32 [tokens], or empty
    predicted: Any  # int16 [tokens, layers, distances, width], what routers predicted, or empty
    targets: Any  # int64 [events, distances], the event that many layers later, or -1
    judged: Any  # bool [events]


def evaluate(
    trace: Trace,
    forecasts: Sequence[str] | None = None,
    distances: Sequence[int] = (1, 2, 3),
    fit: float = 0.5,
    *,
    advance: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Run each forecast over the trace and judge it on new tokens of the requests after the first share `fit`."""
    _check(distances, fit)
    install()
    known = [d for d in distances if d <= trace.shape.layers]
    events = trace.events()
    judged, words = _judged(events, trace, fit)
    result = Evaluation(words)
    arrays = arrays_of(trace, events, judged)
    for spec in names() if forecasts is None else texts(forecasts, "the forecasts") or names():
        forecast = parse(resolve(spec, "forecast"))
        if (why := lacking(forecast.spec, trace)) is not None:
            result.notes.append(f"{forecast.spec} is left out: {why}")
        else:
            sums, bins = run_loop(forecast, forecast.start(trace.shape), trace, arrays, known)
            us = _pace(forecast, trace, arrays, known)
            result.scores.extend(_score(forecast.spec, d, sums[d - 1], bins[d - 1], us) for d in known)
        advance()
    return result


def can_judge(spec: str, trace: Trace) -> bool:
    """Whether a trace holds what a forecast needs."""
    return lacking(spec, trace) is None


def lacking(spec: str, trace: Trace) -> str | None:
    """Why a trace cannot judge a forecast, and what to do; None if it can."""
    needs = parse(spec).needs
    if not needs or getattr(trace, needs) is not None:
        return None
    return f"the trace has no {needs.replace('_', ' ')}: {_REMEDIES.get(needs, 'record it with them')}"


def _check(distances: Sequence[int], fit: float) -> None:
    if not isinstance(distances, Sequence) or not distances:
        raise HotsetError(f"the distances must be a list of 1 to {MAX_DISTANCE} layers")
    for distance in distances:
        whole(distance, "a distance in layers", 1, MAX_DISTANCE)
    if not 0 <= number(fit, "the share to learn from first", 0, 1) < 1:
        raise HotsetError(f"the share to learn from first is from 0 to below 1, not {fit}")


def _judged(events: EventTable, trace: Trace, fit: float) -> tuple[npt.NDArray[np.bool_], str]:
    """Which events count, and that in words; a single request is cut by its passes."""
    decode = events.phase == Phase.DECODE
    first = math.ceil(fit * trace.requests)
    if first < trace.requests:
        chosen = decode & (events.request >= first)
        words = f"new tokens of requests {first + 1} to {trace.requests}"
    else:
        first = math.ceil(fit * trace.steps)
        chosen = decode & (events.step >= first)
        words = f"new tokens of passes {first + 1} to {trace.steps}"
    if not chosen.any():
        raise HotsetError(
            "there are no new tokens to judge by: the trace holds prompts only, or the share is too large"
        )
    return chosen, f"{words}, in order, with everything before them learnt"


def arrays_of(trace: Trace, events: EventTable, judged: npt.NDArray[np.bool_]) -> EventArrays:
    """Lay a trace out for the compiled loop."""
    passes = np.flatnonzero(np.diff(trace.step, prepend=trace.step[0] - 1))
    return EventArrays(
        events.start, events.layer, events.tokens, events.phase, events.request, events.expert, events.count,
        events.step, np.append(passes, trace.tokens).astype(np.int64),
        np.empty(0, np.int32) if trace.token_ids is None else np.ascontiguousarray(trace.token_ids),
        np.empty((0, 0, 0, 0), np.int16) if trace.predictions is None else np.ascontiguousarray(trace.predictions),
        _targets(events), judged,
    )  # fmt: skip


def _targets(events: EventTable) -> npt.NDArray[np.int64]:
    """Where each event's targets are; where a layer was left out on the way there is none."""
    found = np.full((len(events), MAX_DISTANCE), -1, np.int64)
    for d in range(1, MAX_DISTANCE + 1):
        there = np.arange(len(events) - d)
        fits = events.layer[d:] == (events.layer[: len(there)] + d) % events.shape.layers
        near = events.step[d:] - events.step[: len(there)] == (events.layer[: len(there)] + d) // events.shape.layers
        found[: len(there), d - 1] = np.where(fits & near, there + d, -1)
    return found


def learn(forecast: Forecast, state: Any, trace: Trace) -> None:
    """Let a forecast see all events of a trace."""
    events = trace.events()
    run_loop(forecast, state, trace, arrays_of(trace, events, np.zeros(len(events), np.bool_)), ())


def run_loop(
    forecast: Forecast, state: Any, trace: Trace, arrays: EventArrays, distances: Sequence[int], most: int | None = None
) -> tuple[Any, Any]:
    """Let a forecast walk over all events, or so many; returns its sums by distance and layer, and its bins."""
    layers, experts = trace.shape.layers, trace.shape.experts
    sums, bins = np.zeros((MAX_DISTANCE, layers, SUMS)), np.zeros((MAX_DISTANCE, BINS, 3))
    wanted = np.isin(np.arange(1, MAX_DISTANCE + 1), distances)
    scratch, ranked = np.zeros((2, experts)), np.empty((MAX_DISTANCE, experts), np.int16)
    events = len(arrays.layer) if most is None else most
    loop_of(type(forecast))(state, arrays, wanted, trace.shape.top_k, sums, bins, scratch, ranked, events)
    return sums, bins


def _pace(forecast: Forecast, trace: Trace, arrays: EventArrays, distances: Sequence[int]) -> float:
    """Microseconds of CPU time per event to learn and to fill the probabilities, judging none; the better of two."""
    events = min(len(arrays.layer), _PACE_EVENTS)
    blank = arrays._replace(judged=np.zeros_like(arrays.judged))
    taken = []
    for _ in range(2):
        state = forecast.start(trace.shape)
        began = time.thread_time()
        run_loop(forecast, state, trace, blank, distances, events)
        taken.append(time.thread_time() - began)
    return 1e6 * min(taken) / events


def _score(spec: str, distance: int, sums: Any, bins: Any, us: float) -> Score:
    within, across = sums[distance:].sum(0), sums[:distance].sum(0)
    return Score(
        forecast=spec,
        distance=distance,
        events=int(within[JUDGED]),
        recall=_ratio(within[HITS], within[USED]),
        precision=_ratio(within[HITS], within[PICKED]),
        recall_2k=_ratio(within[HITS_TWICE], within[USED]),
        precision_2k=_ratio(within[HITS_TWICE], within[PICKED_TWICE]),
        log_loss=_ratio(within[LOG_LOSS], within[ASKED]),
        brier=_ratio(within[BRIER], within[ASKED]),
        calibration_error=_ratio(np.abs(bins[:, 0] - bins[:, 1]).sum(), bins[:, 2].sum()),
        next_pass_recall=_ratio(across[HITS], across[USED]),
        us_per_event=us,
        recall_by_layer=[_ratio(row[HITS], row[USED]) for row in sums],
        bins=[(float(p / n), float(u / n), int(n)) if n else (0.0, 0.0, 0) for p, u, n in bins],
    )


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole > 0 else None


def load_predictions(arrays: EventArrays, event: int, scratch: Any, ranked: Any) -> None:
    """Fill what the routers ahead made of this event's input; the predictions of several tokens are ranked by votes."""
    distances, layers = arrays.predicted.shape[2], arrays.predicted.shape[1]
    first, last = arrays.bounds[arrays.step[event]], arrays.bounds[arrays.step[event] + 1]
    for d in range(ranked.shape[0]):
        for r in range(ranked.shape[1]):
            ranked[d, r] = -1
        target = arrays.layer[event] + d + 1
        if d < distances and target < layers:
            if last - first == 1:
                for r in range(min(arrays.predicted.shape[3], ranked.shape[1])):
                    ranked[d, r] = arrays.predicted[first, target, d, r]
            else:
                rank_votes(arrays.predicted[first:last, target, d], scratch, ranked[d])


def judge(arrays: EventArrays, event: int, top_k: int, out: Any, used: Any, sums: Any, bins: Any) -> None:
    """Compare the probabilities of one event with what it used."""
    experts = arrays.expert[arrays.start[event] : arrays.start[event + 1]]
    picked = min(top_k * arrays.tokens[event], len(out))
    twice = min(2 * picked, len(out))
    for e in range(len(out)):
        used[e] = 0.0
    for i in range(len(experts)):
        rank = 0
        for e in range(len(out)):
            rank += (out[e] > out[experts[i]]) | ((out[e] == out[experts[i]]) & (e < experts[i]))
        used[experts[i]] = 1.0
        sums[HITS] += rank < picked
        sums[HITS_TWICE] += rank < twice
    sums[USED] += len(experts)
    sums[PICKED] += picked
    sums[PICKED_TWICE] += twice
    sums[JUDGED] += 1
    weigh(out, used, sums, bins)


def weigh(out: Any, used: Any, sums: Any, bins: Any) -> None:
    """Add up what the probabilities were worth as probabilities."""
    sums[ASKED] += len(out)
    for e in range(len(out)):
        likely = out[e] if used[e] > 0 else 1.0 - out[e]
        sums[LOG_LOSS] -= math.log(max(likely, _MIN_PROBABILITY))
        sums[BRIER] += (out[e] - used[e]) ** 2
        place = min(int(out[e] * BINS), BINS - 1)
        bins[place, 0] += out[e]
        bins[place, 1] += used[e]
        bins[place, 2] += 1


def token_of(arrays: EventArrays, event: int) -> int:
    """The id of the token that an event's step computes, if it is one and known."""
    step = arrays.step[event]
    if len(arrays.token_ids) > 0 and arrays.bounds[step + 1] - arrays.bounds[step] == 1:
        return int(arrays.token_ids[arrays.bounds[step]])
    return -1


def seen_of(arrays: EventArrays, event: int, ranked: Any, given: bool) -> Any:
    """An event as forecasts see it; the routers' predictions only if they are known."""
    low, high = arrays.start[event], arrays.start[event + 1]
    return Seen(
        arrays.layer[event], arrays.expert[low:high], arrays.count[low:high], arrays.tokens[event], arrays.phase[event],
        arrays.request[event], token_of(arrays, event), ranked[:, : ranked.shape[1] * given],
    )  # fmt: skip


def loop(
    state: Any, arrays: EventArrays, wanted: Any, top_k: int, sums: Any, bins: Any, scratch: Any, predicted: Any,
    events: int,
) -> None:  # fmt: skip
    """Observe all events in order; after each, forecast the layers ahead and judge where that counts."""
    layers, given = sums.shape[1], len(arrays.predicted) > 0
    for event in range(events):
        if given:
            load_predictions(arrays, event, scratch[0], predicted)
        seen = seen_of(arrays, event, predicted, given)
        observe(state, seen)
        for d in range(len(wanted)):
            if wanted[d]:
                target = (seen.layer + d + 1) % layers
                probabilities(state, seen, target, d + 1, scratch[0])
                there = arrays.targets[event, d]
                if there >= 0 and arrays.judged[there]:
                    judge(arrays, there, top_k, scratch[0], scratch[1], sums[d, target], bins[d])


_TEMPLATES = (load_predictions, token_of, seen_of, weigh, judge, loop)
_MADE: dict[type[Forecast], Callable[..., None]] = {}


def loop_of(forecast: type[Forecast]) -> Callable[..., None]:
    """The compiled loop of one forecast, made once per process."""
    if forecast not in _MADE:
        _MADE[forecast] = bind(forecast, _TEMPLATES, (loop,), globals(), PREFETCH_SOURCES)["loop"]
    return _MADE[forecast]

"""Fit the synthetic router to a recorded trace by matching the statistics that decide what a cache can do."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.errors import TraceError
from hotset.trace.event import Phase
from hotset.trace.summary import entropy, repeat_rate, spread, top_share
from hotset.trace.synth import SynthConfig, synthesise
from hotset.trace.trace import Trace

REPEAT_LAGS = (1, 4, 16, 64)
"""The distances, in tokens of one request, at which reuse of experts is compared."""

FIT_EVALUATIONS = 32
"""The most calls of `advance` that one fit makes."""

_SAMPLE_TOKENS = 100_000
_SAMPLE_REQUESTS = 512
_SMALL_VALUES = 15_000_000  # logits per short synthetic trace
_LARGE_VALUES = 100_000_000  # logits of the traces that settle the fit
_ROUNDS = ((_SMALL_VALUES, 8), (_SMALL_VALUES, 4), (_LARGE_VALUES, 4))  # and the steps of each
_MAX_LAYERS = 32
_WEIGHT_ROWS = 20_000
_SPREADS = ("skew", "topic_strength", "noise", "slow")
_DIFFERENCE = 0.15
_LONGEST_STEP = 0.8

Floats = npt.NDArray[np.float64]
Statistics = dict[str, float]


@dataclass(frozen=True, slots=True)
class FitRow:
    """One statistic of the recorded trace and of the fitted one; NaN where that is too short for it."""

    statistic: str
    target: float
    reached: float


@dataclass(frozen=True, slots=True)
class FitReport:
    """A fitted config, and how near its trace comes to the recorded one."""

    config: SynthConfig
    rows: tuple[FitRow, ...]

    @property
    def worst_gap(self) -> float:
        """The largest distance between target and reached, of the statistics that both traces have."""
        gaps = [abs(row.target - row.reached) for row in self.rows]
        return max(gap for gap in gaps if math.isfinite(gap))


@dataclass(frozen=True, slots=True)
class _Knob:
    """A parameter that the search turns, on a scale on which its effect is roughly even."""

    name: str
    low: float
    high: float
    start: float

    def encode(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return math.log(share / (1.0 - share))

    def decode(self, place: float) -> float:
        return self.low + (self.high - self.low) / (1.0 + math.exp(-min(max(place, -9.0), 9.0)))


_TOKEN_KNOBS = (
    _Knob("skew", 0.0, 5.0, 0.6),
    _Knob("locality", 0.0, 0.99, 0.3),
    _Knob("slow", 0.0, 3.0, 0.4),
    _Knob("slow_tokens", 2.0, 128.0, 20.0),
)
_REQUEST_KNOBS = (
    _Knob("topic_strength", 0.0, 5.0, 0.7),
    _Knob("drift", 0.0, 1.0, 0.1),
    _Knob("topic_stay", 0.0, 1.0, 0.5),
)


def fit(trace: Trace, *, seed: int = 0, topics: int = 8, advance: Callable[[], None] = lambda: None) -> FitReport:
    """Find the config whose decode tokens have the statistics of `trace`; each trial calls `advance`."""
    sample = _sample(trace)
    target = measure(sample)
    found = _search(sample, target, _start(trace, seed, topics), advance)
    size = _resize(found, sample, _LARGE_VALUES)
    drawn = synthesise(replace(size, layers=min(size.layers, found.layers)))
    reached = measure(drawn)
    rows = [FitRow(name, value, reached.get(name, math.nan)) for name, value in target.items()]
    config, weight_row = _match_weights(trace, drawn, found)
    return FitReport(config, (*rows, *weight_row))


def measure(trace: Trace) -> Statistics:
    """The statistics of the decode tokens, as shares; those the trace is too short for are left out."""
    decode = trace.take(trace.phase == Phase.DECODE)
    halves = _count_halves(decode)
    counts = halves.sum(axis=(0, 1))
    found = {
        "top_fifth": top_share(counts, 0.2),
        "entropy": spread(entropy(counts))["mean"],
        **{f"repeat_{lag}": repeat_rate(decode, lag) for lag in REPEAT_LAGS},
        **_likeness(halves),
    }
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def _count_halves(trace: Trace) -> Floats:
    """Uses of each expert in the first and the second half of each request."""
    shape, lengths = trace.shape, np.bincount(trace.request)
    rows = np.argsort(trace.request, kind="stable")  # requests that were served together are taken apart
    request = trace.request[rows].astype(np.int64)
    nth = np.arange(trace.tokens) - (np.cumsum(lengths) - lengths)[request]
    half = 2 * request + (nth >= lengths[request] // 2)
    place = (half[:, None, None] * shape.layers + np.arange(shape.layers)[:, None]) * shape.experts + trace.experts[
        rows
    ]
    size = (trace.requests, 2, shape.layers, shape.experts)
    return np.bincount(place[trace.experts[rows] >= 0], minlength=math.prod(size)).reshape(size).astype(np.float64)


def _search(sample: Trace, target: Statistics, base: SynthConfig, advance: Callable[[], None]) -> SynthConfig:
    """Levenberg-Marquardt on traces of the same random numbers, so that a change of outcome has one cause."""
    knobs = _TOKEN_KNOBS + (_REQUEST_KNOBS if sample.requests > 1 else ())

    def config(place: Floats) -> SynthConfig:
        values: dict[str, Any] = {k.name: float(f"{k.decode(x):.3g}") for k, x in zip(knobs, place, strict=True)}
        return replace(base, **values)

    def gaps(place: Floats, values: int) -> Floats:
        reached = measure(synthesise(_resize(config(place), sample, values)))
        return np.array([reached.get(name, wanted) - wanted for name, wanted in target.items()])

    place, slope = np.array([knob.encode(knob.start) for knob in knobs]), np.zeros((0, 0))
    for values, steps in _ROUNDS:
        if values == _SMALL_VALUES:
            slope = _differences(place, lambda at: gaps(at, _SMALL_VALUES), advance)
        gap, damping = gaps(place, values), 1e-3
        for _ in range(steps):
            step = _damped_step(slope, gap, damping)
            trial = gaps(place + step, values)
            advance()
            # Each trial, good or bad, also corrects the slope (Broyden).
            slope += np.outer(trial - gap - slope @ step, step) / max(float(step @ step), 1e-12)
            if trial @ trial < gap @ gap:
                place, gap, damping = place + step, trial, damping / 4
            else:
                damping *= 8
    return config(place)


def _differences(place: Floats, gaps: Callable[[Floats], Floats], advance: Callable[[], None]) -> Floats:
    moved = [place, *(place + _DIFFERENCE * unit for unit in np.eye(len(place)))]
    found = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for gap in pool.map(gaps, moved):
            found.append(gap)
            advance()
    return np.stack([gap - found[0] for gap in found[1:]], axis=1) / _DIFFERENCE


def _damped_step(slope: Floats, gap: Floats, damping: float) -> Floats:
    normal = slope.T @ slope + damping * np.eye(slope.shape[1])
    step: Floats = -np.linalg.solve(normal, slope.T @ gap).astype(np.float64)
    return step * min(1.0, _LONGEST_STEP / max(float(np.abs(step).max()), 1e-12))


def _start(trace: Trace, seed: int, topics: int) -> SynthConfig:
    """What needs no search: shape, lengths, and no topics where there is only one request to tell them by."""
    requests = trace.requests
    alone: dict[str, Any] = {"topic_strength": 0.0, "drift": 0.0, "topic_stay": 1.0} if requests == 1 else {}
    return SynthConfig(
        **asdict(trace.shape),
        requests=requests,
        prompt_tokens=round(trace.count(Phase.PREFILL) / requests),
        new_tokens=max(1, round(trace.count(Phase.DECODE) / requests)),
        topics=1 if requests == 1 else topics,
        seed=seed,
        **alone,
    )


def _sample(trace: Trace) -> Trace:
    """The decode tokens of the first requests, as many as make a fit worth its time."""
    decode = trace.phase == Phase.DECODE
    if not decode.any():
        raise TraceError("the trace has no decode tokens to fit: record some generation too")
    lengths = np.cumsum(np.bincount(trace.request[decode], minlength=trace.requests))
    last = max(1, min(_SAMPLE_REQUESTS, int(np.searchsorted(lengths, _SAMPLE_TOKENS))))
    rows = np.flatnonzero(decode & (trace.request < last))
    return trace.take(rows if len(rows) else decode)


def _resize(config: SynthConfig, sample: Trace, values: int) -> SynthConfig:
    """The config at the size of the sample; as layers are alike, few save time and many average."""
    tokens = sample.requests * config.new_tokens
    layers = max(1, min(_MAX_LAYERS, values // (tokens * config.experts)))
    return replace(config, layers=layers, requests=sample.requests, prompt_tokens=0)


def _likeness(halves: Floats) -> dict[str, float]:
    """Cosines of activation matrices: any two requests, neighbours, halves of one, first and last third."""
    whole = halves.sum(axis=1)
    unit, count = _unit(whole), len(whole)
    both = _unit(halves[(halves.sum(axis=(2, 3)) > 0).all(axis=1)])
    pairs = float((unit.sum(axis=0) ** 2).sum()) - float((unit**2).sum())
    return {
        "cosine_requests": _ratio(pairs, count * (count - 1)),
        "cosine_neighbours": _mean_cosine(unit[1:], unit[:-1]),
        "cosine_halves": _mean_cosine(both[:, 0], both[:, 1]),
        "cosine_thirds": _thirds(whole, count // 3),
    }


def _thirds(whole: Floats, third: int) -> float:
    if third == 0:
        return math.nan
    ends = _unit(np.stack([whole[:third].sum(axis=0), whole[-third:].sum(axis=0)]))
    return _mean_cosine(ends[:1], ends[1:])


def _unit(counts: Floats) -> Floats:
    length: Floats = np.sqrt((counts**2).sum(axis=(-2, -1), keepdims=True))
    unit: Floats = counts / np.maximum(length, 1e-12)
    return unit


def _mean_cosine(left: Floats, right: Floats) -> float:
    return _ratio(float((left * right).sum()), len(left))


def _ratio(value: float, count: int) -> float:
    return value / count if count else math.nan


def _match_weights(trace: Trace, drawn: Trace, config: SynthConfig) -> tuple[SynthConfig, tuple[FitRow, ...]]:
    """Scale all logits alike: the choice of experts stays, and the largest weight gets its recorded mean."""
    recorded, logits = _weight_rows(trace), np.log(np.maximum(_weight_rows(drawn), 1e-6))
    if config.top_k == 1 or not len(recorded):
        return config, ()
    target = float(recorded.max(axis=1).mean())
    low, high = -3.0, 3.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if _largest_weight(logits, middle) < target else (low, middle)
    scale = math.exp(low)
    spreads: dict[str, Any] = {name: float(f"{getattr(config, name) * scale:.4g}") for name in _SPREADS}
    return replace(config, **spreads), (FitRow("largest_weight", target, _largest_weight(logits, low)),)


def _weight_rows(trace: Trace) -> Floats:
    """Router weights of some complete choices, each made to add up to 1."""
    if trace.weights is None:
        return np.empty((0, trace.shape.top_k))
    thin = slice(None, None, max(1, trace.tokens * trace.shape.layers // _WEIGHT_ROWS))
    chosen = trace.experts.reshape(-1, trace.shape.top_k)[thin]
    rows = trace.weights.reshape(-1, trace.shape.top_k)[thin].astype(np.float64)
    rows = rows[(chosen >= 0).all(axis=1) & (rows.sum(axis=1) > 0)]
    shares: Floats = rows / rows.sum(axis=1, keepdims=True)
    return shares


def _largest_weight(logits: Floats, log_scale: float) -> float:
    powers = np.exp(logits * math.exp(log_scale))
    return float((powers.max(axis=1) / powers.sum(axis=1)).mean())

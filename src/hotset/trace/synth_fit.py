"""Fit the synthetic router to a recorded trace by matching the statistics that decide what a cache can do."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.compiling import keep_compiled
from hotset.errors import TraceError
from hotset.trace.event import Phase
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
_SMALL_STEPS, _LARGE_STEPS = 8, 4
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


def fit(trace: Trace, *, seed: int = 0, topics: int = 8, advance: Callable[[], None] | None = None) -> FitReport:
    """Find the config whose decode tokens have the statistics of `trace`; each trial calls `advance`."""
    sample = _sample(trace)
    search = _Search(sample, _start(trace, seed, topics), advance or _nothing)
    found = search.run()
    size = _resize(found, sample, _LARGE_VALUES)
    drawn = synthesise(replace(size, layers=min(size.layers, found.layers)))
    reached = measure(drawn)
    rows = [FitRow(name, target, reached.get(name, math.nan)) for name, target in search.target.items()]
    config, weight_row = _match_weights(trace, drawn, found)
    return FitReport(config, (*rows, *weight_row))


def measure(trace: Trace) -> Statistics:
    """The statistics of the decode tokens, as shares; those the trace is too short for are left out."""
    experts, request = _decode_rows(trace)
    halves = _count_halves(experts, request, trace.requests, trace.shape.experts)
    found = {**_popularity(halves.sum(axis=(0, 1))), **_repeats(experts, request), **_likeness(halves)}
    return {name: float(value) for name, value in found.items() if np.isfinite(value)}


class _Search:
    """Levenberg-Marquardt on traces of the same random numbers, so that a change of outcome has one cause."""

    def __init__(self, sample: Trace, start: SynthConfig, advance: Callable[[], None]) -> None:
        self.sample, self.base, self.advance = sample, start, advance
        self.knobs = _TOKEN_KNOBS + (_REQUEST_KNOBS if sample.requests > 1 else ())
        self.target = measure(sample)
        self.slope: Floats = np.zeros((len(self.target), len(self.knobs)))

    def run(self) -> SynthConfig:
        place = np.array([knob.encode(knob.start) for knob in self.knobs])
        for again in range(2):
            self.slope = self._differences(place)
            place = self._descend(place, _SMALL_VALUES, _SMALL_STEPS // (1 + again))
        return self._config(self._descend(place, _LARGE_VALUES, _LARGE_STEPS))

    def _config(self, place: Floats) -> SynthConfig:
        values: dict[str, Any] = {}
        for knob, x in zip(self.knobs, place, strict=True):
            values[knob.name] = float(f"{knob.decode(x):.3g}")
        return replace(self.base, **values)

    def _gaps(self, place: Floats, values: int) -> Floats:
        reached = measure(synthesise(_resize(self._config(place), self.sample, values)))
        return np.array([reached.get(name, target) - target for name, target in self.target.items()])

    def _differences(self, place: Floats) -> Floats:
        moved = [place, *(place + _DIFFERENCE * unit for unit in np.eye(len(place)))]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            gaps = []
            for gap in pool.map(lambda at: self._gaps(at, _SMALL_VALUES), moved):
                gaps.append(gap)
                self.advance()
        return np.stack([gap - gaps[0] for gap in gaps[1:]], axis=1) / _DIFFERENCE

    def _descend(self, place: Floats, values: int, steps: int) -> Floats:
        """Step downhill; each trial, good or bad, also corrects the slope (Broyden)."""
        gap, damping = self._gaps(place, values), 1e-3
        for _ in range(steps):
            step = _damped_step(self.slope, gap, damping)
            trial = self._gaps(place + step, values)
            self.advance()
            self.slope += np.outer(trial - gap - self.slope @ step, step) / max(float(step @ step), 1e-12)
            if trial @ trial < gap @ gap:
                place, gap, damping = place + step, trial, damping / 4
            else:
                damping *= 8
        return place


def _damped_step(slope: Floats, gap: Floats, damping: float) -> Floats:
    normal = slope.T @ slope + damping * np.eye(slope.shape[1])
    step: Floats = -np.linalg.solve(normal, slope.T @ gap).astype(np.float64)
    return step * min(1.0, _LONGEST_STEP / max(float(np.abs(step).max()), 1e-12))


def _start(trace: Trace, seed: int, topics: int) -> SynthConfig:
    """What needs no search: shape, lengths, and no topics where there is only one request to tell them by."""
    shape, requests = trace.shape, trace.requests
    alone: dict[str, Any] = {"topic_strength": 0.0, "drift": 0.0, "topic_stay": 1.0} if requests == 1 else {}
    return SynthConfig(
        layers=shape.layers,
        experts=shape.experts,
        top_k=shape.top_k,
        expert_bytes=shape.expert_bytes,
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


def _decode_rows(trace: Trace) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int32]]:
    """Decode tokens, those of one request side by side even where requests were served together."""
    rows = np.flatnonzero(trace.phase == Phase.DECODE)
    rows = rows[np.argsort(trace.request[rows], kind="stable")]
    return trace.experts[rows], trace.request[rows]


def _popularity(counts: Floats) -> dict[str, float]:
    ordered = -np.sort(-counts, axis=1)
    fifth = max(1, round(0.2 * counts.shape[1]))
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
    entropy = -(share * np.log(np.where(share > 0, share, 1.0))).sum(axis=1)
    return {
        "top_fifth": ordered[:, :fifth].sum() / ordered.sum(),
        "entropy": entropy.mean() / math.log(max(counts.shape[1], 2)),
    }


def _repeats(experts: npt.NDArray[np.int16], request: npt.NDArray[np.int32]) -> dict[str, float]:
    found = {}
    for lag in REPEAT_LAGS:
        again, asked = _count_repeats(experts, request, lag)
        found[f"repeat_{lag}"] = again / asked if asked else math.nan
    return found


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


def _nothing() -> None:
    """Stand in for a progress bar."""


@keep_compiled(nogil=True)
def _count_halves(experts: Any, request: Any, requests: int, num_experts: int) -> Any:
    """Uses of each expert in the first and the second half of each request."""
    tokens, layers, top_k = experts.shape
    lengths = np.zeros(requests, np.int64)
    for token in range(tokens):
        lengths[request[token]] += 1
    seen = np.zeros(requests, np.int64)
    counts = np.zeros((requests, 2, layers, num_experts))
    for token in range(tokens):
        own = request[token]
        half = int(seen[own] >= lengths[own] // 2)
        seen[own] += 1
        for layer in range(layers):
            for k in range(top_k):
                if experts[token, layer, k] >= 0:
                    counts[own, half, layer, experts[token, layer, k]] += 1.0
    return counts


@keep_compiled(nogil=True)
def _count_repeats(experts: Any, request: Any, lag: int) -> Any:
    """How many experts were also used `lag` tokens before, and how many there were to look at."""
    again, asked = 0, 0
    tokens, layers, top_k = experts.shape
    for token in range(lag, tokens):
        if request[token] != request[token - lag]:
            continue
        for layer in range(layers):
            for k in range(top_k):
                expert = experts[token, layer, k]
                if expert < 0:
                    continue
                asked += 1
                for j in range(top_k):
                    again += expert == experts[token - lag, layer, j]
    return again, asked

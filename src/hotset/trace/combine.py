"""New workloads out of recorded ones: traces end to end, and requests running at the same time."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hotset.checks import whole
from hotset.errors import TraceError
from hotset.shape import ModelShape
from hotset.trace.event import Phase
from hotset.trace.run import altered
from hotset.trace.trace import Trace, dense_steps

Mode = Literal["batch", "turns"]


def concat(traces: Sequence[Trace]) -> Trace:
    """Lay traces of one model end to end; optional arrays stay only if all traces have them."""
    if not traces:
        raise TraceError("no traces to put together: give at least one")
    first = traces[0]
    for each in traces:
        each.check_again()
    for number, other in enumerate(traces[1:], start=1):
        _check_same_model(first.shape, other.shape, number)
    requests, steps = [t.requests for t in traces], [t.steps for t in traces]
    labelled = any(t.labels for t in traces)
    return Trace(
        shape=replace(first.shape, expert_bytes=_expert_bytes(traces)),
        experts=np.concatenate([t.experts for t in traces]),
        request=_shifted([t.request for t in traces], requests),
        step=_shifted([dense_steps(t.step) for t in traces], steps),
        phase=np.concatenate([t.phase for t in traces]),
        weights=_joined([t.weights for t in traces]),
        token_ids=_joined([t.token_ids for t in traces]),
        predictions=_joined([t.predictions for t in traces]),
        labels=tuple(label for t in traces for label in t.labels or ({},) * t.requests) if labelled else (),
        meta=altered(_common_meta(traces), "several runs were put together") if traces[1:] else first.meta,
    )


def interleave(trace: Trace, streams: int, mode: Mode = "batch") -> Trace:
    """Run the requests on N streams at once: each stream takes the next waiting request when its own ends."""
    whole(streams, "the number of streams", 1, 1 << 40, TraceError)
    if not isinstance(mode, str) or mode not in ("batch", "turns"):
        raise TraceError(f'the mode must be "batch" or "turns", not {mode!r}')
    trace.check_again()
    passes = _find_passes(trace)
    order, step_of_pass = _schedule(passes, streams, merge=mode == "batch")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    place = rank[passes.of_row]
    by_place = np.argsort(place, kind="stable")
    rows, step = passes.rows[by_place], step_of_pass[place[by_place]]
    same = np.array_equal(rows, np.arange(trace.tokens)) and np.array_equal(step, dense_steps(trace.step))
    meta = trace.meta if same else altered(trace.meta, "its requests were interleaved")
    return replace(trace, **trace.rows(rows) | {"step": step}, meta=meta)


@dataclass(frozen=True, eq=False)
class _Passes:
    """The forward passes of single requests; a recorded batch counts as one pass per request."""

    rows: npt.NDArray[np.int64]  # [tokens], sorted by request and step
    of_row: npt.NDArray[np.int64]  # [tokens], pass of each sorted row
    request: npt.NDArray[np.int32]  # [passes]
    decode: npt.NDArray[np.bool_]  # [passes]
    arrival: npt.NDArray[np.int64]  # requests in recorded order


def _find_passes(trace: Trace) -> _Passes:
    rows = np.lexsort((trace.step, trace.request))
    request, step = trace.request[rows], trace.step[rows]
    starts = np.append(True, (np.diff(request) != 0) | (np.diff(step) != 0))
    first = np.flatnonzero(starts)
    decode = np.minimum.reduceat(trace.phase[rows], first) == Phase.DECODE
    arrival = np.argsort(np.unique(trace.request, return_index=True)[1], kind="stable")
    return _Passes(rows, np.cumsum(starts) - 1, request[first], decode, arrival)


def _schedule(passes: _Passes, streams: int, *, merge: bool) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """The order in which passes run, and the step of each place in that order."""
    lengths = np.bincount(passes.request)
    begin, stream = _assign(lengths, passes.arrival, streams)
    nth = np.arange(len(passes.request)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    tick = begin[passes.request] + nth
    joins = passes.decode & merge  # prompts run before the tick's batch, each as its own pass
    order = np.lexsort((stream[passes.request], joins, tick))
    same = joins[order[1:]] & joins[order[:-1]] & (np.diff(tick[order]) == 0)
    return order, np.append(0, np.cumsum(~same)).astype(np.int32)


def _assign(
    lengths: npt.NDArray[Any], arrival: npt.NDArray[Any], streams: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Give each request, in order of arrival, to the stream that is free first."""
    free = [(0, stream) for stream in range(min(streams, len(lengths)))]
    begin, stream_of = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    for request in arrival.tolist():
        tick, stream = free[0]
        begin[request], stream_of[request] = tick, stream
        heapq.heapreplace(free, (tick + int(lengths[request]), stream))
    return begin, stream_of


def _check_same_model(first: ModelShape, other: ModelShape, number: int) -> None:
    if (first.layers, first.experts, first.top_k) != (other.layers, other.experts, other.top_k):
        raise TraceError(
            f"traces of different models cannot be put together: trace 0 has {_say(first)}, "
            f"trace {number} has {_say(other)}"
        )


def _say(shape: ModelShape) -> str:
    return f"{shape.layers} layers x {shape.experts} experts, top {shape.top_k}"


def _expert_bytes(traces: Sequence[Trace]) -> int | None:
    sizes = sorted({t.shape.expert_bytes for t in traces if t.shape.expert_bytes is not None})
    if len(sizes) > 1:
        raise TraceError(f"the traces state different sizes of an expert: {sizes[0]} and {sizes[-1]} bytes")
    return sizes[0] if sizes else None


def _shifted(columns: list[npt.NDArray[np.int32]], sizes: list[int]) -> npt.NDArray[np.int32]:
    offsets = np.append(0, np.cumsum(sizes)).astype(np.int32)
    return np.concatenate([column + offset for column, offset in zip(columns, offsets, strict=False)])


def _joined(arrays: Sequence[npt.NDArray[Any] | None]) -> npt.NDArray[Any] | None:
    kept = [array for array in arrays if array is not None]
    if len(kept) < len(arrays) or len({array.shape[1:] for array in kept}) > 1:
        return None
    return np.concatenate(kept)


def _common_meta(traces: Sequence[Trace]) -> dict[str, str]:
    """What all traces say alike."""
    first, *others = (t.meta for t in traces)
    return {key: value for key, value in first.items() if all(meta.get(key) == value for meta in others)}

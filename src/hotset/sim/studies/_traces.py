"""The workloads of a study: requests of all traces of one model, mixed, in two halves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hotset.errors import HotsetError
from hotset.shape import format_size
from hotset.trace import Phase, Trace
from hotset.trace.combine import concat
from hotset.trace.events import EventTable

EXPERT_BYTES = 9 << 20
NEW_TOKENS = 64
SPLIT = "half of the requests, in an order drawn by seed 0, run first and are not counted; the other half is judged"


@dataclass(frozen=True, eq=False)
class Mix:
    """Requests of one model in two halves: the first is to learn from, the second is judged."""

    name: str
    fit: Trace
    test: Trace
    of: tuple[str, ...] = ()  # the traces that were mixed

    @cached_property
    def whole(self) -> Trace:
        """One half after the other."""
        return concat([self.fit, self.test])

    def judged_events(self) -> EventTable:
        """The events of the second half, numbered on: no request of it is one of the first half."""
        events = self.test.events()
        return replace(events, request=events.request + self.fit.requests)

    @property
    def tokens(self) -> int:
        """The new tokens that are judged."""
        return self.test.count(Phase.DECODE)

    def words(self) -> str:
        """What this is, for people."""
        shape, parts = self.fit.shape, f" ({', '.join(self.of)})" if len(self.of) > 1 else ""
        return (
            f"{self.name}{parts}: {shape.layers} layers x {shape.experts} experts, top {shape.top_k}; "
            f"{self.fit.requests} requests first, {self.test.requests} judged ({self.tokens:,} new tokens); "
            f"an expert is taken as {format_size(shape.expert_bytes or 0)}"
        )


def mixes(traces: Mapping[str, Trace], most_events: int, new_tokens: int = NEW_TOKENS) -> list[Mix]:
    """A mix for each model among the traces; long requests are cut, then there are as many as fit so many events."""
    models: dict[tuple[int, int, int], dict[str, Trace]] = {}
    for name, trace in traces.items():
        models.setdefault((trace.shape.layers, trace.shape.experts, trace.shape.top_k), {})[name] = trace
    return [_mix(own, most_events, new_tokens) for own in models.values()]


def shuffled(
    trace: Trace, rng: np.random.Generator, most: int | None = None, new_tokens: int = NEW_TOKENS
) -> list[Trace]:
    """The requests of a trace in a drawn order, each on its own, at most so many, and with at most so many tokens."""
    order = rng.permutation(trace.requests)[:most]
    return [trace.take(_rows(trace, int(request), new_tokens)) for request in order]


def _mix(traces: Mapping[str, Trace], most_events: int, new_tokens: int) -> Mix:
    whole = concat([trace.with_expert_bytes(EXPERT_BYTES) for trace in traces.values()])
    if whole.requests < 2:
        raise HotsetError("a study needs at least two requests of a model: one to learn from and one to judge")
    name = next(iter(traces)) if len(traces) == 1 else f"{len(traces)} workloads mixed"
    passes = min(whole.steps / whole.requests, new_tokens + 1)
    most = max(2, int(most_events / (passes * whole.shape.layers)))
    requests = shuffled(whole, np.random.default_rng(0), most, new_tokens)
    half = math.ceil(len(requests) / 2)
    return Mix(name, concat(requests[:half]), concat(requests[half:]), tuple(traces))


def _rows(trace: Trace, request: int, new_tokens: int) -> npt.NDArray[np.int64]:
    rows = np.flatnonzero(trace.request == request)
    new = np.cumsum(trace.phase[rows] == Phase.DECODE)
    return rows[new <= new_tokens]

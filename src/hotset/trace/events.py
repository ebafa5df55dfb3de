"""Events as flat arrays: what the simulator's compiled loop walks over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.compiling import keep_compiled
from hotset.errors import TraceError
from hotset.shape import ModelShape
from hotset.trace.event import Event, Phase
from hotset.trace.trace import Trace


class Routed(NamedTuple):
    """What the tokens behind events chose, for policies that look at more than what they need together."""

    bounds: npt.NDArray[np.int64]  # [events, 2], the first token of each event's pass, and the first of the next
    experts: npt.NDArray[np.int16]  # [tokens, layers, top_k]
    request: npt.NDArray[np.int32]  # [tokens]


@dataclass(frozen=True, eq=False)
class EventTable:
    """The events of a trace; event i owns the entries start[i] to start[i + 1] of `expert` and `count`."""

    shape: ModelShape
    start: npt.NDArray[np.int64]  # [events + 1]
    layer: npt.NDArray[np.int32]  # [events]
    step: npt.NDArray[np.int32]  # [events], forward pass, numbered from 0 without gaps
    tokens: npt.NDArray[np.int32]  # [events], tokens that ran through this layer
    phase: npt.NDArray[np.uint8]  # [events]
    request: npt.NDArray[np.int32]  # [events], of the first token that ran through this layer
    expert: npt.NDArray[np.int32]  # [entries], rising within an event
    count: npt.NDArray[np.int32]  # [entries], tokens that use the expert
    routed: Routed | None = None  # what each token chose; not known of events that were made up

    def __len__(self) -> int:
        return len(self.layer)

    @property
    def accesses(self) -> int:
        """The number of experts asked for, over all events."""
        return len(self.expert)

    @property
    def largest(self) -> int:
        """The number of experts of the largest event."""
        return int(np.diff(self.start).max(initial=0))

    def totals(self, *, by_tokens: bool = True) -> npt.NDArray[np.float64]:
        """How many tokens used each expert, or how many events, as a grid of layers and experts."""
        grid = np.zeros((self.shape.layers, self.shape.experts))
        layers = np.repeat(self.layer, np.diff(self.start))
        np.add.at(grid, (layers, self.expert), self.count if by_tokens else 1)
        return grid

    def check(self) -> None:
        """Raise TraceError unless a compiled loop can walk over these arrays without leaving them."""
        events, entries = len(self.layer), len(self.expert)
        columns = (self.step, self.tokens, self.phase, self.request)
        if len(self.start) != events + 1 or any(len(each) != events for each in columns) or len(self.count) != entries:
            raise TraceError("the arrays of these events disagree in length")
        sizes = np.diff(self.start)
        if self.start[0] != 0 or self.start[-1] != entries or (sizes < 1).any():
            raise TraceError("the bounds of these events do not rise from 0 to the number of entries")
        if not events:
            return
        if not (_within(self.layer, self.shape.layers) and _within(self.phase, len(Phase))):
            raise TraceError("an event is of a layer or a phase that does not exist")
        inner = np.ones(entries, np.bool_)
        inner[self.start[:-1]] = False
        if not _within(self.expert, self.shape.experts) or (np.diff(self.expert, prepend=-1)[inner] < 1).any():
            raise TraceError("an event names experts that do not exist, or does not name each once, in rising order")

    def slice(self, first: int, last: int) -> EventTable:
        """The events from `first` up to, not including, `last`."""
        low, high = self.start[first], self.start[last]
        return EventTable(
            self.shape, self.start[first : last + 1] - low, self.layer[first:last], self.step[first:last],
            self.tokens[first:last], self.phase[first:last], self.request[first:last],
            self.expert[low:high], self.count[low:high],
            None if self.routed is None else self.routed._replace(bounds=self.routed.bounds[first:last]),
        )  # fmt: skip

    def __iter__(self) -> Iterator[Event]:
        for i in range(len(self)):
            own = slice(self.start[i], self.start[i + 1])
            yield Event(
                step=int(self.step[i]),
                layer=int(self.layer[i]),
                experts=tuple(self.expert[own].tolist()),
                counts=tuple(self.count[own].tolist()),
                tokens=int(self.tokens[i]),
                phase=Phase(int(self.phase[i])),
            )


def _within(numbers: npt.NDArray[Any], limit: int) -> bool:
    return bool(numbers.min() >= 0 and numbers.max() < limit)


def build_events(trace: Trace) -> EventTable:
    """Gather the tokens of each forward pass into one event per layer; layers that were not computed raise none."""
    passes = np.flatnonzero(np.diff(trace.step, prepend=trace.step[0] - 1))
    bounds = np.append(passes, trace.tokens).astype(np.int64)
    shape = trace.shape
    entries = shape.layers * int(np.minimum(np.diff(bounds) * shape.top_k, shape.experts).sum())
    start, *columns = _fill_events(trace.experts, trace.phase, trace.request, bounds, shape.experts, entries)
    table = EventTable(shape, start, *columns)
    routed = Routed(np.stack((bounds[table.step], bounds[table.step + 1]), axis=1), trace.experts, trace.request)
    return replace(table, routed=routed)


@keep_compiled(nogil=True)
def _fill_events(experts: Any, phases: Any, requests: Any, bounds: Any, num_experts: int, entries: int) -> Any:
    """The columns of all events, filled one after the other and cut to what they turn out to hold."""
    layers, top_k = experts.shape[1], experts.shape[2]
    most = (len(bounds) - 1) * layers
    start = np.zeros(most + 1, np.int64)
    layer_of, step_of = np.empty(most, np.int32), np.empty(most, np.int32)
    tokens_of, phase_of, request_of = np.empty(most, np.int32), np.empty(most, np.uint8), np.empty(most, np.int32)
    expert_of, count_of = np.empty(entries, np.int32), np.empty(entries, np.int32)
    counts = np.zeros(num_experts, np.int32)
    event, at = 0, 0
    for i in range(len(bounds) - 1):
        phase = phases[bounds[i] : bounds[i + 1]].min()  # a pass with a prompt in it is a prefill
        for layer in range(layers):
            tokens, request = 0, -1
            lowest, highest = num_experts, -1
            for token in range(bounds[i], bounds[i + 1]):
                used = 0
                for k in range(top_k):
                    expert = experts[token, layer, k]
                    if expert >= 0:
                        used = 1
                        counts[expert] += 1
                        lowest, highest = min(lowest, expert), max(highest, expert)
                if used and request < 0:
                    request = requests[token]
                tokens += used
            if tokens == 0:
                continue
            layer_of[event], step_of[event] = layer, i
            tokens_of[event], phase_of[event], request_of[event] = tokens, phase, request
            for expert in range(lowest, highest + 1):
                if counts[expert]:
                    expert_of[at], count_of[at] = expert, counts[expert]
                    counts[expert] = 0
                    at += 1
            event += 1
            start[event] = at
    return (
        start[: event + 1].copy(), layer_of[:event].copy(), step_of[:event].copy(), tokens_of[:event].copy(),
        phase_of[:event].copy(), request_of[:event].copy(), expert_of[:at].copy(), count_of[:at].copy(),
    )  # fmt: skip

"""Belady's optimum: the future decides. The bound for every policy that can exist."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hotset.compiling import keep_compiled
from hotset.policies.base import Admit, EventView, Grid, Policy, compiled
from hotset.shape import ModelShape

if TYPE_CHECKING:
    from hotset.trace.events import EventTable


class BeladyState(NamedTuple):
    """The next use of each expert, and of each entry of the events to come."""

    next_use: Grid
    future: Any  # float64 [entries]
    cursor: Any  # int64 [1]


@compiled
def observe(state: BeladyState, table: Any, event: EventView) -> None:
    """Look up when these experts will be asked for again."""
    first = state.cursor[0]
    for i in range(len(event.experts)):
        state.next_use[event.layer, event.experts[i]] = state.future[first + i]
    state.cursor[0] = first + len(event.experts)


@compiled
def score(state: BeladyState, table: Any, event: EventView, layer: int, expert: int) -> Any:
    """Minus the next use: the furthest is evicted."""
    return -state.next_use[layer, expert]


@keep_compiled(nogil=True)
def next_uses(
    start: Any, layer: Any, phase: Any, expert: Any, counted: tuple[bool, bool], num_layers: int, num_experts: int
) -> Any:
    """The next event that asks for the same expert, for every entry of every event; and each expert's first event.

    Infinite where that event is not counted: it brings the expert in any case, so to keep it until then gains nothing.
    """
    upcoming = np.full((num_layers, num_experts), np.inf)
    future = np.empty(len(expert))
    for event in range(len(layer) - 1, -1, -1):
        for i in range(start[event], start[event + 1]):
            future[i] = upcoming[layer[event], expert[i]]
            upcoming[layer[event], expert[i]] = event if counted[phase[event]] else np.inf
    return future, upcoming


@dataclass(frozen=True, kw_only=True)
class Belady(Policy, name="belady", observe=observe, score=score, offline=True):
    """The expert whose next use is furthest away is evicted (Belady 1966).

    With `bypass` (the default) the best of residents and event stay once the event is served, which is the true
    optimum: keeping an expert from one use to the next is an interval, and dropping the one that ends last is optimal
    for intervals on a fixed number of slots. Without it, everything loaded must be given a slot. `phase` says whose
    hits are to be the most possible: of all events, or of one phase only.
    """

    bypass: bool = True
    phase: str = "all"

    def check(self) -> None:
        """Bypass decides admission by itself, and phases have names."""
        self.require(
            not self.bypass or self.admit == "always", "bypass decides what is admitted: give bypass=off as well"
        )
        self.require(self.phase in ("all", "prefill", "decode"), "phase is all, prefill or decode")

    def start(self, shape: ModelShape) -> BeladyState:
        """The future is not known yet."""
        return BeladyState(np.full((shape.layers, shape.experts), np.inf), np.empty(0), np.zeros(1, np.int64))

    def with_future(self, state: BeladyState, events: EventTable) -> BeladyState:  # noqa: ARG002 - the past does not matter to it
        """Read the future from the events that will be replayed."""
        counted = (self.phase != "decode", self.phase != "prefill")
        grid = (events.shape.layers, events.shape.experts)
        future, first = next_uses(events.start, events.layer, events.phase, events.expert, counted, *grid)
        return BeladyState(first, future, np.zeros(1, np.int64))

    def can_serve(self, state: BeladyState, experts: int) -> bool:
        """Whether the future that was read reaches as far as the next event."""
        return bool(state.cursor[0] + experts <= len(state.future))

    @cached_property
    def admission(self) -> Admit:
        """Bypass means that the best of everything stays."""
        return Admit.LATE if self.bypass else super().admission


POLICY = Belady

"""Frequency over age: the strongest cheap baseline of the published replays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from hotset.policies.base import EventView, Grid, Policy, compiled


class LfruState(NamedTuple):
    """Uses, and the layer's event number of the last one."""

    uses: Grid
    last: Grid


@compiled
def observe(state: LfruState, table: Any, event: EventView) -> None:
    """Count uses and note the layer's own time, which advances by one per forward pass."""
    now = table.passes[event.layer]
    for i in range(len(event.experts)):
        state.uses[event.layer, event.experts[i]] += event.counts[i]
        state.last[event.layer, event.experts[i]] = now


@compiled
def score(state: LfruState, table: Any, event: EventView, layer: int, expert: int) -> Any:
    """Uses divided by the age in forward passes, plus one."""
    return state.uses[layer, expert] / (table.passes[layer] - state.last[layer, expert] + 1.0)


@dataclass(frozen=True, kw_only=True)
class Lfru(Policy, name="lfru", observe=observe, score=score, state=LfruState):
    """The smallest uses / (age + 1) is evicted; best causal baseline in arXiv 2608.07911."""


POLICY = Lfru

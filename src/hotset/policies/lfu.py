"""Least frequently used, with counts that survive eviction or, as textbooks have it, do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hotset.policies.base import EventView, Grid, Policy, compiled
from hotset.shape import ModelShape


class LfuState(NamedTuple):
    """How often each expert was used, and whether the count survives its eviction."""

    uses: Grid
    history: Any


@compiled
def observe(state: LfuState, table: Any, event: EventView) -> None:
    """Count the tokens that used each expert."""
    for i in range(len(event.experts)):
        expert = event.experts[i]
        if not state.history[0] and table.slot_of[event.layer, expert] < 0:
            state.uses[event.layer, expert] = 0.0
        state.uses[event.layer, expert] += event.counts[i]


@compiled
def score(state: LfuState, table: Any, event: EventView, layer: int, expert: int) -> Any:
    """The number of uses; the slot table breaks ties by recency."""
    return state.uses[layer, expert]


@dataclass(frozen=True, kw_only=True)
class Lfu(Policy, name="lfu", observe=observe, score=score):
    """The expert with the fewest uses is evicted; arXiv 2511.05814 studies it against LRU."""

    history: bool = True

    def start(self, shape: ModelShape) -> LfuState:
        """All counts are zero."""
        return LfuState(np.zeros((shape.layers, shape.experts)), np.array([self.history]))


POLICY = Lfu

"""Least recently used: the recency baseline of every offloading runtime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from hotset.policies.base import EventView, Grid, Policy, compiled


class LruState(NamedTuple):
    """When each expert was last used, in events."""

    last: Grid


@compiled
def observe(state: LruState, table: Any, event: EventView) -> None:
    """Note the time of use."""
    for expert in event.experts:
        state.last[event.layer, expert] = event.tick


@compiled
def score(state: LruState, table: Any, event: EventView, layer: int, expert: int) -> Any:
    """The time of last use."""
    return state.last[layer, expert]


@dataclass(frozen=True, kw_only=True)
class Lru(Policy, name="lru", observe=observe, score=score, state=LruState):
    """The expert whose last use is oldest is evicted."""


POLICY = Lru

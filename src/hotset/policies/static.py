"""A fixed set: the experts that were used most in the past, never replaced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from hotset.policies.base import EventView, Grid, Policy, compiled


class StaticState(NamedTuple):
    """The counts that rank the experts, and whether they still learn."""

    counts: Grid


@compiled
def observe(state: StaticState, table: Any, event: EventView) -> None:
    """Count on, so that a replay of one workload yields the set for the next."""
    for i in range(len(event.experts)):
        state.counts[event.layer, event.experts[i]] += event.counts[i]


@compiled
def score(state: StaticState, table: Any, event: EventView, layer: int, expert: int) -> Any:
    """The given count."""
    return state.counts[layer, expert]


@dataclass(frozen=True, kw_only=True)
class Static(Policy, name="static", observe=observe, score=score, state=StaticState, needs_counts=True):
    """The top experts by given counts stay for good; without counts, the first that come fill the slots and stay."""

    admit: str = "free"


POLICY = Static

"""Layer-aware recency: age in forward passes, and among equals the layer that runs next stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from hotset.policies.base import EventView, Grid, Policy, compiled


class LayeredState(NamedTuple):
    """The layer's pass number of each expert's last use."""

    last: Grid


@compiled
def observe(state: LayeredState, table: Any, event: EventView) -> None:
    """Note the layer's own time."""
    for expert in event.experts:
        state.last[event.layer, expert] = table.passes[event.layer]


@compiled
def score(state: LayeredState, table: Any, event: EventView, layer: int, expert: int) -> Any:
    """Minus the staleness in passes of its layer, less a fraction for how long its layer's turn is off."""
    layers = len(table.passes)
    wait = (layer - event.layer - 1) % layers
    return state.last[layer, expert] - table.passes[layer] - wait / layers


@dataclass(frozen=True, kw_only=True)
class Layered(Policy, name="layered", observe=observe, score=score, state=LayeredState):
    """The stalest expert is evicted, counted in passes of its own layer; ties by the layer whose turn is furthest.

    A pool under plain LRU drops exactly what the next layers are about to ask for. Counting staleness per layer, as
    least-stale eviction (arXiv 2602.03921) and layered paging (arXiv 2509.02408) do, takes that cyclic scan out.
    With slots per layer it is LRU.
    """


POLICY = Layered

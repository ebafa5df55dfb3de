"""The slot table: which expert has which slot. Arrays only, so that compiled code can walk it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from hotset.cache.counters import Counters
from hotset.cache.plan import Scope, SlotPlan

FOREVER = np.iinfo(np.int64).max
"""The time of last use of a pinned expert, so that one comparison protects it like the experts of a running event."""
RESERVED = FOREVER - 1
"""The time of last use of an expert that is on its way to a slot reserved for it: no other may take that slot."""
WARM = FOREVER - 2
"""The time of last use of an expert that is pinned for now, see `hotset.cache.warm_pin`."""


class Table(NamedTuple):
    """The arrays of a residency; an entry of -1 means none, and never leaves this package."""

    slot_of: Any  # int32 [layers, experts]
    layer_in: Any  # int32 [slots]
    expert_in: Any  # int32 [slots]
    group_of: Any  # int32 [layers]
    bounds: Any  # int64 [groups + 1]
    free: Any  # int32 [slots], a stack of empty slots per group
    num_free: Any  # int64 [groups]
    resident: Any  # int32 [layers]
    floor: Any  # int32 [layers]
    num_pinned: Any  # int64 [groups]
    last: Any  # int64 [layers, experts], the last event that asked for it, or FOREVER or WARM when pinned
    passes: Any  # int64 [layers], events served
    clock: Any  # int64 [1], events served in all layers
    swaps: Any  # int64 [1], how many of an event's own experts may be evicted while they have yet to compute
    counters: Any  # int64 [phases, counters, layers]
    loads: Any  # int32 [experts, 4]: expert, slot or -1 when staged, layer and expert evicted or -1
    worth: Any  # float64 [experts], scratch


def make_table(plan: SlotPlan, floors: bool = True) -> Table:
    """An empty slot table laid out by the plan."""
    layers, experts, slots = plan.shape.layers, plan.shape.experts, plan.cached
    bounds = plan.bounds()
    pool = plan.scope is Scope.POOL
    return Table(
        slot_of=np.full((layers, experts), -1, np.int32),
        layer_in=np.full(slots, -1, np.int32),
        expert_in=np.full(slots, -1, np.int32),
        group_of=np.zeros(layers, np.int32) if pool else np.arange(layers, dtype=np.int32),
        bounds=bounds,
        free=_free_stacks(bounds),
        num_free=np.diff(bounds),
        resident=np.zeros(layers, np.int32),
        floor=plan.floors() if pool and floors else np.zeros(layers, np.int32),
        num_pinned=np.zeros(len(bounds) - 1, np.int64),
        last=np.zeros((layers, experts), np.int64),
        passes=np.zeros(layers, np.int64),
        clock=np.zeros(1, np.int64),
        swaps=np.array([plan.swaps], np.int64),
        counters=Counters.empty(layers),
        loads=np.full((experts, 4), -1, np.int32),
        worth=np.zeros(experts),
    )


def _free_stacks(bounds: Any) -> Any:
    """Every group's slots, highest first, so that the lowest is on top."""
    stacks = [np.arange(last - 1, first - 1, -1) for first, last in pairwise(bounds)]
    return np.concatenate(stacks).astype(np.int32)

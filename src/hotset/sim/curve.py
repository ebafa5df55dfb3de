"""LRU for all cache sizes at once: one pass over the stack distances (Mattson 1970), event by event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.cache.plan import Scope
from hotset.checks import choice
from hotset.compiling import keep_compiled
from hotset.errors import BudgetError
from hotset.shape import ModelShape
from hotset.trace import Phase
from hotset.trace.events import EventTable


@dataclass(frozen=True, eq=False)
class LruCurve:
    """How many accesses LRU hits at every size; `found[g, d]` counts those at depth d of group g's stack."""

    shape: ModelShape
    scope: Scope
    found: npt.NDArray[np.int64]  # [groups, depth], depth 0 is the most recent
    accesses: int
    smallest: int  # slots per layer, or of the pool, below which an event did not fit and the stack does not hold

    def hits(self, slots: int) -> int:
        """Hits with so many slots in all, laid out as SlotPlan does; a pool has no floors here."""
        groups = len(self.found)
        share, rest = divmod(slots, groups)
        if share < self.smallest:
            raise BudgetError(
                f"the curve holds from {self.smallest * groups} slots on, where every event fits; replay smaller sizes"
            )
        depth = self.found.shape[1]
        sums = np.cumsum(self.found, axis=1)
        ends = np.minimum(share + (np.arange(groups) < rest), depth) - 1
        return int(sums[np.arange(groups), ends].sum())

    def hit_rates(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Hit rates at many sizes."""
        return np.array([self.hits(int(s)) for s in slots]) / max(self.accesses, 1)


def lru_curve(events: EventTable, scope: Scope = Scope.LAYER, phase: Phase = Phase.DECODE) -> LruCurve:
    """Count, in one pass, how deep in the LRU stack each access of a phase is found."""
    events.check()
    shape, scope, phase = events.shape, choice(scope, Scope, "the scope"), choice(phase, Phase, "the phase")
    groups, members = (1, shape.total_experts) if scope is Scope.POOL else (shape.layers, shape.experts)
    chosen = events.phase == phase
    sizes = np.diff(events.start)[chosen]
    found = _distances(
        events.start, events.layer, events.phase, events.expert, int(phase), groups, members, shape.experts
    )
    return LruCurve(shape, scope, found, int(sizes.sum()), int(sizes.max(initial=1)))


@keep_compiled(nogil=True)
def _distances(
    start: Any, layers: Any, phases: Any, experts: Any, phase: int, groups: int, members: int, per_layer: int
) -> Any:
    """A Fenwick tree per group counts live time stamps; stamps are compacted when they run out."""
    size = 4 * members + 1
    tree = np.zeros((groups, size), np.int32)
    stamp = np.zeros((groups, members), np.int32)
    clock = np.zeros(groups, np.int32)
    live = np.zeros(groups, np.int32)
    found = np.zeros((groups, members), np.int64)
    for event in range(len(layers)):
        if phases[event] != phase:
            continue
        group = layers[event] if groups > 1 else 0
        base = 0 if groups > 1 else layers[event] * per_layer
        first, last = start[event], start[event + 1]
        for i in range(first, last):
            at = stamp[group, base + experts[i]]
            if at > 0:
                found[group, live[group] - _prefix(tree[group], at)] += 1
        if clock[group] + last - first >= size:
            clock[group] = _compact(tree[group], stamp[group])
        for i in range(first, last):
            member = base + experts[i]
            if stamp[group, member] > 0:
                _add(tree[group], stamp[group, member], -1)
            else:
                live[group] += 1
            clock[group] += 1
            stamp[group, member] = clock[group]
            _add(tree[group], clock[group], 1)
    return found


@keep_compiled(nogil=True)
def _prefix(tree: Any, at: int) -> Any:
    """How many live stamps are not younger than this one."""
    total = 0
    while at > 0:
        total += tree[at]
        at -= at & -at
    return total


@keep_compiled(nogil=True)
def _add(tree: Any, at: int, amount: int) -> None:
    while at < len(tree):
        tree[at] += amount
        at += at & -at


@keep_compiled(nogil=True)
def _compact(tree: Any, stamp: Any) -> Any:
    """Number the live stamps 1, 2, 3, ... in their order and rebuild the tree; returns the last one given."""
    tree[:] = 0
    order = np.argsort(stamp)
    clock = 0
    for member in order:
        if stamp[member] > 0:
            clock += 1
            stamp[member] = clock
            _add(tree, clock, 1)
    return clock

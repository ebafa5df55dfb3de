"""What RAM behind a GPU does not hold either: replays of a cache that serves what another one misses.

RAM sees no event that the GPU serves by itself, so it is no cache of all events: behind a GPU that holds most experts a
small one has nearly all others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from hotset.analysis.planner.rates import Engine
from hotset.analysis.planner.tiers import HOST_STAGING, staging_rows
from hotset.cache import Controller, SlotPlan
from hotset.options.run import DEFAULT_POLICY
from hotset.policies import parse
from hotset.shape import ModelShape
from hotset.trace.events import EventTable

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class BehindGpu:
    """The events of a workload, replayed through two caches when they are asked for."""

    events: EventTable
    counted: Mask  # [events]
    sizes: Sequence[int]  # slots of the GPU, all experts left out
    tokens: float  # that were counted
    _missed: dict[tuple[str, int], tuple[EventTable, Mask]] = field(default_factory=dict)
    _found: dict[tuple[str, int], Floats] = field(default_factory=dict)

    def misses(self, policy: str, ram_slots: int) -> Floats:
        """Experts that a token needs and neither holds, by the slots of the GPU; none with all experts there."""
        if (policy, ram_slots) not in self._found:
            with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
                found = list(pool.map(lambda slots: self._far(policy, slots, ram_slots), self.sizes))
            self._found[policy, ram_slots] = np.array([*found, 0.0]) / self.tokens
        return self._found[policy, ram_slots]

    def _far(self, policy: str, slots: int, ram_slots: int) -> float:
        if (policy, slots) not in self._missed:
            self._missed[policy, slots] = self._missed_by_gpu(policy, slots)
        missed, counted = self._missed[policy, slots]
        plan = SlotPlan(self.events.shape, ram_slots, staging=HOST_STAGING)
        done = Controller(plan, parse(DEFAULT_POLICY)).replay(missed)
        return float(done.misses[counted].sum())

    def _missed_by_gpu(self, policy: str, slots: int) -> tuple[EventTable, Mask]:
        """What a GPU with so many slots asks RAM for, and what of that counts."""
        shape = self.events.shape
        plan = SlotPlan(shape, slots, staging=staging_rows(shape, Engine.HOST))
        done = Controller(plan, parse(policy)).replay(self.events, log=True)
        return asked_of_ram(self.events, done.misses, done.log[:, 1]), self._counted_parts(done.misses)

    def _counted_parts(self, misses: npt.NDArray[np.int32]) -> Mask:
        return np.repeat(self.counted, -(-misses // HOST_STAGING))


def asked_of_ram(events: EventTable, misses: npt.NDArray[np.int32], expert: npt.NDArray[np.int32]) -> EventTable:
    """The missing experts of each event as events of their own, of as many as RAM has rows of staging for."""
    shape = ModelShape(events.shape.layers, events.shape.experts, events.shape.top_k)
    of_miss = np.repeat(np.arange(len(events)), misses)
    order = np.lexsort((expert, of_miss))
    expert, place = expert[order], np.arange(len(of_miss)) - np.repeat(np.cumsum(misses) - misses, misses)
    keys = np.repeat(np.arange(len(events)), np.diff(events.start)) * shape.experts + events.expert
    entry = np.searchsorted(keys, of_miss * shape.experts + expert)
    first = place % HOST_STAGING == 0
    of_part = of_miss[first]
    return replace(
        events,
        shape=shape,
        start=np.append(np.flatnonzero(first), len(expert)).astype(np.int64),
        layer=events.layer[of_part],
        step=events.step[of_part],
        tokens=events.tokens[of_part],
        phase=events.phase[of_part],
        request=events.request[of_part],
        expert=np.ascontiguousarray(expert, np.int32),
        count=events.count[entry],
        routed=None,
    )

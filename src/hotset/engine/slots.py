"""Which experts are resident, and in which row of memory each of them lies.

A *slot* is a number in the policy's table. A *row* is a piece of memory of an arena. `SlotCache` alone knows which row
a slot has: an expert that was prefetched is claimed by exchanging its row for that of the slot it is given, so the map
changes while experts come and go. It knows no tensors, files or streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.cache.controller import Controller
from hotset.cache.table import Table
from hotset.shape import ExpertKey
from hotset.trace import Phase

Ints = npt.NDArray[np.int32]
Loads = npt.NDArray[np.int32]
"""[loads, 4]: expert, slot or -1 if it only passes through staging, layer and expert evicted or -1."""
_NO_LOADS: Loads = np.zeros((0, 4), np.int32)
_NO_REQUESTS: Ints = np.zeros(0, np.int32)


class Placement(NamedTuple):
    """Where the experts of one event lie, or will lie; their rows are in use until the placement is released."""

    layer: int
    experts: Ints  # rising
    rows: Ints  # of each expert; -1 for one that has no slot and passes through staging
    loads: Loads  # in the policy's order


class SlotCache:
    """The slots of one tier under one policy, the rows that they lie in, and the rows for staging and prefetch.

    Callers see to it that no two of them change it at once.
    """

    def __init__(self, controller: Controller) -> None:
        plan = controller.plan
        self.controller = controller
        self.rows: Ints = np.arange(plan.cached, dtype=np.int32)
        self._staging_rows, self.num_rows = plan.staging, plan.cached + plan.staging + plan.prefetch_rows
        spare = list(range(plan.cached, self.num_rows))
        self.staging, self._prefetch_rows = spare[: plan.staging], spare[plan.staging :]
        self._outgoing: list[int] = []  # rows of experts that were evicted by the event that computes with them
        self._in_use = 0  # events whose rows are computed with

    @property
    def table(self) -> Table:
        """The policy's table of slots."""
        return self.controller.table

    @property
    def staging_in_order(self) -> bool:
        """Whether the rows of staging are those that it began with: they are exchanged for others by some policies."""
        first = self.controller.plan.cached
        return self.staging == list(range(first, first + self._staging_rows))

    def reclaim(self) -> None:
        """Take the cache back from a device, if one goes on with it; before anything that the host does with it."""
        self.controller.residency.lease.recall()

    def look_up(
        self,
        layer: int,
        experts: Ints,
        slots: Ints,
        counts: Ints,
        tokens: int,
        phase: Phase,
        request: int = 0,
        routes: Ints | None = None,
        requests: Ints = _NO_REQUESTS,
    ) -> Placement:
        """Serve one event: its experts are protected together, and those that are missing get slots, or staging.

        `slots` are those of the experts before; `routes` is what each token chose, and `requests` whose it is, for
        policies that look at it. The rows are in use until `release`.
        """
        missing = self.controller.route(layer, experts, counts, tokens, phase, request, routes, requests)
        self._in_use += 1
        if not missing:
            return Placement(layer, experts, self.rows[slots], _NO_LOADS)
        now = self.table.slot_of[layer, experts]
        evicted = np.flatnonzero((now < 0) & (slots >= 0))
        kept = [self._exchange(slot) for slot in slots[evicted].tolist()]
        rows = self.rows[now]
        rows[now < 0] = -1
        rows[evicted] = kept
        return Placement(layer, experts, rows, self.table.loads[:missing].copy())

    def release(self) -> None:
        """Say that nothing is computed any more with the rows of one event."""
        self._in_use -= 1
        if self._outgoing and not self._in_use:
            self.staging += self._outgoing
            self._outgoing.clear()

    def _exchange(self, slot: int) -> int:
        """Let a slot lie in a row of staging, since what it held is computed first, and return the row of that."""
        outgoing = int(self.rows[slot])
        self._outgoing.append(outgoing)
        self.rows[slot] = self.staging.pop()
        return outgoing

    def slots_of(self, layer: int, experts: Any) -> Ints:
        """The slots of some experts; -1 of one that is not resident."""
        found: Ints = self.table.slot_of[layer, experts]
        return found

    def rows_of(self, layer: int, experts: Any) -> Ints:
        """The rows of experts that are resident."""
        found: Ints = self.rows[self.table.slot_of[layer, experts]]
        return found

    def is_resident(self, key: ExpertKey) -> bool:
        """Whether an expert has a slot, and its bytes are there or awaited by an event."""
        return bool(self.table.slot_of[key] >= 0)

    def claim(self, slot: int, row: int) -> None:
        """Let a slot lie in the row that its expert was prefetched into; the slot's own row is for prefetch then."""
        freed, self.rows[slot] = int(self.rows[slot]), row
        self._prefetch_rows.append(freed)

    @property
    def prefetch_rows(self) -> list[int]:
        """The rows that could be prefetched into now."""
        return self._prefetch_rows

    def take_row(self) -> int | None:
        """A row to prefetch an expert into; None if there is none."""
        return self._prefetch_rows.pop() if self._prefetch_rows else None

    def return_row(self, row: int) -> None:
        """Have a row for prefetch again: what it held was cancelled, or computed and given no slot."""
        self._prefetch_rows.append(row)

    def reserve(self, keys: Iterable[ExpertKey], *, evict: bool = False, owner: object = None) -> dict[ExpertKey, int]:
        """Reserve a slot for each expert that needs one and finds one, and return their rows.

        With `evict` the expert of the lowest score makes room; not while an event computes with its row.
        """
        slots = self.controller.residency.reserve_all(keys, evict=evict and not self._in_use, owner=owner)
        return {key: int(self.rows[slot]) for key, slot in slots.items()}

    def commit(self, key: ExpertKey, *, pin: bool = False) -> bool:
        """Give an expert that has arrived the slot reserved for it; false if it came another way meanwhile."""
        came_now = self.controller.residency.commit(key)
        if pin:
            self.controller.pin([key])
        return came_now

    def cancel(self, key: ExpertKey) -> None:
        """Free the slot that is reserved for an expert."""
        self.controller.residency.cancel(key)

    def cancel_all(self, owner: object) -> None:
        """Free all slots that are reserved for one owner."""
        self.controller.residency.cancel_all(owner)

    def invalidate(self, layer: int, experts: Sequence[int]) -> None:
        """Empty the slots of experts whose bytes never arrived."""
        self.controller.residency.drop(ExpertKey(layer, expert) for expert in experts)

    def recover(self) -> None:
        """After an event that was broken off, once nothing is written to any row: take back all that it had in use."""
        self._in_use = 0
        self._outgoing.clear()
        first = self.controller.plan.cached
        fixed = range(first, first + self._staging_rows)  # where a device stages, whatever rows were exchanged
        spare = sorted(set(range(self.num_rows)) - set(self.rows.tolist()), key=lambda row: (row not in fixed, row))
        self.staging[:], self._prefetch_rows = spare[: self._staging_rows], spare[self._staging_rows :]

    def restore_rows(self, rows: Any, prefetch_rows: Any, staging: Sequence[int]) -> None:
        """Take over the rows of slots, prefetch and staging, some of which were exchanged elsewhere."""
        np.copyto(self.rows, rows)
        self.staging[:] = staging  # in place: who moves experts holds this list
        changed = list(map(int, prefetch_rows))
        self._prefetch_rows[: len(changed)] = changed

"""All changes of a slot table that no event makes: slots reserved, given and emptied, and put in order after a break.

A slot is reserved for an expert while its bytes are on their way, and committed when they are there. A change that an
interrupt broke off is known by `changes`: what is resident and what is reserved is changed by single assignments, and
all else in the table follows from that much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hotset.cache.lease import CacheLease
from hotset.cache.pins import count_pins
from hotset.cache.plan import SlotPlan
from hotset.cache.table import RESERVED, Table
from hotset.shape import ExpertKey


class Reservation(NamedTuple):
    """An expert on its way to a slot that is held for it."""

    slot: int
    last: int  # when it was last used
    owner: object  # the batch that brings it


class Residency:
    """Which experts have slots, or will have them; callers see to it that no event is served meanwhile."""

    def __init__(self, plan: SlotPlan, table: Table, find_victim: Callable[[int], int | None]) -> None:
        self.plan, self.table = plan, table
        self.reserved: dict[ExpertKey, Reservation] = {}  # experts on their way to slots reserved for them
        self.changes = 0  # of the table that have begun and not ended: more than 0 between calls after an interrupt
        self.version = 0  # counts what changes the cache other than events: a holder of a copy takes it anew
        self.lease = CacheLease()  # recalled before any change: events may run on a device
        self.preloaded = np.zeros(table.slot_of.shape, np.int64)  # how often each expert came without an event
        self._find_victim = find_victim

    def changing(self) -> None:
        """Announce, before what is to change is read, a change of the cache other than by an event."""
        self.version += 1
        self.lease.recall()

    def reserve(self, key: ExpertKey, owner: object = None) -> int | None:
        """Reserve an empty slot for an expert; None if there is none, or the expert is here or on its way."""
        table, (layer, expert) = self.table, key
        group = int(table.group_of[layer])
        if table.slot_of[key] >= 0 or key in self.reserved or not table.num_free[group]:
            return None
        self.changes += 1
        table.num_free[group] -= 1
        slot = int(table.free[table.bounds[group] + table.num_free[group]])
        table.layer_in[slot], table.expert_in[slot] = layer, expert
        self.reserved[key] = Reservation(slot, int(table.last[key]), owner)
        table.last[key] = RESERVED
        self.changes -= 1
        return slot

    def reserve_all(
        self, keys: Iterable[ExpertKey], *, evict: bool = False, owner: object = None
    ) -> dict[ExpertKey, int]:
        """Reserve a slot for each expert that needs one and finds one, by eviction if that is allowed."""
        held = {}
        for key in keys:
            if evict and self.table.slot_of[key] < 0 and key not in self.reserved:
                self.make_room(key.layer)
            if (slot := self.reserve(key, owner)) is not None:
                held[key] = slot
        return held

    def commit(self, key: ExpertKey) -> bool:
        """Give an expert that has arrived its slot; false if it came another way meanwhile, which frees the slot."""
        if self.table.slot_of[key] >= 0:
            self.cancel(key)
            return False
        self.changes += 1
        self.table.slot_of[key] = self.reserved[key].slot
        self.table.resident[key.layer] += 1
        self.preloaded[key] += 1
        self._end_reservation(key)
        self.changes -= 1
        return True

    def cancel(self, key: ExpertKey) -> None:
        """Free a slot that was reserved: its expert does not come, or is not needed any more."""
        slot = self.reserved[key].slot
        self.changes += 1
        self._end_reservation(key)
        self.vacate(key.layer, slot)
        self.changes -= 1

    def cancel_all(self, owner: object) -> None:
        """Free all slots that were reserved for one owner."""
        for key, held in tuple(self.reserved.items()):
            if held.owner is owner:
                self.cancel(key)

    def make_room(self, layer: int) -> bool:
        """See that a layer has an empty slot, by evicting its expert of lowest score if need be; false if it cannot."""
        if self.table.num_free[self.table.group_of[layer]]:
            return True
        slot = self._find_victim(layer)
        if slot is None:
            return False
        self.drop([ExpertKey(int(self.table.layer_in[slot]), int(self.table.expert_in[slot]))])
        return True

    def drop(self, keys: Iterable[ExpertKey]) -> None:
        """Empty the slots of these experts: what was to be loaded there never arrived."""
        self.changing()
        self.changes += 1
        for layer, expert in map(self.plan.checked_key, keys):
            slot = int(self.table.slot_of[layer, expert])
            if slot < 0:
                continue
            self.table.slot_of[layer, expert] = -1
            self.table.resident[layer] -= 1
            self.vacate(layer, slot)
        self.changes -= 1

    def vacate(self, layer: int, slot: int) -> None:
        """Put a slot that holds no expert back among the empty ones."""
        self.changing()
        self.changes += 1
        group = int(self.table.group_of[layer])
        self.table.layer_in[slot] = self.table.expert_in[slot] = -1
        self.table.free[self.table.bounds[group] + self.table.num_free[group]] = slot
        self.table.num_free[group] += 1
        self.changes -= 1

    def rebuild(self) -> None:
        """Derive the table anew from what is resident and what is reserved, if an interrupt broke off a change."""
        if not self.changes:
            return
        self.changing()
        table = self.table
        for key, held in tuple(self.reserved.items()):
            if table.slot_of[key] == held.slot:  # it was given its slot
                self._end_reservation(key)
        self._derive_slots()
        table.resident[:] = (table.slot_of >= 0).sum(axis=1)
        for group, (first, last) in enumerate(pairwise(table.bounds.tolist())):
            empty = np.flatnonzero(table.layer_in[first:last] < 0)[::-1] + first
            table.free[first : first + len(empty)] = empty
            table.num_free[group] = len(empty)
        count_pins(table)
        self.changes = 0

    def _derive_slots(self) -> None:
        table = self.table
        assigned = np.full((2, len(table.layer_in)), -1, np.int32)
        layers, experts = np.nonzero(table.slot_of >= 0)
        assigned[:, table.slot_of[layers, experts]] = layers, experts
        for (layer, expert), held in self.reserved.items():
            assigned[:, held.slot] = layer, expert
        table.layer_in[:], table.expert_in[:] = assigned

    def _end_reservation(self, key: ExpertKey) -> None:
        """Let an expert count as used when it was before its slot was held; it is not on its way any more."""
        if self.table.last[key] == RESERVED:
            self.table.last[key] = self.reserved[key].last
        del self.reserved[key]

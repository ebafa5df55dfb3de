"""Slots for experts that no event waits for: reserved while bytes are on their way, committed when they are there."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hotset.cache.controller import Controller, Reservation
from hotset.cache.table import RESERVED
from hotset.shape import ExpertKey


class Reservations:
    """Reserves slots of one cache; callers see to it that no event is served meanwhile."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        shape = controller.plan.shape
        self.preloaded = np.zeros((shape.layers, shape.experts), np.int64)

    def reserve(self, key: ExpertKey, owner: object = None) -> int | None:
        """Reserve an empty slot for an expert; None if there is none, or the expert is here or on its way."""
        table, (layer, expert) = self.controller.table, key
        group = int(table.group_of[layer])
        if table.slot_of[key] >= 0 or key in self.controller.reserved or not table.num_free[group]:
            return None
        self.controller.changes += 1
        table.num_free[group] -= 1
        slot = int(table.free[table.bounds[group] + table.num_free[group]])
        table.layer_in[slot], table.expert_in[slot] = layer, expert
        self.controller.reserved[key] = Reservation(slot, int(table.last[key]), owner)
        table.last[key] = RESERVED
        self.controller.changes -= 1
        return slot

    def reserve_all(
        self, keys: Iterable[ExpertKey], *, evict: bool = False, owner: object = None
    ) -> dict[ExpertKey, int]:
        """Reserve a slot for each expert that needs one and finds one, by eviction if that is allowed."""
        held = {}
        for key in keys:
            if evict and self.controller.table.slot_of[key] < 0 and key not in self.controller.reserved:
                self.make_room(key.layer)
            if (slot := self.reserve(key, owner)) is not None:
                held[key] = slot
        return held

    def commit(self, key: ExpertKey, slot: int, *, pin: bool = False) -> bool:
        """Give an expert that has arrived its slot; false if it came another way meanwhile, which frees the slot."""
        table = self.controller.table
        came_first = bool(table.slot_of[key] >= 0)
        if came_first:
            self.cancel(key, slot)
        else:
            self.controller.changes += 1
            table.slot_of[key] = slot
            table.resident[key.layer] += 1
            self.preloaded[key] += 1
            self.controller.restore_last(key)
            self.controller.changes -= 1
        if pin:
            self.controller.pin([key])
        return not came_first

    def cancel(self, key: ExpertKey, slot: int) -> None:
        """Free a slot that was reserved: its expert does not come, or is not needed any more."""
        self.controller.changes += 1
        self.controller.restore_last(key)
        self.controller.vacate(key.layer, slot)
        self.controller.changes -= 1

    def cancel_all(self, owner: object) -> None:
        """Free all slots that were reserved for one owner."""
        for key, held in tuple(self.controller.reserved.items()):
            if held.owner is owner:
                self.cancel(key, held.slot)

    def make_room(self, layer: int) -> bool:
        """See that a layer has an empty slot, by evicting its expert of lowest score if need be; false if it cannot."""
        controller, table = self.controller, self.controller.table
        if table.num_free[table.group_of[layer]]:
            return True
        slot = controller.victim(layer)
        if slot is None:
            return False
        controller.drop([ExpertKey(int(table.layer_in[slot]), int(table.expert_in[slot]))])
        return True

    @property
    def count(self) -> int:
        """How many slots wait for their experts."""
        return len(self.controller.reserved)

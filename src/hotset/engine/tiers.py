"""The RAM tier of a GPU: slots in host memory under their own budget and policy, with the disk behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from hotset.cache.controller import Controller
from hotset.cache.plan import SlotPlan
from hotset.engine.arena import Arena
from hotset.engine.guard import Guard
from hotset.engine.preload import DiskLoader
from hotset.engine.slots import Loads, SlotCache
from hotset.policies import Admit, Policy
from hotset.shape import ExpertKey
from hotset.store import Catalog
from hotset.trace import Phase
from hotset.transfer import Readers, ReadTransfer
from hotset.transfer.reads import Load


class RamTier:
    """Experts in host memory; what is asked for and not there is read from disk."""

    def __init__(
        self,
        catalog: Catalog,
        plan: SlotPlan,
        policy: Policy,
        guard: Guard,
        *,
        threads: int = 0,
        force: bool = False,
    ) -> None:
        self.catalog = catalog
        if policy.admission is Admit.LATE:  # what an event evicts of its own could not be copied from here any more
            policy = replace(policy, admit="score")
        self.cache = SlotCache(Controller(plan, policy))
        self.arena = Arena.in_ram(self.cache.num_rows, catalog.slot_bytes, force=force)
        self.readers = Readers(catalog, self.arena.rows().__getitem__, threads=threads) if catalog.files else None
        self.read_bytes = 0
        self._holds_all = plan.cached >= plan.shape.total_experts
        self._transfer = ReadTransfer()
        self._begun: tuple[int, list[int]] | None = None  # the layer of an event, and the experts that were absent
        # What reads experts into this tier while no event waits; none where everything came from memory.
        self.loader = None if self.readers is None else DiskLoader(self.cache, catalog, self.readers, guard)

    @property
    def controller(self) -> Controller:
        """The cache of the tier under its policy."""
        return self.cache.controller

    def where(self, layer: int, experts: list[int]) -> list[int] | None:
        """The rows of experts, where the tier holds every expert for good and has read these; else None."""
        if not self._holds_all:
            return None
        slots = self.cache.table.slot_of[layer, experts]
        return None if (slots < 0).any() else self.cache.rows[slots].tolist()

    def load(
        self, layer: int, experts: list[int], counts: list[int], phase: Phase, before_reading: Callable[[], None]
    ) -> Iterator[tuple[int, int]]:
        """Yield every expert with the row that holds it, as soon as it does.

        A row is good until the next expert is asked for that must be read: `before_reading` waits for the copies out
        of these rows.
        """
        step = self.controller.plan.staging or len(experts)
        for at in range(0, len(experts), step):
            yield from self._load(layer, experts[at : at + step], counts[at : at + step], phase, before_reading)

    def _load(
        self, layer: int, experts: list[int], counts: list[int], phase: Phase, before_reading: Callable[[], None]
    ) -> Iterator[tuple[int, int]]:
        """Yield as many experts as there is staging for: those in memory first; `repair` is for what breaks it off."""
        named = np.array(experts, np.int32)
        self._begun = layer, named[self.cache.slots_of(layer, named) < 0].tolist()
        self._transfer = ReadTransfer()
        preloading = self._preloading(layer, experts)
        counted = [(e, n) for e, n in zip(experts, counts, strict=True) if e not in preloading]
        where = self._start(layer, self._look_up(layer, counted, phase), before_reading)
        for expert, (transfer, row) in preloading.items():
            transfer.forward_to(self._transfer)
            where[expert] = row
        here = [expert for expert in experts if expert not in where]
        yield from zip(here, self.cache.rows_of(layer, here).tolist(), strict=True)
        while where:
            for expert in self._transfer.wait_any():
                yield expert, where.pop(expert)
        self._begun = None

    def repair(self) -> None:
        """Put the tier in order after an event that was broken off anywhere; the engine that it serves calls this.

        Not done where the event ends: a generator that was left is closed at any time, and by any thread.
        """
        if self._begun is not None:
            if self.readers is not None:
                self.readers.cancel_and_wait()
            layer, absent = self._begun
            self.cache.recover()
            self.cache.invalidate(layer, absent)
            self._begun = None
        self.controller.residency.rebuild()

    def _preloading(self, layer: int, experts: list[int]) -> dict[int, tuple[ReadTransfer, int]]:
        """What the background reads already: read twice, it would take two slots, and a full tier has none to spare."""
        if self.loader is None or self.readers is None:
            return {}
        in_progress = self.loader.in_progress
        keys = (ExpertKey(layer, expert) for expert in experts)
        found = {key.expert: in_progress[key] for key in keys if key in in_progress}
        for transfer, _ in found.values():
            self.readers.promote(transfer)
        return found

    def _look_up(self, layer: int, counted: list[tuple[int, int]], phase: Phase) -> Loads:
        """Serve an event of this tier; returns rows of expert and slot to read into."""
        if not counted:
            return np.zeros((0, 4), np.int32)
        experts, counts = np.array(counted, np.int32).T.copy()
        placement = self.cache.look_up(layer, experts, self.cache.slots_of(layer, experts), counts, 1, phase)
        self.cache.release()  # rows are read from until the next reads wait for the copies out of them
        return placement.loads

    def _start(self, layer: int, loads: Loads, before_reading: Callable[[], None]) -> dict[int, int]:
        """Start to read what is missing, into its slot or into staging; returns rows by expert."""
        staging = iter(self.cache.staging)
        where = {e: int(self.cache.rows[slot]) if slot >= 0 else next(staging) for e, slot in loads[:, :2].tolist()}
        if where:
            before_reading()
            source = self.catalog.layers[layer]
            self.read_bytes += sum(source.read_bytes(expert) for expert in where)
            assert self.readers is not None  # noqa: S101 - a tier without files holds everything
            self.readers.start(self._transfer, [Load(layer, expert, row) for expert, row in where.items()])
        return where

    def close(self) -> None:
        """Give back threads and files."""
        if self.readers is not None:
            self.readers.close()

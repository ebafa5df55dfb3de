"""The engine on the processor: slots in memory, filled from disk while what is resident already computes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from hotset.cache.controller import Controller
from hotset.runtime.arena import Arena
from hotset.runtime.background import BackgroundReader
from hotset.runtime.caching import CachingEngine, Loads
from hotset.runtime.event import LiveEvent, Which
from hotset.runtime.math import ExpertMath, SlotExperts
from hotset.shape import ExpertKey
from hotset.store import Catalog
from hotset.store.catalog import Bytes
from hotset.transfer import Flight, Readers
from hotset.transfer.readers import Load


class CpuEngine(CachingEngine):
    """Slots in ordinary memory with a disk behind them."""

    kind = "cpu"

    def __init__(
        self, controller: Controller, catalog: Catalog, maths: Sequence[ExpertMath], *, threads: int = 0
    ) -> None:
        super().__init__(controller, catalog)
        plan = controller.plan
        self.arena = Arena.in_ram(plan.cached + plan.staging, catalog.slot_bytes)
        self.readers = Readers(catalog, self.arena.rows().__getitem__, threads=threads)
        self.layers = [
            SlotExperts(self.arena, source.layout, math) for source, math in zip(catalog.layers, maths, strict=True)
        ]
        self._staging = list(range(plan.cached, plan.cached + plan.staging))
        self._flight = Flight()
        self._arrived: tuple[Loads | None, set[int]] = None, set()
        self._background = BackgroundReader(self.landing, catalog, self.readers, self._lock)

    def compute(self, layer: int, event: LiveEvent, which: Which) -> None:
        """Compute some of the event's experts, all of them resident, or all."""
        slot_of = self.controller.table.slot_of[layer]
        if which is None and event.single:
            # One token whose experts are all here: computed in the router's order, nothing has to be put in its place.
            slots = slot_of[event.flat].tolist()
            event.take(self.layers[layer](event.hidden, slots, range(1, len(slots) + 1)))
            return
        experts = event.experts if which is None else event.experts[which]
        self._compute_in(layer, event, which, slot_of[experts].tolist())

    def _compute_in(self, layer: int, event: LiveEvent, which: Which, slots: Sequence[int]) -> None:
        pairs, ends = event.places(which)
        places = torch.from_numpy(pairs)
        event.put(places, self.layers[layer](event.rows(places), slots, ends))

    def fetch_and_compute(self, layer: int, event: LiveEvent, loads: Loads) -> None:
        """Bring in what is missing and compute everything: residents first, the rest as it arrives."""
        order = loads[loads[:, 0].argsort()]
        seated, staged = order[order[:, 1] >= 0], order[order[:, 1] < 0, 0].tolist()
        where = dict(seated[:, :2].tolist())
        free = list(self._staging)
        flight = self._flight = Flight()
        self._arrived = loads, set()
        self._send(layer, flight, [Load(layer, expert, slot) for expert, slot in where.items()])
        self._send_staged(layer, flight, staged, free, where)
        residents = event.others(order[:, 0])
        if len(residents):
            self.compute(layer, event, residents)
        while where:
            began = time.perf_counter()
            arrived = sorted(flight.take())
            self.clock.stall_s += time.perf_counter() - began
            self._arrived[1].update(arrived)
            slots = [where.pop(expert) for expert in arrived]
            self._compute_in(layer, event, event.positions(arrived), slots)
            free += [slot for slot in slots if slot >= self.controller.plan.cached]
            self._send_staged(layer, flight, staged, free, where)

    def _send_staged(
        self, layer: int, flight: Flight, staged: list[int], free: list[int], where: dict[int, int]
    ) -> None:
        """Put as many of the experts that only pass through on their way as there is staging for."""
        now = staged[: len(free)]
        del staged[: len(now)]
        slots = [free.pop() for _ in now]
        where.update(zip(now, slots, strict=True))
        self._send(layer, flight, [Load(layer, expert, slot) for expert, slot in zip(now, slots, strict=True)])

    def _send(self, layer: int, flight: Flight, loads: list[Load]) -> None:
        if loads:
            source = self.catalog.layers[layer]
            self.clock.loaded_bytes += sum(source.read_bytes(load.expert) for load in loads)
            self.readers.start(flight, loads)

    def fetch(self, layer: int, expert: int) -> Bytes:
        """The bytes of one expert as in a slot, good until the next call of anything; for use between passes."""
        flight = Flight()
        self.readers.start(flight, [Load(layer, expert, self._staging[0])])
        flight.take()
        block: Bytes = self.arena.rows()[self._staging[0]]
        return block

    def bring_in(self, order: Sequence[ExpertKey], *, pin: bool = False) -> Iterator[object]:
        """Bring experts into empty slots in the background, a batch at every step; pins evict the weakest."""
        yield from self._background.steps(order, pin=pin)

    def load_bytes(self) -> npt.NDArray[np.int64]:
        """What is read for each expert: [layers, experts]."""
        sizes = np.zeros((self.shape.layers, self.shape.experts), np.int64)
        for layer, source in enumerate(self.catalog.layers):
            sizes[layer, : len(source.experts)] = [source.read_bytes(expert) for expert in range(len(source.experts))]
        return sizes

    @property
    def background_bytes(self) -> int:
        """The bytes that were read without anybody waiting for them."""
        return self._background.read_bytes

    def lost(self, loads: Loads) -> list[int]:
        """After a failure: the experts whose slots hold nothing to be trusted."""
        self._flight.abandon()
        arrived = self._arrived[1] if self._arrived[0] is loads else set()
        return [expert for expert, slot in loads[:, :2].tolist() if slot >= 0 and expert not in arrived]

    def resident_bytes(self) -> dict[str, int]:
        """The bytes held, by what for."""
        plan = self.controller.plan
        return {
            "slots": plan.cached * self.catalog.slot_bytes,
            "staging": plan.staging * self.catalog.slot_bytes,
        }

    def close(self) -> None:
        """Give back threads, files and memory."""
        if self.warmer is not None:
            self.warmer.stop()
        self.readers.close()
        self.layers = []

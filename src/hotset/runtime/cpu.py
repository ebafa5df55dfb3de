"""The engine on the processor: slots in memory, filled from disk while what is resident already computes."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from hotset.cache.controller import Controller
from hotset.engine.kernels.cpu import PerExpertKernels
from hotset.engine.kernels.spec import ExpertSpec
from hotset.engine.slots import Loads
from hotset.runtime.ahead import AheadOfDisk, Guess
from hotset.runtime.arena import Arena
from hotset.runtime.background import BackgroundReader
from hotset.runtime.caching import Begun, CachingEngine, Work, mending
from hotset.runtime.event import LiveEvent, Which
from hotset.runtime.step import Step
from hotset.shape import ExpertKey
from hotset.store import Catalog
from hotset.store.catalog import Bytes
from hotset.transfer import Flight, Readers
from hotset.transfer.readers import Load


class CpuEngine(CachingEngine):
    """Slots in ordinary memory with a disk behind them."""

    kind = "cpu"

    def __init__(
        self,
        controller: Controller,
        catalog: Catalog,
        maths: Sequence[ExpertSpec],
        *,
        threads: int = 0,
        force: bool = False,
    ) -> None:
        super().__init__(controller, catalog)
        plan = controller.plan
        self.arena = Arena.in_ram(self.cache.num_rows, catalog.slot_bytes, force=force)
        self.readers = Readers(catalog, self.arena.rows().__getitem__, threads=threads)
        self.layers = [
            PerExpertKernels(self.arena, source.layout, math)
            for source, math in zip(catalog.layers, maths, strict=True)
        ]
        if plan.ahead:
            self.ahead = AheadOfDisk(self.cache, catalog, self.readers)
        self._claimed: dict[int, Guess[Flight]] = {}
        self._background = BackgroundReader(self.cache, catalog, self.readers, self._lock, mending(weakref.ref(self)))

    def compute(self, layer: int, event: LiveEvent, which: Which) -> None:
        """Compute some of the event's experts, all of them resident, or all."""
        experts = event.experts if which is None else event.experts[which]
        self.layers[layer].run(event, experts, self.cache.rows_of(layer, experts))

    def fetch_and_compute(self, step: Step, layer: int, event: LiveEvent, loads: Loads) -> None:
        """Bring in what is missing and compute everything: residents first, the rest as it arrives."""
        order = loads[loads[:, 0].argsort()]
        free = list(self.cache.staging)
        flight = Flight()
        where, staged = self._begin(layer, flight, order)
        self._send_staged(layer, flight, staged, free, where)
        self.look_ahead(step, layer, event)
        residents = event.others(order[:, 0])
        if len(residents):
            self.compute(layer, event, residents)
        while where:
            began = time.perf_counter()
            arrived = sorted(flight.take())
            self.clock.stall_s += time.perf_counter() - began
            self.arrived.update(arrived)
            rows = [where.pop(expert) for expert in arrived]
            self.compute_rows(layer, event, arrived, rows)
            free += [row for row in rows if row in self.cache.staging]
            self._give_back(arrived)
            self._send_staged(layer, flight, staged, free, where)

    def _begin(self, layer: int, flight: Flight, order: Loads) -> tuple[dict[int, int], list[int]]:
        """Send for what has a slot, and take over what was guessed; returns rows by expert, and who has none yet."""
        self._claimed = {} if self.ahead is None else self.ahead.claim(layer, order[:, 0].tolist())
        where: dict[int, int] = {}
        for expert, slot in order[:, :2].tolist():
            guess = self._claimed.get(expert)
            if slot >= 0 and guess is not None:
                self.cache.claim(slot, guess.row)
            if slot >= 0:
                where[expert] = int(self.cache.rows[slot])
            elif guess is not None:
                where[expert] = guess.row
        unguessed = [Load(layer, expert, row) for expert, row in where.items() if expert not in self._claimed]
        self._send(layer, flight, unguessed)
        for guess in self._claimed.values():
            self.clock.loaded_bytes += guess.size_bytes
            guess.flight.join(flight)
        return where, [expert for expert in order[:, 0].tolist() if expert not in where]

    def _give_back(self, experts: Sequence[int]) -> None:
        """Return the rows of guesses that only passed through, once their experts are computed."""
        for expert in experts:
            guess = self._claimed.pop(expert, None)
            if guess is not None and not self.cache.is_resident(guess.key):
                self.cache.return_row(guess.row)

    def _send_staged(
        self, layer: int, flight: Flight, staged: list[int], free: list[int], where: dict[int, int]
    ) -> None:
        """Put as many of the experts that only pass through on their way as there is staging for."""
        now = staged[: len(free)]
        del staged[: len(now)]
        rows = [free.pop() for _ in now]
        where.update(zip(now, rows, strict=True))
        self._send(layer, flight, [Load(layer, expert, row) for expert, row in zip(now, rows, strict=True)])

    def _send(self, layer: int, flight: Flight, loads: list[Load]) -> None:
        if loads:
            source = self.catalog.layers[layer]
            self.clock.loaded_bytes += sum(source.read_bytes(load.expert) for load in loads)
            self.readers.start(flight, loads)

    def pass_through(self, layer: int, experts: list[int], work: Work, meanwhile: Callable[[], None]) -> None:
        """Bring experts into staging and work with them, and do something else while the first are on their way."""
        flight, free, where = Flight(), list(self.cache.staging), dict[int, int]()
        try:
            self._send_through(layer, flight, experts, free, where)
            meanwhile()
            while where:
                arrived = sorted(flight.take())
                rows = [where.pop(expert) for expert in arrived]
                work(arrived, rows)
                free += rows
                self._send_through(layer, flight, experts, free, where)
        except BaseException:
            flight.abandon()  # nothing may be written to staging any more
            raise

    def _send_through(
        self, layer: int, flight: Flight, waiting: list[int], free: list[int], where: dict[int, int]
    ) -> None:
        """Have as many experts read as there is staging for."""
        now = {expert: free.pop() for expert in waiting[: len(free)]}
        del waiting[: len(now)]
        where.update(now)
        if now:
            self.readers.start(flight, [Load(layer, expert, row) for expert, row in now.items()])

    def compute_rows(self, layer: int, event: LiveEvent, experts: Sequence[int], rows: Sequence[int]) -> None:
        """Compute some of the event's experts, which lie in these rows."""
        self.layers[layer].run(event, np.array(experts, np.int32), np.array(rows, np.int64))

    def fetch(self, layer: int, expert: int) -> Bytes:
        """The bytes of one expert as in a slot, good until the next call of anything; for use between passes."""
        with self._lock:
            self.mend()
            self.recorded(Begun.nothing(), lambda: self._stage(layer, expert))
        block: Bytes = self.arena.rows()[self.cache.staging[0]]
        return block

    def _stage(self, layer: int, expert: int) -> None:
        flight = Flight()
        self.readers.start(flight, [Load(layer, expert, self.cache.staging[0])])
        flight.take()

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

    def stop_transfers(self) -> None:
        """After a failure: wait until no thread writes to a row any more, and take the rows of guesses back."""
        self.readers.call_off()
        self._claimed = {}
        if self.ahead is not None:
            self.ahead.reset()

    def mend_background(self) -> None:
        """Give back slots held for experts that a thread was interrupted in bringing."""
        self._background.mend()

    def resident_bytes(self) -> dict[str, int]:
        """The bytes held, by what for."""
        plan = self.controller.plan
        return {
            "slots": plan.cached * self.catalog.slot_bytes,
            "staging": plan.staging * self.catalog.slot_bytes,
            **({"ahead": plan.ahead * self.catalog.slot_bytes} if plan.ahead else {}),
        }

    def untouched_bytes(self) -> int:
        """What the slots will take of free memory once they are filled."""
        return self.arena.untouched_bytes()

    def close(self) -> None:
        """Give back threads, files and memory."""
        if self.warmer is not None:
            self.warmer.stop()
        if self.ahead is not None:
            self.ahead.clear()
        self.readers.close()
        self.arena.release()
        self.layers = []

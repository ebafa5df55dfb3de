"""Loading experts that no event waits for: slots are reserved, filled while events are served, then committed."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from hotset.cache.pins import check_pins
from hotset.engine.guard import Batch, Guard
from hotset.engine.slots import SlotCache
from hotset.errors import BudgetError, HotsetError
from hotset.owner import Owner
from hotset.shape import ExpertKey
from hotset.store import Catalog
from hotset.transfer import Readers, ReadTransfer
from hotset.transfer.readers import Rank
from hotset.transfer.reads import Load

PIN_TRIES = 3
"""What the RAM tier has just read for a pin may be evicted from it before it is copied."""
BATCH_BYTES = 32 << 20
"""What is read at a time: enough for the disk to be busy, little enough for the best to be there soon."""


class ReadBatch(Batch):
    """Experts that one thread reads together."""

    def __init__(self, undo: Callable[[ReadBatch], None]) -> None:
        super().__init__(undo)
        self.transfers: dict[ExpertKey, ReadTransfer] = {}

    def stop(self) -> None:
        """Cancel what has not arrived, and return once no thread writes to a slot any more."""
        for transfer in self.transfers.values():
            transfer.cancel()
        for key, transfer in self.transfers.items():
            transfer.cancel_and_wait()
            transfer.refuse(key.expert)  # an event may wait for what does not come


class DiskLoader:
    """Fills slots of one cache from disk while events are served, which the guard's lock keeps out for moments."""

    def __init__(self, cache: SlotCache, catalog: Catalog, readers: Readers, guard: Guard) -> None:
        self._cache, self._catalog, self._readers, self._guard = cache, catalog, readers, guard
        self.moved_bytes = 0
        self.in_progress: dict[ExpertKey, tuple[ReadTransfer, int]] = {}  # and the row reserved

    def steps(self, order: Sequence[ExpertKey], *, pin: bool = False) -> Iterator[object]:
        """Bring experts in, a batch at every step."""
        for batch in [list(order)] if pin else self.batches(order):
            self.load(batch, pin=pin, evict=pin)
            yield batch

    def load(
        self,
        keys: Sequence[ExpertKey],
        *,
        pin: bool = False,
        evict: bool = False,
        before_reading: Callable[[], None] | None = None,
    ) -> None:
        """Read these experts into empty slots, as far as there are any, or in the place of those of lowest score.

        `before_reading` waits until nothing reads the rows of what was evicted any more.
        """
        batch = ReadBatch(self._undo)
        with batch.alive:
            self._guard.add(batch)
            try:
                self._load(batch, keys, pin, evict, before_reading)
            finally:
                batch.stop()  # without the lock: an event that waits for one of these has it
                with self._guard.lock:
                    self._guard.repair()
                    self._undo(batch)
        self._guard.forget(batch)

    def _load(
        self,
        batch: ReadBatch,
        keys: Sequence[ExpertKey],
        pin: bool,
        evict: bool,
        before_reading: Callable[[], None] | None,
    ) -> None:
        with self._guard.lock:
            self._guard.repair()
            held = self._cache.reserve(keys, evict=evict, owner=batch)
            for key in sorted(held, key=self._place):  # in the order in which they lie on disk
                batch.transfers[key] = ReadTransfer()
            self.in_progress.update({key: (batch.transfers[key], row) for key, row in held.items()})
        if evict and before_reading is not None:
            before_reading()
        for key, transfer in batch.transfers.items():
            self.moved_bytes += self._catalog.layers[key.layer].read_bytes(key.expert)
            self._readers.start(transfer, [Load(key.layer, key.expert, held[key])], Rank.BACKGROUND)
        failed = [error for key in held if (error := self._take(batch, key, pin)) is not None]
        if failed:
            raise failed[0]

    def _take(self, batch: ReadBatch, key: ExpertKey, pin: bool) -> HotsetError | None:
        """Wait for an expert and give it its slot; a failed read empties the slot again, and the others go on."""
        failed = None
        try:
            batch.transfers[key].wait_any()
        except HotsetError as error:
            failed = error
            batch.transfers[key].cancel_and_wait()
        with self._guard.lock:
            self._guard.repair()
            if failed is None:
                self._cache.commit(key, pin=pin)
            else:
                self._cache.cancel(key)
            self.in_progress.pop(key, None)
        return failed

    def _place(self, key: ExpertKey) -> tuple[int, int]:
        segments = self._catalog.layers[key.layer].experts[key.expert]
        return (segments[0].file, segments[0].offset) if segments else (0, 0)

    def _undo(self, batch: ReadBatch) -> None:
        """Under the lock: empty the slots of what never arrived, once no thread writes to them any more."""
        batch.stop()
        self._cache.cancel_all(batch)
        for key in batch.transfers:
            self.in_progress.pop(key, None)

    def batches(self, order: Sequence[ExpertKey]) -> Iterator[list[ExpertKey]]:
        """Cut an order into batches, without experts that are here already or have no empty slot to hope for."""
        batch: list[ExpertKey] = []
        size = 0
        table = self._cache.table
        for key in order:
            if table.slot_of[key] < 0 and table.num_free[table.group_of[key.layer]]:
                batch.append(key)
                size += self._catalog.slot_bytes
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch


class BackgroundLoader:
    """A thread that works through an order of experts, best first, until all is done or it is stopped."""

    def __init__(self, steps: Iterator[object]) -> None:
        self.error: HotsetError | None = None
        self._owner = Owner()
        self._steps = steps
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hotset-preload", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # a thread that copies while the interpreter goes down takes it down with it

    def _run(self) -> None:
        try:
            for _ in self._steps:
                if self._stop.is_set():
                    return
        except HotsetError as error:  # demand will meet the same fault, with a caller to hear of it
            self.error = error
        finally:
            atexit.unregister(self.stop)

    @property
    def busy(self) -> bool:
        """Whether it is still at work."""
        return self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; false if it did not come in time."""
        self._thread.join(timeout_s)
        return not self.busy

    def stop(self) -> None:
        """End after the batch under way; in a child process there is none."""
        if not self._owner.is_here:
            return
        self._stop.set()
        self._thread.join()


class Loader(Protocol):
    """Brings experts into the fastest tier while events are served."""

    @property
    def moved_bytes(self) -> int:
        """The bytes that it has moved, ever."""

    def steps(self, order: Sequence[ExpertKey], *, pin: bool = False) -> Iterator[object]:
        """Bring experts into empty slots, a batch at every step; pins evict the experts of lowest score."""


class Preloader:
    """Fills empty slots in the background, and brings in what is to be pinned."""

    def __init__(self, cache: SlotCache, loader: Loader, guard: Guard, slot_bytes: int) -> None:
        self._cache, self._loader, self._guard = cache, loader, guard
        self._batch = max(1, BATCH_BYTES // slot_bytes)
        self.running: BackgroundLoader | None = None

    @property
    def moved_bytes(self) -> int:
        """The bytes that were moved while no event waited for them."""
        return self._loader.moved_bytes

    def preload(self, order: Sequence[ExpertKey], pins: Sequence[ExpertKey] = ()) -> None:
        """Fill empty slots in the background, in this order, after pinning some; events go on meanwhile."""
        self.stop()
        self._check(pins)
        self.running = BackgroundLoader(self._steps(order, pins))

    def pin(self, keys: Sequence[ExpertKey]) -> None:
        """Keep these experts for good; those that are absent are loaded now, in the place of those of lowest score."""
        self._check(keys)
        for _ in self._pinning(keys):
            pass

    def stop(self) -> None:
        """End what runs in the background after its batch."""
        if self.running is not None:
            self.running.stop()

    def _check(self, pins: Sequence[ExpertKey]) -> None:
        with self._guard.lock:
            self._guard.repair()
            check_pins(self._cache.controller.plan, self._cache.table, pins)

    def _steps(self, order: Sequence[ExpertKey], pins: Sequence[ExpertKey]) -> Iterator[object]:
        yield from self._pinning(pins)
        yield from self._loader.steps(order)

    def _pinning(self, keys: Sequence[ExpertKey]) -> Iterator[object]:
        for at in range(0, len(keys), self._batch):
            absent = self._pin_residents(keys[at : at + self._batch])
            for _ in range(PIN_TRIES):
                yield from self._loader.steps(absent, pin=True)
                while any(key in self._cache.controller.residency.reserved for key in absent):
                    time.sleep(0.002)  # another thread may be loading them
                absent = self._pin_residents(absent)
            if absent:
                raise BudgetError(
                    f"{len(absent)} experts to pin find no slot: pin fewer, or give the cache more memory"
                )

    def _pin_residents(self, keys: Sequence[ExpertKey]) -> list[ExpertKey]:
        """Pin those that are here; returns the others."""
        with self._guard.lock:
            self._guard.repair()
            self._cache.controller.residency.changing()
            here = {key for key in keys if self._cache.is_resident(key)}
            self._cache.controller.pin(here)
        return [key for key in keys if key not in here]

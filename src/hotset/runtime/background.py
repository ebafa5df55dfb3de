"""Reading experts that nobody waits for: slots are held, filled while events are served, then taken."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from hotset.engine.slots import SlotCache
from hotset.errors import HotsetError
from hotset.owner import Owner
from hotset.shape import ExpertKey
from hotset.store import Catalog
from hotset.transfer import Flight, Readers
from hotset.transfer.readers import Load, Rank

BATCH_BYTES = 32 << 20
"""What is read at a time: enough for the disk to be busy, little enough for the best to be there soon."""


class Batch:
    """Experts that one thread brings in together; `alive` is locked for as long as it is at it, whatever ends that."""

    def __init__(self) -> None:
        self.alive = threading.Lock()
        self.flights: dict[ExpertKey, Flight] = {}


def is_left(batches: Sequence[Batch]) -> bool:
    """Whether a thread was interrupted before it had cleaned up after its batch."""
    return bool(batches) and any(not batch.alive.locked() for batch in batches)


def left_of(batches: Sequence[Batch]) -> list[Batch]:
    """The batches that were left."""
    return [batch for batch in batches if not batch.alive.locked()]


def forget(batches: list[Batch], batch: Batch) -> None:
    """Take a batch from the list of those under way, if it is there."""
    with suppress(ValueError):
        batches.remove(batch)


def _stop(batch: Batch) -> None:
    """Cancel what has not arrived, and return once no thread writes to a slot any more."""
    for flight in batch.flights.values():
        flight.cancel()
    for key, flight in batch.flights.items():
        flight.abandon()
        flight.refuse(key.expert)  # an event may wait for what does not come


class BackgroundReader:
    """Fills slots of one cache from disk; `lock` keeps events out while the slot table is touched."""

    def __init__(
        self,
        cache: SlotCache,
        catalog: Catalog,
        readers: Readers,
        lock: threading.RLock,
        mend: Callable[[], None] = lambda: None,
    ) -> None:
        self.cache, self.catalog, self.readers = cache, catalog, readers
        self.lock, self._mend_engine = lock, mend
        self.read_bytes = 0
        self.under_way: dict[ExpertKey, tuple[Flight, int]] = {}  # by expert: its transfer, and the row reserved for it
        self.before_reading: Callable[[], None] = lambda: None  # waits until what was evicted is not read any more
        self._batches: list[Batch] = []

    def steps(self, order: Sequence[ExpertKey], *, pin: bool = False) -> Iterator[object]:
        """Bring experts in, a batch at every step."""
        for batch in [list(order)] if pin else self.batches(order):
            self.bring(batch, pin=pin, evict=pin)
            yield batch

    def bring(self, keys: Sequence[ExpertKey], *, pin: bool = False, evict: bool = False) -> None:
        """Read these experts into empty slots, as far as there are any, or in the place of the weakest."""
        batch = Batch()
        with batch.alive:
            self._batches.append(batch)
            try:
                self._bring(batch, keys, pin=pin, evict=evict)
            finally:
                self._give_up(batch)
        forget(self._batches, batch)

    def _bring(self, batch: Batch, keys: Sequence[ExpertKey], *, pin: bool, evict: bool) -> None:
        with self.lock:
            self._mend_engine()
            held = self.cache.reserve(keys, evict=evict, owner=batch)
            for key in sorted(held, key=self._place):  # in the order in which they lie on disk
                batch.flights[key] = Flight()
            self.under_way.update({key: (batch.flights[key], row) for key, row in held.items()})
        if evict:
            self.before_reading()
        self._send(batch, held)
        failed = [error for key in held if (error := self._take(batch, key, pin)) is not None]
        if failed:
            raise failed[0]

    def _send(self, batch: Batch, held: dict[ExpertKey, int]) -> None:
        for key, flight in batch.flights.items():
            self.read_bytes += self.catalog.layers[key.layer].read_bytes(key.expert)
            self.readers.start(flight, [Load(key.layer, key.expert, held[key])], Rank.BACKGROUND)

    def _take(self, batch: Batch, key: ExpertKey, pin: bool) -> HotsetError | None:
        """Wait for an expert and give it its slot; a failed read empties the slot again, and the others go on."""
        failed = None
        try:
            batch.flights[key].take()
        except HotsetError as error:
            failed = error
            batch.flights[key].abandon()
        with self.lock:
            self._mend_engine()
            if failed is None:
                self.cache.commit(key, pin=pin)
            else:
                self.cache.cancel(key)
            self.under_way.pop(key, None)
        return failed

    def _place(self, key: ExpertKey) -> tuple[int, int]:
        segments = self.catalog.layers[key.layer].experts[key.expert]
        return (segments[0].file, segments[0].offset) if segments else (0, 0)

    def _give_up(self, batch: Batch) -> None:
        """Empty the slots of what never arrived, once no thread writes to them any more."""
        _stop(batch)  # without the lock: an event that waits for one of these has it
        with self.lock:
            self._mend_engine()
            self._give_back(batch)

    def _give_back(self, batch: Batch) -> None:
        self.cache.cancel_all(batch)
        for key in batch.flights:
            self.under_way.pop(key, None)

    def mend(self) -> None:
        """Under the lock: clean up after threads that were interrupted before they had."""
        if is_left(self._batches):
            for batch in left_of(self._batches):
                _stop(batch)
                self._give_back(batch)
                forget(self._batches, batch)

    def batches(self, order: Sequence[ExpertKey]) -> Iterator[list[ExpertKey]]:
        """Cut an order into batches, without experts that are here already or have no empty slot to hope for."""
        batch: list[ExpertKey] = []
        size = 0
        for key in order:
            if not self._wanted(key):
                continue
            batch.append(key)
            size += self.catalog.slot_bytes
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _wanted(self, key: ExpertKey) -> bool:
        table = self.cache.table
        return bool(table.slot_of[key] < 0 and table.num_free[table.group_of[key.layer]])


class Warmer:
    """A thread that works through an order of experts, best first, until all is done or it is stopped."""

    def __init__(self, steps: Iterator[object]) -> None:
        self.error: HotsetError | None = None
        self._owner = Owner()
        self._steps = steps
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hotset-warmer", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # a thread that copies while the interpreter goes down takes it down with it

    def _run(self) -> None:
        try:
            for _ in self._steps:
                if self._stop.is_set():
                    return
        except HotsetError as error:  # demand will meet the same fault, with somebody there to hear of it
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

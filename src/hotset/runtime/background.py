"""Reading experts that nobody waits for: slots are held, filled while events are served, then taken."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator, Sequence

from hotset.cache.landing import Landing
from hotset.errors import HotsetError
from hotset.owner import Owner
from hotset.shape import ExpertKey
from hotset.store import Catalog
from hotset.transfer import Flight, Readers
from hotset.transfer.readers import Load, Rank

BATCH_BYTES = 32 << 20
"""What is read at a time: enough for the disk to be busy, little enough for the best to be there soon."""


class BackgroundReader:
    """Fills slots of one cache from disk; `lock` keeps events out while the slot table is touched."""

    def __init__(self, landing: Landing, catalog: Catalog, readers: Readers, lock: threading.RLock) -> None:
        self.landing, self.catalog, self.readers = landing, catalog, readers
        self.lock = lock
        self.read_bytes = 0
        self.under_way: dict[ExpertKey, tuple[Flight, int]] = {}  # by expert: its transfer, and the slot held for it
        self.row_of: Callable[[int], int] = lambda slot: slot  # where a slot lies in memory
        self.before_reading: Callable[[], None] = lambda: None  # waits until nobody reads from what was evicted

    def steps(self, order: Sequence[ExpertKey], *, pin: bool = False) -> Iterator[object]:
        """Bring experts in, a batch at every step."""
        for batch in [list(order)] if pin else self.batches(order):
            self.bring(batch, pin=pin, evict=pin)
            yield batch

    def bring(self, keys: Sequence[ExpertKey], *, pin: bool = False, evict: bool = False) -> None:
        """Read these experts into empty slots, as far as there are any, or in the place of the weakest."""
        with self.lock:
            held = self.landing.hold_all(keys, evict=evict)
            flights = {key: Flight() for key in sorted(held, key=self._place)}  # in the order in which they lie on disk
            self.under_way.update({key: (flights[key], slot) for key, slot in held.items()})
        try:
            if evict:
                self.before_reading()
            self._send(held, flights)
            failed = [error for key in list(flights) if (error := self._take(key, held[key], flights, pin)) is not None]
        finally:
            self._give_up(flights, held)
        if failed:
            raise failed[0]

    def _send(self, held: dict[ExpertKey, int], flights: dict[ExpertKey, Flight]) -> None:
        for key, flight in flights.items():
            self.read_bytes += self.catalog.layers[key.layer].read_bytes(key.expert)
            self.readers.start(flight, [self._load(key, held[key])], Rank.BACKGROUND)

    def _take(self, key: ExpertKey, slot: int, flights: dict[ExpertKey, Flight], pin: bool) -> HotsetError | None:
        """Wait for an expert and give it its slot; a failed read empties the slot again, and the others go on."""
        try:
            flights[key].take()
        except HotsetError as error:
            self._give_up({key: flights.pop(key)}, {key: slot})
            return error
        with self.lock:
            self.landing.seat(key, slot, pin=pin)
            self.under_way.pop(key, None)
        del flights[key]
        return None

    def _load(self, key: ExpertKey, slot: int) -> Load:
        return Load(key.layer, key.expert, self.row_of(slot))

    def _place(self, key: ExpertKey) -> tuple[int, int]:
        segments = self.catalog.layers[key.layer].experts[key.expert]
        return (segments[0].file, segments[0].offset) if segments else (0, 0)

    def _give_up(self, flights: dict[ExpertKey, Flight], held: dict[ExpertKey, int]) -> None:
        """Empty the slots of what never arrived, once nobody writes to them any more."""
        for flight in flights.values():
            flight.cancelled = True
        for key, flight in flights.items():
            flight.abandon()
            flight.refuse(key.expert)  # an event may wait for what was never sent for
            with self.lock:
                self.landing.give_back(key, held[key])
                self.under_way.pop(key, None)

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
        table = self.landing.controller.table
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

"""One event at a time, and order after whatever broke one off: a failure, or an interrupt between any two instructions.

What an event has begun is written down before it is done. The next call, under the lock, first puts in order what
was broken off: no thread or stream writes to a row any more, and what never arrived loses its slot.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hotset.engine.slots import Ints, SlotCache
from hotset.errors import ClosedError, HotsetError, StoreError
from hotset.owner import Owner


@dataclass(slots=True)
class EventRecord:
    """An event in progress: what must be known to put the cache in order if it is broken off, wherever that is."""

    layer: int
    experts: Ints
    slots: Ints  # of each expert when the event began; -1 of one that was not resident
    arrived: set[int] = field(default_factory=set)  # those that were not, and whose bytes are in their rows now

    def lost(self) -> list[int]:
        """The experts whose bytes never arrived."""
        return [expert for expert in self.experts[self.slots < 0].tolist() if expert not in self.arrived]


STAGING = EventRecord(0, np.zeros(0, np.int32), np.zeros(0, np.int32))
"""The record of transfers to staging alone: no slot is touched."""


class Batch:
    """Experts that a thread brings in while events go on; `alive` is locked while it is at it, whatever ends that.

    `undo`, a method that is not kept alive, frees the slots that an interrupted thread has left reserved for a batch.
    """

    def __init__(self, undo: Callable[[Any], None]) -> None:
        self.alive = threading.Lock()
        self.undo = weakref.WeakMethod(undo)


class Guard:
    """The lock of one engine, the record of its event in progress, and whether it can be used at all."""

    def __init__(self, cache: SlotCache) -> None:
        self.lock = threading.RLock()
        self.owner = Owner()
        self._cache = cache
        self._record: EventRecord | None = None
        self._serving = threading.Lock()  # locked while an event is served, whatever ends that
        self._broken = False
        self._closed = False
        self._stop: weakref.WeakMethod[Callable[[], None]] | None = None
        self._batches: list[Batch] = []

    def before_repair(self, stop: Callable[[], None]) -> None:
        """Have a method called after an event was broken off: it returns once nothing is written to rows any more."""
        self._stop = weakref.WeakMethod(stop)

    def add(self, batch: Batch) -> None:
        """Have a batch undone if its thread is interrupted; that has locked `alive` by now."""
        self._batches.append(batch)

    def forget(self, batch: Batch) -> None:
        """Take a batch from the list of those in progress, if it is there."""
        with suppress(ValueError):
            self._batches.remove(batch)

    def refuse_calls(self) -> None:
        """Serve nothing from here on; what is in progress ends first."""
        self._closed = True
        with self.lock:
            pass

    def mark_broken(self) -> None:
        """Say that the device has failed: nothing can be served any more."""
        self._broken = True

    @property
    def is_broken(self) -> bool:
        """Whether the device has failed."""
        return self._broken

    def check_usable(self) -> None:
        """Refuse a call that finds no experts any more, or came into another process by a fork."""
        if self._closed:
            raise ClosedError
        self.owner.check()

    def check(self) -> None:
        """Under the lock: refuse what cannot be served, and put in order what was broken off."""
        self.check_usable()
        if self._broken:
            raise HotsetError("an earlier failure left this engine unusable: load the model again")
        self.repair()

    def run(self, record: EventRecord, work: Callable[..., None], *given: Any) -> None:
        """Do what fills rows, with what puts them in order again written down first: an interrupt may come anywhere."""
        self._record = record
        try:
            with self._serving:
                work(*given)
        except BaseException:
            with suppress(StoreError):  # a disk that hangs: the next call says so
                self.repair()
            raise
        self._record = None

    def repair(self) -> None:
        """Put the cache in order after whatever was broken off; under the lock, and before anything else there.

        It may be broken off itself: the record of an event is kept until all is done, and doing it again does no harm.
        """
        record = self._record
        if record is not None:
            if self._serving.locked():  # by this thread, since it has the lock
                raise HotsetError("the model was called while it computes: not from a signal handler or a hook")
            stop = None if self._stop is None else self._stop()
            if stop is not None:
                stop()
            self._cache.recover()
            self._cache.invalidate(record.layer, record.lost())
            self._record = None
        self._cache.controller.residency.rebuild()
        if self._batches:
            self._undo_batches()

    def _undo_batches(self) -> None:
        """Clean up after threads that were interrupted before they had."""
        for batch in [batch for batch in self._batches if not batch.alive.locked()]:
            undo = batch.undo()
            if undo is not None:
                undo(batch)
            self.forget(batch)

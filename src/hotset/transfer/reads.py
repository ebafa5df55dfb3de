"""The experts that one event waits for: they arrive one by one, and the first to arrive is computed first.

An interrupt may strike a thread that waits for a transfer between any two steps, so nothing here depends on a step that
comes later: which pieces are waiting and which are being read is written down where it happens, each by one operation
that is done or not done. Only locks and queues written in C are used: those of `threading` that are written in Python
can be left locked by an interrupt.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple

from hotset.errors import HotsetError, StoreError
from hotset.transfer.spans import Span

CANCEL_TIMEOUT_S = 60.0
"""How long a read may take once it was cancelled; a disk that is slower is taken for dead."""
_LOOK_S = 0.05  # between looks at a transfer whose end may have been told to a thread that was interrupted
_WAIT_S = 1.0  # between looks whether a transfer that is waited for was cancelled
_GONE = object()


class Load(NamedTuple):
    """One expert to bring into one row."""

    layer: int
    expert: int
    row: int


@dataclass(slots=True, eq=False)
class Job:
    """A piece of a load that one thread does at a stretch."""

    transfer: ReadTransfer
    load: Load
    spans: tuple[Span, ...]


class ReadTransfer:
    """Loads under way for one event."""

    def __init__(self) -> None:
        self.completed: SimpleQueue[tuple[int, BaseException | None]] = SimpleQueue()
        self.cancelled = False
        self._waiting: dict[Job, None] = {}
        self._reading: dict[int, None] = {}  # the threads that are at a piece
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._pieces: dict[int, int] = {}
        self._errors: dict[int, BaseException] = {}
        self._lock = threading.Lock()
        self._came: list[tuple[int, BaseException | None]] = []
        self._forward_to: ReadTransfer | None = None

    def add(self, pieces: Sequence[Job]) -> None:
        """Note all pieces of some experts before they are queued: from here on they are waiting, or cancelled."""
        for piece in pieces:
            self._pieces[piece.load.expert] = self._pieces.get(piece.load.expert, 0) + 1
        self._waiting.update(dict.fromkeys(pieces))

    @property
    def waiting(self) -> list[Job]:
        """The pieces that no thread has begun."""
        return list(self._waiting)

    def begin(self, piece: Job) -> bool:
        """Take a piece to read it; false if it was cancelled, or another thread has it."""
        self._reading[threading.get_ident()] = None  # before it stops waiting: at no time it is neither
        if self._waiting.pop(piece, _GONE) is _GONE:
            self.end()
            return False
        return True

    def piece_done(self, expert: int, error: BaseException | None = None) -> bool:
        """Count one piece and keep its error; true for the thread that brought the last."""
        with self._lock:
            self._pieces[expert] -= 1
            if error is not None:
                self._errors.setdefault(expert, error)
            return self._pieces[expert] == 0

    def error_of(self, expert: int) -> BaseException | None:
        """What went wrong with an expert, if anything."""
        return self._errors.get(expert)

    def complete(self, expert: int, error: BaseException | None = None) -> None:
        """Say that an expert is complete, or why it never will be."""
        if error is not None:
            self._errors.setdefault(expert, error)
        self.completed.put((expert, error))
        with self._lock:
            self._came.append((expert, error))
            if self._forward_to is not None:
                self._forward_to.completed.put((expert, error))

    def end(self) -> None:
        """Say that this thread does not write to a slot of this transfer any more."""
        self._reading.pop(threading.get_ident(), None)
        self._ended.put(None)

    def refuse(self, expert: int) -> None:
        """Say of an expert that has not arrived that it does not come; nothing of it is under way any more."""
        if all(came != expert for came, _ in self._came):
            self.complete(expert, HotsetError("a background read was cancelled: ask again"))

    @property
    def done(self) -> bool:
        """Whether nothing of this transfer is under way any more."""
        return not self._waiting and not self._reading

    def forward_to(self, other: ReadTransfer) -> None:
        """Let everything of this transfer, arrived already or not, arrive in another as well."""
        with self._lock:
            self._forward_to = other
            for came in self._came:
                other.completed.put(came)

    def wait_any(self) -> list[int]:
        """Wait for at least one expert and return all that have arrived; a failed load raises here."""
        arrived = [self._next()]
        while not self.completed.empty():
            arrived.append(self._next())
        return arrived

    def cancel(self) -> None:
        """Cancel what has not begun, queued or not; what is being read goes on to its end."""
        self.cancelled = True
        self._waiting.clear()

    def cancel_and_wait(self, timeout_s: float | None = None) -> None:
        """Cancel, and return once no thread writes to a slot of this transfer any more."""
        self.cancel()
        until_s = time.monotonic() + (CANCEL_TIMEOUT_S if timeout_s is None else timeout_s)
        while self._reading:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise StoreError("a reader thread does not answer: the disk hangs; check it, then try again")
            with suppress(Empty):
                self._ended.get(timeout=min(left_s, _LOOK_S))

    def _next(self) -> int:
        while True:
            with suppress(Empty):
                expert, error = self.completed.get(timeout=_WAIT_S)
                break
            if self.cancelled:
                raise StoreError("these loads were cancelled while they were waited for")
        if error is not None:
            if isinstance(error, HotsetError):
                raise error
            raise HotsetError(f"loading expert {expert} failed: {error!r}") from error
        return expert

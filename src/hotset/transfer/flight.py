"""The experts that one event waits for: they land one by one, and the first to land is computed first."""

from __future__ import annotations

import threading
from queue import SimpleQueue

from hotset.errors import HotsetError

PATIENCE_S = 60.0
"""How long a read may take once it was called off; a disk that is slower is taken for dead."""


class Flight:
    """Loads under way for one event."""

    def __init__(self) -> None:
        self.landed: SimpleQueue[tuple[int, BaseException | None]] = SimpleQueue()
        self.cancelled = False
        self._pieces: dict[int, int] = {}
        self._errors: dict[int, BaseException] = {}
        self._lock = threading.Lock()
        self._unlanded = 0
        self._came: list[tuple[int, BaseException | None]] = []
        self._next_flight: Flight | None = None
        self._all_landed = threading.Condition(self._lock)

    def board(self, expert: int, pieces: int) -> None:
        """Note that an expert is on its way in so many pieces."""
        with self._lock:
            self._pieces[expert] = pieces
            self._unlanded += 1

    def piece_done(self, expert: int, error: BaseException | None = None) -> bool:
        """Count one piece and keep its error; true for whoever brought the last, when nobody writes any more."""
        with self._lock:
            self._pieces[expert] -= 1
            if error is not None:
                self._errors.setdefault(expert, error)
            return self._pieces[expert] == 0

    def error_of(self, expert: int) -> BaseException | None:
        """What went wrong with an expert, if anything."""
        return self._errors.get(expert)

    def land(self, expert: int, error: BaseException | None = None) -> None:
        """Say that an expert is complete, or why it never will be."""
        self.landed.put((expert, error))
        with self._lock:
            self._came.append((expert, error))
            if self._next_flight is not None:
                self._next_flight.landed.put((expert, error))
            self._unlanded -= 1
            if not self._unlanded:
                self._all_landed.notify_all()

    def refuse(self, expert: int) -> None:
        """Say of an expert that was never sent for that it does not come; of others that is known."""
        if expert not in self._pieces:
            self.board(expert, 0)
            self.land(expert, HotsetError("a background read was cancelled: ask again"))

    @property
    def settled(self) -> bool:
        """Whether nothing of this flight is under way any more."""
        return not self._unlanded

    def join(self, other: Flight) -> None:
        """Let everything of this flight, landed already or not, land in another as well."""
        with self._lock:
            self._next_flight = other
            for came in self._came:
                other.landed.put(came)

    def take(self) -> list[int]:
        """Wait for at least one expert and return all that have landed; a failed load raises here."""
        arrived = [self._next()]
        while not self.landed.empty():
            arrived.append(self._next())
        return arrived

    def abandon(self) -> None:
        """Call off what has not begun, and return once nobody writes to a slot of this flight any more."""
        self.cancelled = True
        with self._all_landed:
            if not self._all_landed.wait_for(lambda: not self._unlanded, PATIENCE_S):
                raise HotsetError("a reader thread does not answer: load the model again")

    def _next(self) -> int:
        expert, error = self.landed.get()
        if error is not None:
            if isinstance(error, HotsetError):
                raise error
            raise HotsetError(f"loading expert {expert} failed: {error!r}") from error
        return expert

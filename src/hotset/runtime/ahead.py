"""Experts fetched before they are asked for: they wait in slots of their own, so a wrong guess evicts nobody."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hotset.shape import ExpertKey
from hotset.store import Catalog
from hotset.transfer import Flight, Readers
from hotset.transfer.readers import Load, Rank


@dataclass(slots=True)
class Guess:
    """One expert on its way, or arrived, in case it is asked for."""

    key: ExpertKey
    row: int
    flight: Flight
    size_bytes: int


@dataclass
class AheadCounts:
    """What came of the guesses, in experts and in bytes."""

    in_time: int = 0
    late: int = 0
    wasted: int = 0
    in_time_bytes: int = 0
    late_bytes: int = 0
    wasted_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All that was fetched on a guess."""
        return self.in_time_bytes + self.late_bytes + self.wasted_bytes


class AheadSlots:
    """A few rows of memory for guesses; whoever calls holds the engine's lock."""

    def __init__(self, rows: Sequence[int], catalog: Catalog, readers: Readers) -> None:
        self.catalog, self.readers = catalog, readers
        self.counts = AheadCounts()
        self.size = len(rows)
        self._free = list(rows)
        self._held: dict[ExpertKey, Guess] = {}
        self._draining: list[Guess] = []

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._held

    @property
    def room(self) -> int:
        """How many guesses could be sent now."""
        self._drain()
        return len(self._free)

    def send(self, keys: Iterable[ExpertKey]) -> int:
        """Fetch experts, in this order, as far as there are rows; returns how many are on their way."""
        sent = 0
        for key in keys:
            if key in self._held or not self.room:
                continue
            size = self.catalog.layers[key.layer].read_bytes(key.expert)
            guess = Guess(key, self._free.pop(), Flight(), size)
            self._held[key] = guess
            self.readers.start(guess.flight, [Load(key.layer, key.expert, guess.row)], Rank.GUESS)
            sent += 1
        return sent

    def claim(self, layer: int, missing: Iterable[int]) -> dict[int, Guess]:
        """The guesses for a layer that came true, to be taken over; all others for it are called off."""
        wanted = set(missing)
        mine = [guess for guess in self._held.values() if guess.key.layer == layer]
        claimed = {}
        for guess in mine:
            del self._held[guess.key]
            if guess.key.expert in wanted and not self._failed(guess):
                claimed[guess.key.expert] = guess
                self._count(guess)
            else:
                self._call_off(guess)
        return claimed

    def give(self, row: int) -> None:
        """Take a row back, or another in its place."""
        self._free.append(row)

    def clear(self) -> None:
        """Call everything off and wait until nobody writes to the rows any more."""
        for guess in tuple(self._held.values()):
            self._call_off(guess)
        self._held.clear()
        for guess in self._draining:
            guess.flight.abandon()
        self._drain()

    def _count(self, guess: Guess) -> None:
        if guess.flight.settled:
            self.counts.in_time += 1
            self.counts.in_time_bytes += guess.size_bytes
        else:
            self.counts.late += 1
            self.counts.late_bytes += guess.size_bytes
            self.readers.hurry(guess.flight)

    def _failed(self, guess: Guess) -> bool:
        """Whether a guess met a fault: demand reads it again, and says so if it meets it, too."""
        return guess.flight.settled and guess.flight.error_of(guess.key.expert) is not None

    def _call_off(self, guess: Guess) -> None:
        guess.flight.cancelled = True
        self.counts.wasted += 1
        self.counts.wasted_bytes += guess.size_bytes
        self._draining.append(guess)

    def _drain(self) -> None:
        """Take back the rows of guesses that were called off, once nobody writes to them."""
        settled = [guess for guess in self._draining if guess.flight.settled]
        if settled:
            self._draining = [guess for guess in self._draining if guess not in settled]
            self._free += [guess.row for guess in settled]

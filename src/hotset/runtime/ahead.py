"""Experts fetched before they are asked for: they wait in slots of their own, so a wrong guess evicts nobody."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from hotset.engine.slots import SlotCache
from hotset.shape import ExpertKey
from hotset.store import Catalog
from hotset.transfer import Flight, Readers
from hotset.transfer.readers import Load, Rank


class Journey(Protocol):
    """How an expert comes: from disk, or by a copy."""

    @property
    def settled(self) -> bool:
        """Whether nothing of it is under way any more."""

    def cancel(self) -> None:
        """Call it off, as far as it has not begun."""

    def abandon(self) -> None:
        """Call it off, and return once nothing is written any more."""


J = TypeVar("J", bound=Journey)


@dataclass(slots=True)
class Guess(Generic[J]):
    """One expert on its way, or arrived, in case it is asked for."""

    key: ExpertKey
    row: int
    flight: J
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


class AheadSlots(ABC, Generic[J]):
    """A few rows of memory for guesses; whoever calls holds the engine's lock."""

    def __init__(self, cache: SlotCache) -> None:
        self.counts = AheadCounts()
        self.size = len(cache.prefetch_rows)
        self._cache = cache
        self._held: dict[ExpertKey, Guess[J]] = {}
        self._draining: list[Guess[J]] = []

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._held

    @property
    def room(self) -> int:
        """How many guesses could be sent now."""
        self._drain()
        return len(self._cache.prefetch_rows)

    def send(self, keys: Iterable[ExpertKey]) -> int:
        """Fetch experts, in this order, as far as there are rows; returns how many are on their way."""
        sent = 0
        for key in keys:
            if key in self._held or not self.room:
                continue
            row = self._cache.take_row()
            guess = None if row is None else self.prepare(key, row)
            if guess is not None:
                self._held[key] = guess
                self.depart(guess)
                sent += 1
            elif row is not None:
                self._cache.return_row(row)
        return sent

    @abstractmethod
    def prepare(self, key: ExpertKey, row: int) -> Guess[J] | None:
        """A guess that an expert will be asked for, to come to a row; None if it cannot come ahead."""

    @abstractmethod
    def depart(self, guess: Guess[J]) -> None:
        """Put a guess on its way."""

    def hurry(self, guess: Guess[J]) -> None:
        """Say that somebody waits for a guess now."""

    def claim(self, layer: int, missing: Iterable[int]) -> dict[int, Guess[J]]:
        """The guesses for a layer that came true, to be taken over; all others for it are called off."""
        wanted = set(missing)
        mine = [guess for guess in self._held.values() if guess.key.layer == layer]
        claimed = {}
        for guess in mine:
            del self._held[guess.key]
            if guess.key.expert in wanted and not self.failed(guess):
                claimed[guess.key.expert] = guess
                self._count(guess)
            else:
                self._call_off(guess)
        return claimed

    def clear(self) -> None:
        """Call everything off and wait until nobody writes to the rows any more."""
        for guess in tuple(self._held.values()):
            self._call_off(guess)
        self._held.clear()
        for guess in self._draining:
            guess.flight.abandon()
        self._drain()

    def reset(self) -> None:
        """Forget all guesses: for after an interrupt, once nothing is written to rows any more; the cache has them."""
        while self._held:
            self._call_off(self._held.popitem()[1])
        self._draining = []

    def _count(self, guess: Guess[J]) -> None:
        if guess.flight.settled:
            self.counts.in_time += 1
            self.counts.in_time_bytes += guess.size_bytes
        else:
            self.counts.late += 1
            self.counts.late_bytes += guess.size_bytes
            self.hurry(guess)

    def failed(self, guess: Guess[J]) -> bool:  # noqa: ARG002 - copies in memory do not fail
        """Whether a guess met a fault: demand fetches it again, and says so if it meets it, too."""
        return False

    def _call_off(self, guess: Guess[J]) -> None:
        guess.flight.cancel()
        self.counts.wasted += 1
        self.counts.wasted_bytes += guess.size_bytes
        self._draining.append(guess)

    def _drain(self) -> None:
        """Take back the rows of guesses that were called off, once nobody writes to them."""
        settled = [guess for guess in self._draining if guess.flight.settled]
        if settled:
            self._draining = [guess for guess in self._draining if guess not in settled]
            for guess in settled:
                self._cache.return_row(guess.row)


class AheadOfDisk(AheadSlots[Flight]):
    """Guesses that reader threads bring from disk."""

    def __init__(self, cache: SlotCache, catalog: Catalog, readers: Readers) -> None:
        super().__init__(cache)
        self.catalog, self.readers = catalog, readers

    def prepare(self, key: ExpertKey, row: int) -> Guess[Flight]:
        """A guess that is read from disk; every expert can be."""
        return Guess(key, row, Flight(), self.catalog.layers[key.layer].read_bytes(key.expert))

    def depart(self, guess: Guess[Flight]) -> None:
        """Queue an expert behind all that an event waits for."""
        self.readers.start(guess.flight, [Load(guess.key.layer, guess.key.expert, guess.row)], Rank.GUESS)

    def hurry(self, guess: Guess[Flight]) -> None:
        """Move a guess among what somebody waits for."""
        self.readers.hurry(guess.flight)

    def failed(self, guess: Guess[Flight]) -> bool:
        """Whether a guess met a fault."""
        return guess.flight.settled and guess.flight.error_of(guess.key.expert) is not None

"""What the cache did, counted per phase and layer; hits and misses always add up to what was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.trace import Phase


class Count(IntEnum):
    """The counters, by their place in the array."""

    EVENTS = 0
    TOKENS = 1
    HITS = 2
    MISSES = 3
    ADMITTED = 4
    EVICTED = 5
    STAGED = 6


@dataclass(frozen=True, eq=False)
class Counters:
    """A copy of the counters, of shape (phases, counters, layers)."""

    array: npt.NDArray[np.int64]

    @staticmethod
    def empty(layers: int) -> npt.NDArray[np.int64]:
        """Counters of a cache that has served nothing."""
        return np.zeros((len(Phase), len(Count), layers), np.int64)

    def total(self, count: Count, phase: Phase | None = None) -> int:
        """One counter, summed over layers, and over phases unless one is named."""
        chosen = self.array if phase is None else self.array[phase : phase + 1]
        return int(chosen[:, count].sum())

    def hit_rate(self, phase: Phase | None = None) -> float:
        """Hits over experts asked for; not a number if nothing was."""
        hits = self.total(Count.HITS, phase)
        asked = hits + self.total(Count.MISSES, phase)
        return hits / asked if asked else float("nan")

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(self.array - earlier.array)

    def as_dict(self, phase: Phase | None = None) -> dict[str, Any]:
        """All counters by name, with the hit rate."""
        counts: dict[str, Any] = {count.name.lower(): self.total(count, phase) for count in Count}
        return counts | {"hit_rate": self.hit_rate(phase)}

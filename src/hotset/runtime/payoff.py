"""Whether fetching ahead pays: a few tokens go without, and layers where that is no slower go without from then on."""

from __future__ import annotations

from typing import Any

import numpy as np

CONTROL = 16
"""One decode pass in so many goes without guesses, to compare with."""
FRESH = 0.1  # the weight of the newest measurement
FEW = 6  # control passes before anything is decided
PAUSE = 256  # passes that a layer goes without before it is tried again


class Payoff:
    """Keeps, for each layer, how long events stall with guesses and without, and how many guesses arrive in time."""

    def __init__(self, layers: int, *, auto: bool = True, most: int = 64) -> None:
        self.auto = auto
        self._most = np.full(layers, min(4, most))
        self._limit = most
        self._stall_s = np.zeros((2, layers))  # with guesses, without
        self._seen = np.zeros((2, layers), np.int64)
        self._off_until = np.zeros(layers, np.int64)

    def is_control(self, number: int) -> bool:
        """Whether the pass of this number goes without guesses."""
        return self.auto and number % CONTROL == 0

    def most(self, layer: int, number: int) -> int:
        """How many experts of a layer to send for in the pass of this number."""
        if self.is_control(number) or (self.auto and self._off_until[layer] > number):
            return 0
        return int(self._most[layer])

    def note(self, layer: int, number: int, stall_s: float, in_time: int, late: int) -> None:
        """Take in how an event went: how long it stalled, and what of its guesses came in time or late."""
        kind = int(self.is_control(number) or self._off_until[layer] > number)
        first = self._seen[kind, layer] == 0
        self._stall_s[kind, layer] += (1.0 if first else FRESH) * (stall_s - self._stall_s[kind, layer])
        self._seen[kind, layer] += 1
        if late > in_time:
            self._most[layer] = max(1, self._most[layer] - 1)
        elif in_time and not late:
            self._most[layer] = min(self._limit, self._most[layer] + 1)
        if self.auto and kind == 1 and self._seen[1, layer] >= FEW:
            self._decide(layer, number)

    def _decide(self, layer: int, number: int) -> None:
        if self._off_until[layer] <= number and self._stall_s[0, layer] >= self._stall_s[1, layer]:
            self._off_until[layer] = number + PAUSE
            self._seen[:, layer] = 0

    def as_dict(self) -> dict[str, Any]:
        """What was decided, and on what evidence."""
        off = self._off_until > 0
        return {
            "auto": self.auto,
            "layers_switched_off": np.flatnonzero(off).tolist(),
            "stall_ms_with": (1e3 * self._stall_s[0]).round(4).tolist(),
            "stall_ms_without": (1e3 * self._stall_s[1]).round(4).tolist(),
            "most": self._most.tolist(),
        }

"""Times of passes with what each owes to its own misses taken out, so that passes of different tokens can be compared.

What a pass misses does not depend on whether guesses were sent: they evict nobody. So whatever is taken out in
proportion to the misses favours neither side, and what is left says sooner whether guesses pay.
"""

from __future__ import annotations

FRESH = 1.0 / 64  # the least weight of the newest pass
FEW = 8  # passes before a proportion is believed


class EvenTimes:
    """Learns how much longer a pass takes for every expert that it misses."""

    def __init__(self) -> None:
        self._seen = 0
        self._missed = self._seconds = self._spread = self._both = 0.0

    def __call__(self, seconds: float, missed: int) -> float | None:
        """How long a pass would have taken with the misses of a usual one; None while little is known."""
        self._seen += 1
        fresh = max(FRESH, 1.0 / self._seen)
        off, off_s = missed - self._missed, seconds - self._seconds
        self._missed += fresh * off
        self._seconds += fresh * off_s
        self._spread = (1.0 - fresh) * (self._spread + fresh * off * off)
        self._both = (1.0 - fresh) * (self._both + fresh * off * off_s)
        if self._seen <= FEW:
            return None
        return seconds - self.seconds_per_miss * (missed - self._missed)

    @property
    def seconds_per_miss(self) -> float:
        """What one more miss costs."""
        return max(self._both / self._spread, 0.0) if self._spread > 0.0 else 0.0

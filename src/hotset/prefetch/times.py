"""Times of steps with what each owes to its own misses taken out, so that steps of different tokens can be compared.

What a step misses does not depend on whether anything was prefetched: that evicts no expert. So what is taken out in
proportion to the misses favours neither side, and what is left says sooner whether prefetch pays.
"""

from __future__ import annotations

from math import isnan, nan
from typing import Any

import numpy as np

from hotset.policies.base import compiled, entry_of

MIN_WEIGHT = 1.0 / 64  # of the newest step
MIN_STEPS = 8  # before a proportion is believed
SEEN, MISSED, SECONDS, SPREAD, BOTH = range(5)


def start_times() -> Any:
    """Nothing is known yet: float64 [5]."""
    return np.zeros(5)


@compiled
def adjusted(times: Any, seconds: float, missed: int) -> float:
    """How long a step would have taken with the misses of a usual one; not a number while little is known."""
    times[SEEN] += 1.0
    fresh = max(MIN_WEIGHT, 1.0 / times[SEEN])
    off, off_s = missed - times[MISSED], seconds - times[SECONDS]
    times[MISSED] += fresh * off
    times[SECONDS] += fresh * off_s
    times[SPREAD] = (1.0 - fresh) * (times[SPREAD] + fresh * off * off)
    times[BOTH] = (1.0 - fresh) * (times[BOTH] + fresh * off * off_s)
    if times[SEEN] <= MIN_STEPS:
        return nan
    return float(seconds - seconds_per_miss(times) * (missed - times[MISSED]))


@compiled
def seconds_per_miss(times: Any) -> float:
    """What one more miss costs."""
    return max(times[BOTH] / times[SPREAD], 0.0) if times[SPREAD] > 0.0 else 0.0


_adjusted_now = entry_of(adjusted)


class MissAdjustedTimes:
    """Learns how much longer a step takes for every expert that it misses."""

    def __init__(self) -> None:
        self.state = start_times()

    def __call__(self, seconds: float, missed: int) -> float | None:
        """How long a step would have taken with the misses of a usual one; None while little is known."""
        found = _adjusted_now(self.state, seconds, missed)
        return None if isnan(found) else found

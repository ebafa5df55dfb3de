"""One line of a comparison: the schema that tables, JSON and plots share."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class Row:
    """One policy at one budget on one trace; rates are fractions, absent figures are None."""

    trace: str
    policy: str
    scope: str
    streams: int
    budget: str
    budget_slots: int
    budget_fraction: float
    budget_cycles: float  # in experts that one token uses: layers x top_k
    staging_slots: int
    phase: str
    start: str
    hit_rate: float
    misses_per_token: float
    bytes_per_token: float | None
    gap_closed: float | None  # of the way from lru to belady
    evictions: int
    hits: int
    misses: int
    staged: int
    events: int
    tokens: int
    cold_hit_rate: float | None = None  # of a warm row: the same requests from a cold start
    stall_s_per_token: float | None = None
    time_s_per_token: float | None = None
    tokens_per_s: float | None = None
    prefetch: str | None = None  # the forecast that predicted
    driver: str | None = None  # whose rules prefetch followed
    prefetch_slots: int | None = None  # beside the cache
    in_time: int | None = None  # experts that came before they were asked for
    late: int | None = None
    wasted: int | None = None
    wasted_bytes_per_token: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The row as plain values, for JSON."""
        return asdict(self)

    @property
    def ahead_slots(self) -> int | None:
        """What `prefetch_slots` was called before."""
        warnings.warn("ahead_slots is deprecated: use prefetch_slots", DeprecationWarning, stacklevel=2)
        return self.prefetch_slots

    @property
    def setting(self) -> tuple[str, int, str, str]:
        """What rows must share to be compared."""
        return (self.trace, self.budget_slots, self.phase, self.start)

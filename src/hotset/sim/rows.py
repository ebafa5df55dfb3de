"""One line of a comparison: the schema that tables, JSON and plots share."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from hotset.checks import renamed

_ROUNDING = 1e-9
"""The relative error of a sum of so many events' times."""


@dataclass(frozen=True, slots=True)
class Times:
    """What a modelled link makes of one token; the bound is known once the optimum of the setting is."""

    stall_s_per_token: float
    time_s_per_token: float
    tokens_per_s: float
    bound_s_per_token: float | None = None  # no policy and no prefetch needs less
    bound_share: float | None = None  # of the time: 1 is as fast as possible

    def with_bound(self, bound_s_per_token: float) -> Times:
        """The same beside the least time; only what rounding alone lifts above it is set to 1."""
        share = bound_s_per_token / self.time_s_per_token
        share = 1.0 if 1 < share <= 1 + _ROUNDING else share
        return replace(self, bound_s_per_token=bound_s_per_token, bound_share=share)


@dataclass(frozen=True, slots=True)
class Prefetched:
    """What prefetch over a modelled link did."""

    prefetch: str  # the forecast that predicted
    driver: str  # whose rules prefetch followed
    prefetch_slots: int  # beside the cache
    in_time: int  # experts that came before they were asked for
    late: int
    wasted: int
    wasted_bytes_per_token: float


@renamed(ahead_slots="prefetch_slots")
@dataclass(slots=True)
class Row:
    """One policy at one budget on one trace; rates are fractions, absent figures are None.

    The figures of `times` and `prefetched` are read like its own.
    """

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
    times: Times | None = None
    prefetched: Prefetched | None = None

    def __getattr__(self, name: str) -> Any:
        for part, kind in PARTS.items():
            if name in kind.__slots__:
                return getattr(getattr(self, part), name, None)
        raise AttributeError(f"a row has no {name!r}")

    def as_dict(self) -> dict[str, Any]:
        """The row as plain values, for JSON; its parts lie beside its own figures."""
        return {name: getattr(self, name) for name in FIELDS}


PARTS: dict[str, Any] = {"times": Times, "prefetched": Prefetched}
FIELDS = [field.name for kind in (Row, *PARTS.values()) for field in fields(kind) if field.name not in PARTS]
"""All figures of a row, in the order in which they are written."""

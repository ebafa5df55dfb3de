"""How figures and settings are written, alike in tables, advice and plots."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hotset.shape import format_size
from hotset.text import printable

if TYPE_CHECKING:
    from hotset.sim import Row

LRU, BOUND = "lru", "belady"

_SCOPES = {"layer": "slots per layer", "pool": "one pool of slots"}


def percent(share: float, digits: int = 1) -> str:
    """A fraction as a percentage, never as minus zero."""
    return f"{round(100 * share, digits) + 0.0:.{digits}f} %"


def plural(count: int, noun: str) -> str:
    """A count with its noun, as in "1 stream" and "20,000 tokens"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def label_of(policy: str) -> str:
    """A policy's name in tables and plots."""
    return f"{BOUND} (bound)" if policy == BOUND else printable(policy)


def setting(row: Row) -> str:
    """The conditions of a row: scope, streams, and staging where there is any."""
    words = [_SCOPES.get(row.scope, row.scope), plural(row.streams, "stream")]
    if row.staging_slots:
        words.append(plural(row.staging_slots, "staging slot"))
    return ", ".join(words)


def expert_bytes(rows: Iterable[Row]) -> float | None:
    """The size of one expert, which a row with misses gives away; None where it is not known."""
    for row in rows:
        if row.bytes_per_token and row.misses_per_token:
            return row.bytes_per_token / row.misses_per_token
    return None


def memory(row: Row, size: float | None) -> list[str]:
    """A budget in every unit, the one it was asked for in first."""
    units = [plural(row.budget_slots, "slot"), percent(row.budget_fraction), f"{row.budget_cycles:.1f} cycles"]
    if size:
        units.append(format_size(row.budget_slots * size))
    asked = printable(row.budget).replace("%", " %")
    unit = asked.split()[-1]
    return [asked, *(text for text in units if not text.endswith(unit))]

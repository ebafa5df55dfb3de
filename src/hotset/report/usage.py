"""How experts were used, as figures and as tables that fit 80 columns: of a profile, or of a model that runs."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from rich.table import Table

from hotset.profile.statistics import NEVER, Statistics
from hotset.report.tables import Column, add_columns, cell, frame
from hotset.report.words import percent
from hotset.shape import format_size
from hotset.trace import Phase
from hotset.trace.summary import entropy

SHARES = (0.125, 0.25, 0.5)
"""The shares of the experts of a layer whose part of all uses is told."""
_SUMS = ("resident", "pinned", "loads", "loaded_bytes")


def totals(statistics: Statistics) -> dict[str, Any]:
    """Everything added up: by phase, and what was moved."""
    return {
        "phases": {phase.name.lower(): _phase(statistics, phase) for phase in Phase},
        "hit_rate": _rate(int(statistics.hits.sum()), int(statistics.misses.sum())),
        **{name: int(getattr(statistics, name).sum()) for name in _SUMS},
        "experts": statistics.shape.total_experts,
    }


def concentration(statistics: Statistics) -> dict[str, float | None]:
    """The part of a layer's uses that its hottest experts take, on average over the layers that were used."""
    used = statistics.uses.sum(axis=(0, 2)) > 0
    return {
        f"{share:.1%}": float(statistics.covered_by(share)[used].mean()) if used.any() else None for share in SHARES
    }


def layer_figures(statistics: Statistics, layers: Sequence[int], top: int) -> list[dict[str, Any]]:
    """Each layer in numbers, with all that is known of its hottest experts."""
    rates, evenness = statistics.layer_hit_rates(), entropy(statistics.uses.sum(axis=0))
    covered = {f"{share:.1%}": statistics.covered_by(share) for share in SHARES}
    return [
        {
            "layer": layer,
            "hit_rate": _known(rates[layer]),
            "entropy": _known(evenness[layer]),
            "concentration": {name: float(parts[layer]) for name, parts in covered.items()},
            **{name: int(getattr(statistics, name)[layer].sum()) for name in _SUMS},
            "top": statistics.top(layer, top),
        }
        for layer in layers
    ]


def phase_table(statistics: Statistics) -> Table:
    """Tokens, uses, hits and misses of each phase."""
    rows = [{"phase": name} | figures for name, figures in totals(statistics)["phases"].items()]
    return _table("by phase", _PHASE_COLUMNS, rows)


def layer_table(statistics: Statistics, top: int = 3) -> Table:
    """One line per layer: its hit rate in decode, how concentrated its use is, and its hottest experts."""
    rows = layer_figures(statistics, range(statistics.shape.layers), top)
    return _table("by layer", _LAYER_COLUMNS, rows)


def expert_table(statistics: Statistics, layer: int, top: int = 10) -> Table:
    """The hottest experts of a layer, with all that is known of each."""
    return _table(f"layer {layer}", _COLUMNS, [_expert(row) for row in statistics.top(layer, top)])


def count(value: float) -> str:
    """A count in at most six letters, as in 950, 12.3k and 4.56M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size and value >= 10_000:
            return f"{value / size:.3g}{unit}" if value < 999.5 * size else f"{value / size:.0f}{unit}"
    return f"{value:.0f}"


def _whole(value: float) -> str:
    """All digits, as long as a table has room for them."""
    return f"{value:,.0f}" if value < 1e9 else count(value)


def _hottest(rows: list[dict[str, Any]]) -> str:
    return ", ".join(f"{row['expert']} ({row['rate']:.2f})" for row in rows if row["rate"] > 0) or "none used"


_PHASE_COLUMNS = (
    Column("phase", itemgetter("phase"), always=True, left=True),
    *(Column(key, itemgetter(key), _whole, always=True) for key in ("tokens", "uses", "hits", "misses")),
    Column("hit rate", lambda row: row["hit_rate"], percent, always=True),
)
_LAYER_COLUMNS = (
    Column("layer", lambda row: row["layer"], str, always=True),
    Column("hit\nrate", lambda row: row["hit_rate"], percent, nothing=None),
    Column("top 25 %\ntake", lambda row: row["concentration"]["25.0%"], percent, always=True),
    Column("resident\n(pinned)", lambda row: f"{row['resident']} ({row['pinned']})", nothing="0 (0)"),
    Column("loaded", lambda row: row["loaded_bytes"], format_size, nothing=0),
    Column("hottest experts\n(uses per token)", lambda row: row["top"], _hottest, always=True, left=True),
)
_COLUMNS = (
    Column("expert", lambda row: row["expert"], str, always=True),
    Column("uses\n/token", lambda row: row["rate"], lambda rate: f"{rate:.3f}", always=True),
    Column("uses", lambda row: row["uses"], count, always=True),
    Column("hits", lambda row: row["hits"], count, nothing=0),
    Column("misses", lambda row: row["misses"], count, nothing=0),
    Column("hit\nrate", lambda row: row["hit_rate"], percent, nothing=None),
    Column("loads", lambda row: row["loads"], count, nothing=0),
    Column("loaded", lambda row: row["loaded_bytes"], format_size, nothing=0),
    Column("uses in\nwindow", lambda row: row["window"], count, nothing=0),
    Column("tokens\nago", lambda row: row["age"], count, nothing=NEVER),
    Column("where", itemgetter("where"), left=True, nothing="-"),
)


def _expert(row: dict[str, Any]) -> dict[str, Any]:
    """The phases of an expert added up, and where it is."""
    sums = {key: row["prefill"][key] + row["decode"][key] for key in ("uses", "hits", "misses")}
    where = "pinned" if row["pinned"] else "resident" if row["resident"] else "-"
    return row | sums | {"hit_rate": _rate(sums["hits"], sums["misses"]), "where": where}


def _phase(statistics: Statistics, phase: Phase) -> dict[str, Any]:
    hits, misses = int(statistics.hits[phase].sum()), int(statistics.misses[phase].sum())
    return {
        "tokens": int(statistics.tokens[phase]),
        "uses": float(statistics.uses[phase].sum()),
        "hits": hits,
        "misses": misses,
        "hit_rate": _rate(hits, misses),
    }


def _rate(hits: int, misses: int) -> float | None:
    return hits / (hits + misses) if hits + misses else None


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _table(title: str, columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> Table:
    table = frame(title, padding=0)
    shown = add_columns(table, columns, rows)
    for row in rows:
        table.add_row(*(cell(column, row) for column in shown))
    return table

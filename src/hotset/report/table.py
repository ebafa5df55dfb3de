"""The rows of a comparison as tables for people, on a terminal and in a pipe."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, cast

from rich.table import Table
from rich.text import Text

from hotset.report.tables import Column, add_columns, cell, frame
from hotset.report.words import BOUND, expert_bytes, label_of, memory, percent, plural, setting
from hotset.shape import format_size
from hotset.text import printable

if TYPE_CHECKING:
    from hotset.sim import Result, Row

LEGEND = (
    "* best causal policy of its budget; belady knows the future and is the bound; gap closed: of the way "
    "from lru to belady; a cycle: the experts that one token uses, layers x top_k"
)
TIMED_LEGEND = (
    "time bound: no policy and no prefetch needs less per token over this link; of time bound: its share of the "
    "row's time"
)


def _evicted_per_token(row: Row) -> float | None:
    """Left out beside times, for want of room: evictions move no bytes."""
    return None if row.times else row.evictions / row.tokens


_COLUMNS = (
    Column("hit\nrate", lambda row: row.hit_rate, percent),
    Column("cold, same\nrequests", lambda row: row.cold_hit_rate, percent),
    Column("gap\nclosed", lambda row: row.gap_closed, lambda share: percent(share, 0)),
    Column("misses\n/token", lambda row: row.misses_per_token, lambda count: f"{count:,.2f}"),
    Column("bytes\n/token", lambda row: row.bytes_per_token, format_size),
    Column("evicted\n/token", _evicted_per_token, lambda count: f"{count:,.2f}"),
    Column("stall\nms/token", lambda row: row.stall_s_per_token, lambda time: f"{1000 * time:,.2f}"),
    Column("tokens\n/s", lambda row: row.tokens_per_s, lambda speed: f"{speed:,.1f}"),
    Column("of time\nbound", lambda row: row.bound_share, lambda share: percent(share, 0)),
)


def comparison_tables(result: Result) -> list[Table]:
    """One table per trace, phase and start, with a section per budget and the bound last in each."""
    sizes = {rows[0].trace: expert_bytes(rows) for rows in _group(result.rows, lambda row: row.trace)}
    groups = _group(result.rows, lambda row: (row.trace, row.phase, row.start, row.scope, row.streams))
    tables = [_table(rows, sizes[rows[0].trace]) for rows in groups]
    if tables:
        legend = f"{LEGEND}; {TIMED_LEGEND}" if any(map(_time_bound, result.rows)) else LEGEND
        tables[-1].caption = Text(f"\n{legend}\n", style="dim")  # once is enough
    for table in tables[1:]:
        table.title = Text("\n").append_text(cast(Text, table.title))  # a line of air between tables
    return tables


def _group(rows: Iterable[Row], key: Callable[[Row], Hashable]) -> list[list[Row]]:
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def _table(rows: list[Row], size: float | None) -> Table:
    row = rows[0]
    tokens = plural(row.tokens, "token") + (" of requests not seen before" if row.start == "warm" else "")
    table = frame(f"{printable(row.trace)}: {row.phase} from a {row.start} start\n{tokens}, {setting(row)}")
    table.add_column("memory,\ntime bound" if _time_bound(row) else "\nmemory", style="dim", no_wrap=True)
    table.add_column("\npolicy", overflow="fold")
    columns = add_columns(table, _COLUMNS, rows)
    for section in _group(rows, lambda row: (row.budget_slots, row.budget)):
        _add_section(table, section, columns, size)
    return table


def _time_bound(row: Row) -> list[str]:
    """The least time of a setting, for the line below its memory."""
    return [] if row.bound_s_per_token is None else [f"{1000 * row.bound_s_per_token:,.2f} ms"]


def _add_section(table: Table, rows: list[Row], columns: Sequence[Column], size: float | None) -> None:
    """The budget, and the time bound with it, are spelled out down the first column, beside the policies."""
    ordered = sorted(rows, key=lambda row: row.policy == BOUND)
    rates = {row.hit_rate for row in rows if row.policy != BOUND}
    best = max(rates) if len(rates) > 1 else None  # where all are equal, none is best
    for unit, row in zip_longest([*memory(rows[0], size), *_time_bound(rows[0])], ordered):
        if row is None:
            table.add_row(unit)
            continue
        cells = [cell(column, row) for column in columns]
        name = Text(label_of(row.policy) + (" *" if row.policy != BOUND and row.hit_rate == best else ""))
        style = "italic cyan" if row.policy == BOUND else "bold" if row.hit_rate == best else ""
        table.add_row(unit, name, *cells, style=style)
    table.add_section()

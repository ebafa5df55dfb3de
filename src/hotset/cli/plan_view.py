"""A plan as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from hotset.shape import format_size
from hotset.text import printable

if TYPE_CHECKING:
    from hotset.analysis.planner.planning import PlanRow, TargetRow

_ENGINES = {"cpu": "the CPU computes", "device": "the GPU drives itself", "host": "the host drives the GPU"}


def plan_table(rows: Sequence[PlanRow], title: str, more_bytes: int, prompt_tokens: int, *, gpu: bool) -> Table:
    """One line for each precision."""
    table = Table(title=printable(title), title_justify="left")
    table.add_column("experts in")
    names = ["GPU" if gpu else "RAM", *(["RAM"] if gpu else []), "disk", "resident", "policy", "hits", "tokens/s"]
    names += [f"+{format_size(more_bytes)}", f"first of {prompt_tokens:,}", "bound"]
    for name in names:
        table.add_column(name, justify="right")
    best = max(rows, key=lambda row: row.tokens_per_s)
    for row in rows:
        sizes = [row.fast_bytes, *([row.ram_bytes] if gpu else []), row.disk_bytes]
        table.add_row(
            row.precision,
            *(_size(size) for size in sizes),
            f"{100 * row.resident:.0f} %",
            row.policy,
            f"{100 * row.hit_rate:.1f} %",
            f"{_speed(row.tokens_per_s)} ({_speed(row.low_tokens_per_s)} to {_speed(row.high_tokens_per_s)})",
            f"{100 * row.more_share:+.0f} %" if row.more_share >= 0.005 else "0 %",
            _seconds(row.prompt_s),
            f"{100 * row.bound_hit_rate:.1f} %, {_speed(row.bound_tokens_per_s)}/s",
            style="bold" if row is best and len(rows) > 1 else None,
        )
    return table


def target_table(rows: Sequence[TargetRow], memory: str) -> Table:
    """The least memory of each precision."""
    table = Table()
    table.add_column("experts in")
    for name in (f"least {memory}", "resident", "tokens/s"):
        table.add_column(name, justify="right")
    for row in rows:
        if row.memory_bytes is None:
            table.add_row(row.precision, "none", "", f"{_speed(row.tokens_per_s)} with all resident")
        else:
            table.add_row(
                row.precision,
                format_size(row.memory_bytes),
                f"{100 * (row.resident or 0):.0f} %",
                _speed(row.tokens_per_s),
            )
    return table


def commands_view(rows: Sequence[PlanRow | TargetRow]) -> list[Text]:
    """What to type for each precision."""
    lines = [Text("To run it:", style="bold")]
    for row in rows:
        if row.commands:
            lines.append(Text(f"  # {row.precision}{' (lossy)' if row.lossy else ''}", style="dim"))
            lines += [Text(f"  {printable(line)}", no_wrap=True, overflow="ignore") for line in row.commands]
    return lines if len(lines) > 1 else []


def facts_line(rows: Sequence[PlanRow], source: str) -> str:
    """Where everything else lies, what computes, and by which rates."""
    rest = f"{format_size(rows[0].rest_bytes)} for everything but experts"
    unused = sorted(max(row.unused_bytes, 0) for row in rows)
    sizes = dict.fromkeys((format_size(unused[0]), format_size(unused[-1])))
    return f"{rest}, {' to '.join(sizes)} unused; {_engines(rows)}; rates: {source}"


def _engines(rows: Sequence[PlanRow]) -> str:
    """What computes: by precision where they differ."""
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(row.engine, []).append(row.precision)
    if len(names) == 1:
        return _ENGINES[rows[0].engine]
    return ", ".join(f"{_ENGINES[engine]} ({', '.join(own)})" for engine, own in names.items())


def _size(size_bytes: int) -> str:
    return format_size(size_bytes) if size_bytes else "-"


def _speed(tokens_per_s: float) -> str:
    if tokens_per_s < 0.995:
        return f"{tokens_per_s:.2g}"
    return f"{tokens_per_s:.1f}" if tokens_per_s < 99.95 else f"{tokens_per_s:.0f}"


def _seconds(seconds: float) -> str:
    if seconds < 0.9995:
        return f"{1e3 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 999.95 else f"{seconds:,.0f} s"

"""What all tables have in common: their frame, and columns that are left out where nothing is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text


class Column(NamedTuple):
    """One figure of every row: its header, where it comes from, and how it is written."""

    header: str
    value: Callable[[Any], Any]
    write: Callable[[Any], str] = str
    always: bool = False
    left: bool = False
    nothing: Any = None  # a column that has only this, or None, is left out


def frame(title: str | Text, padding: int = 1) -> Table:
    """An empty table without edges."""
    return Table(
        title=title if isinstance(title, Text) else Text(title, style="bold"), title_justify="left",
        caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, padding), collapse_padding=True, pad_edge=False,
        show_edge=False,
    )  # fmt: skip


def add_columns(table: Table, columns: Iterable[Column], rows: Sequence[Any]) -> list[Column]:
    """Head a table with those columns of which something is known; returns them."""
    shown = [c for c in columns if c.always or any(c.value(row) not in (None, c.nothing) for row in rows)]
    for column in shown:
        table.add_column(column.header, justify="left" if column.left else "right", no_wrap=not column.left)
    return shown


def cell(column: Column, row: Any) -> str:
    """A figure as text; what is not known is a dash."""
    return dash(column.value(row), column.write)


def dash(value: Any, write: Callable[[Any], str] = str) -> str:
    """A figure as text; what is not known is a dash."""
    return "-" if value is None else write(value)

"""What a study found, as a table for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from hotset.report.tables import dash, frame
from hotset.report.words import percent
from hotset.shape import format_size
from hotset.text import printable

if TYPE_CHECKING:
    from hotset.sim.studies import StudyResult

WRITERS: dict[str, Callable[[Any], str]] = {
    "text": lambda value: printable(str(value)),
    "share": percent,
    "points": lambda value: f"{value:.1f}",
    "count": lambda value: f"{value:,}",
    "us": lambda value: f"{value:.2f}",
    "ms": lambda value: f"{value:,.2f}",
    "speed": lambda value: f"{value:,.1f}",
    "bytes": format_size,
}
"""How each kind of figure is written."""


def study_table(result: StudyResult) -> Table:
    """All rows of a study, under its question and what it ran on."""
    study = result.study
    about = "\n".join([study.question, *(f"on {printable(text)}" for text in result.ran_on), f"split: {study.split}"])
    table = frame(Text(f"{study.title}\n", style="bold").append(about + "\n", style="not bold"))
    for column in study.columns:
        table.add_column(column.header, justify="left" if column.kind == "text" else "right")
    first, before = study.columns[0].key, None
    for row in result.rows:
        if before is not None and row[first] != before:
            table.add_section()
        table.add_row(*(dash(row[column.key], WRITERS[column.kind]) for column in study.columns))
        before = row[first]
    return table

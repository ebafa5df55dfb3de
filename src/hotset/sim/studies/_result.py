"""What a study is and what it finds: one schema that the table, JSON and the plot share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from hotset.trace import Trace

Row = dict[str, Any]
Job = Callable[[], list[Row]]
Kind = Literal["text", "share", "points", "count", "us", "ms", "speed", "bytes"]


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a row: its key, how a table calls it, and what kind of number it is."""

    key: str
    header: str
    kind: Kind = "text"


@dataclass(frozen=True, slots=True)
class Chart:
    """One panel of the plot: y over x, a line or a group of bars for each value of `by`."""

    x: str
    y: str
    by: str
    kind: Literal["line", "bars", "spans"] = "line"
    where: Mapping[str, Any] = field(default_factory=dict)  # only rows that have these values
    only: tuple[str, ...] = ()  # of `by`, what is drawn; none: all
    title: str = ""
    log_x: bool = False
    ends: tuple[str, str] | None = None  # of a span: where it begins and ends


@dataclass(frozen=True, slots=True)
class Plan:
    """What a study will do on the given traces: its jobs, and on what they run."""

    ran_on: list[str]
    jobs: Sequence[Job]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Study:
    """A question, and how replays answer it."""

    title: str
    question: str
    split: str
    columns: tuple[Column, ...]
    charts: tuple[Chart, ...]
    plan: Callable[[Mapping[str, Trace]], Plan]
    conclude: Callable[[list[Row]], tuple[list[Row], list[str]]]


@dataclass(frozen=True, slots=True)
class StudyResult:
    """What a study found, on what, and what a person should know about it."""

    title: str
    question: str
    ran_on: list[str]
    split: str
    columns: Sequence[Column]
    rows: list[Row]
    notes: list[str]
    charts: Sequence[Chart] = ()

    def as_dict(self) -> dict[str, Any]:
        """The result as plain values, for JSON; how it is drawn is left out."""
        document = asdict(self)
        del document["charts"]
        return document


def carry_out(study: Study, plan: Plan, advance: Callable[[], None] = lambda: None) -> StudyResult:
    """Run all jobs of a plan and draw the conclusions."""
    rows: list[Row] = []
    for job in plan.jobs:
        rows.extend(job())
        advance()
    rows, notes = study.conclude(rows)
    plain = [{key: _short(value) for key, value in row.items()} for row in rows]
    return StudyResult(
        study.title, study.question, plan.ran_on, study.split, study.columns, plain, [*notes, *plan.notes], study.charts
    )


def _short(value: Any) -> Any:
    """Six digits are more than any of these figures is worth."""
    return float(f"{value:.6g}") if isinstance(value, float) else value

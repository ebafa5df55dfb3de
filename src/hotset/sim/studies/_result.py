"""What a study is and what it finds: one schema that the table, JSON and the plot share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from hotset.sim.studies._runs import forecasts_for
from hotset.sim.studies._traces import NEW_TOKENS, SPLIT, Mix, mixes
from hotset.sim.sweep import NOTHING, Replays
from hotset.trace import Trace

Row = dict[str, Any]
Job = Callable[[], list[Row]]
Kind = Literal["text", "share", "points", "count", "us", "ms", "speed", "bytes"]

_KINDS: dict[Kind, str] = {
    "share": "hit_rate stall_saved faster faster_off recall precision share range left settled",
    "points": "hit_points first_gap",
    "count": "link_gb_per_s cached_slots prefetch_rows capacity held slots users default best least most not_recovered "
    "switches",
    "us": "match_us",
    "ms": "stall_ms base_stall_ms least_stall_ms most_stall_ms",
    "speed": "tokens_per_s mean",
    "bytes": "memory_bytes demand_bytes prefetched_bytes wasted_bytes loaded_bytes",
}
_HEADERS = {
    "link_gb_per_s": "link GB/s", "cached_slots": "slots", "memory_bytes": "memory", "stall_ms": "stall ms/token",
    "demand_bytes": "demand /token", "prefetched_bytes": "prefetched", "wasted_bytes": "wasted",
    "loaded_bytes": "loaded /token", "tokens_per_s": "tokens/s", "faster": "against demand only",
    "faster_off": "against off", "held": "held when judged", "recall": "recall @k, 1 ahead",
    "match_us": "match us/event", "by": "policy or forecast", "slots": "slots/layer", "share": "of layer",
    "base_stall_ms": "stall ms/token at default", "least_stall_ms": "least", "most_stall_ms": "most",
    "left": "default above best", "hit_points": "hit rate range, points", "what": "figure", "least": "min",
    "mean": "mean requests to recover", "most": "max", "not_recovered": "never",
    "first_gap": "gap at first, points", "settled": "never switched",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a row: its key, how a table calls it, and what kind of number it is."""

    key: str
    header: str
    kind: Kind = "text"


def columns(keys: str) -> tuple[Column, ...]:
    """The columns of these keys, by the one table of what each figure is called."""
    kinds: dict[str, Kind] = {key: kind for kind, own in _KINDS.items() for key in own.split()}
    return tuple(Column(k, _HEADERS.get(k, k.replace("_", " ")), kinds.get(k, "text")) for k in keys.split())


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
    """A question, and how replays answer it: jobs for each model among the traces, and what is concluded.

    `conclude` may complete the rows and put them in order; `plan_of` is for studies that mix no requests.
    """

    title: str
    question: str
    columns: tuple[Column, ...]
    charts: tuple[Chart, ...]
    conclude: Callable[[list[Row]], list[str]]
    jobs: Callable[[Mix], Iterable[Job]] = lambda _: ()
    max_events: int = 100_000
    new_tokens: int = NEW_TOKENS
    ran_on: str = ""
    notes: tuple[str, ...] = ()
    split: str = SPLIT
    plan_of: Callable[[Mapping[str, Trace]], Plan] | None = None
    replays: Replays = NOTHING  # what its jobs replay

    def replays_on(self, traces: Mapping[str, Trace]) -> Replays:
        """What is replayed on these traces: forecasts need what some trace has recorded."""
        known = {name for trace in traces.values() for name in forecasts_for(trace)}
        policies, judged, prefetched = self.replays
        return Replays(policies, *(tuple(name for name in each if name in known) for each in (judged, prefetched)))

    def plan(self, traces: Mapping[str, Trace]) -> Plan:
        """What to do on these traces."""
        if self.plan_of is not None:
            return self.plan_of(traces)
        found = mixes(traces, self.max_events, self.new_tokens)
        words = [*(mix.words() for mix in found), *([self.ran_on] if self.ran_on else [])]
        return Plan(words, [job for mix in found for job in self.jobs(mix)], list(self.notes))


@dataclass(frozen=True, slots=True)
class StudyResult:
    """What a study found, on what, and what a person should know about it."""

    study: Study
    ran_on: list[str]
    rows: list[Row]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """The result as plain values, for JSON; how it is drawn is left out."""
        study = {key: getattr(self.study, key) for key in ("title", "question", "split")}
        columns = [asdict(column) for column in self.study.columns]
        return study | {"columns": columns, "ran_on": self.ran_on, "rows": self.rows, "notes": self.notes}


def carry_out(study: Study, plan: Plan, advance: Callable[[], None] = lambda: None) -> StudyResult:
    """Run all jobs of a plan and draw the conclusions."""
    rows: list[Row] = []
    for job in plan.jobs:
        rows.extend(job())
        advance()
    notes = [*study.conclude(rows), *plan.notes]
    return StudyResult(study, plan.ran_on, [{k: _short(v) for k, v in row.items()} for row in rows], notes)


def grouped(rows: Iterable[Row], *keys: str) -> dict[Any, list[Row]]:
    """The rows by the value of one key, or the values of several."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(row[keys[0]] if len(keys) == 1 else tuple(row[key] for key in keys), []).append(row)
    return found


def _short(value: Any) -> Any:
    """Six digits are more than any of these figures is worth."""
    return float(f"{value:.6g}") if isinstance(value, float) else value

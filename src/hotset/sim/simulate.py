"""Runs a sweep: every policy at every budget on every trace, with LRU and the optimum always beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from hotset.cache import Controller
from hotset.cache.controller import Replayed
from hotset.cache.counters import Count
from hotset.checks import instance, shown, text
from hotset.errors import HotsetError
from hotset.policies.belady import Belady
from hotset.shape import ModelShape
from hotset.sim.link import Link
from hotset.sim.prefetch import OFF, Resident, chosen_forecast, follow_replay
from hotset.sim.rows import Prefetched, Row, Times
from hotset.sim.sweep import Job, Sweep, has_warm_rows, jobs, notes
from hotset.trace import Phase, Trace
from hotset.trace.combine import interleave
from hotset.trace.events import EventTable


@dataclass(frozen=True)
class Result:
    """The rows of a sweep, and what a person should know about them."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The result as plain values, for JSON."""
        return {"rows": [row.as_dict() for row in self.rows], "notes": self.notes}

    def __repr__(self) -> str:
        return f"<Result: {len(self.rows)} rows, {len(self.notes)} notes>"


class _Part(NamedTuple):
    """Events to replay, with the number of tokens per phase."""

    trace: Trace
    events: EventTable
    tokens: tuple[int, int]


def simulate(
    traces: Mapping[str, Trace], sweep: Sweep | None = None, *, advance: Callable[[], None] = lambda: None
) -> Result:
    """Replay each trace under each policy and budget; cold on all requests, warm on those not seen before."""
    sweep = Sweep() if sweep is None else instance(sweep, Sweep, "the sweep")
    result = Result()
    for name, trace in _checked(traces).items():
        shown = {policy.spec for policy in sweep.on(trace).sweep.asked_for()}
        result.notes.extend(notes(name, trace, sweep))
        result.rows.extend(row for row in _run(name, trace, sweep, advance) if row.policy in shown)
    return result


def _checked(traces: Mapping[str, Trace]) -> dict[str, Trace]:
    """The traces of a sweep by name."""
    if not isinstance(traces, Mapping):
        raise HotsetError(f"the traces must be a dictionary of traces by name, not {shown(traces)}")
    for name, trace in traces.items():
        instance(trace, Trace, text(name, "the name of a trace")).check_again()
    return dict(traces)


def count_jobs(traces: Mapping[str, Trace], sweep: Sweep) -> int:
    """How often `simulate` will call `advance`."""
    return sum(len(jobs(trace, sweep)) for trace in traces.values())


def _run(name: str, trace: Trace, sweep: Sweep, advance: Callable[[], None]) -> list[Row]:
    whole = _part(trace, sweep)
    fit = judged = whole
    if has_warm_rows(trace, sweep):
        fit, judged = (_part(half, sweep) for half in trace.split(sweep.fit, sweep.seed))
        numbered_on = judged.events.request + fit.trace.requests  # none of them is one that was learnt from
        judged = judged._replace(events=replace(judged.events, request=numbered_on))

    def work(job: Job) -> list[Row]:
        rows = [row for phase, own in _by_phase(job) for row in replay(own) if phase in (row.phase, "all")]
        advance()
        return rows

    def replay(job: Job) -> list[Row]:
        return (
            _judge(name, job, whole, _controller(job, sweep), sweep)
            if job.start == "cold"
            else _warm(name, job, fit, judged, sweep)
        )

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:  # the replay is compiled and lets go of the lock
        rows = [row for found in pool.map(work, jobs(trace, sweep)) for row in found]
    _fill_gaps(rows)
    if sweep.link is not None:
        _fill_bounds(rows, sweep.link, trace.shape)
    return rows


def _by_phase(job: Job) -> list[tuple[str, Job]]:
    """The bound of a phase's hits spends nothing on the other phase's, so each phase has a bound of its own."""
    if not isinstance(job.policy, Belady):
        return [("all", job)]
    return [(phase, job._replace(policy=replace(job.policy, phase=phase))) for phase in ("decode", "prefill")]


def _part(trace: Trace, sweep: Sweep) -> _Part:
    trace = interleave(trace, sweep.streams, sweep.mode) if sweep.streams > 1 else trace
    passes = np.flatnonzero(np.diff(trace.step, prepend=trace.step[0] - 1))
    phase = np.minimum.reduceat(trace.phase, passes)  # a pass with a prompt in it is a prefill
    sizes = np.diff(np.append(passes, trace.tokens))
    prefill, decode = (int(sizes[phase == kind].sum()) for kind in Phase)
    return _Part(trace, trace.events(), (prefill, decode))


def _controller(job: Job, sweep: Sweep) -> Controller:
    """A fresh cache; what the bound admits is limited neither in prompts nor by the rows of staging."""
    if job.policy.offline:
        return Controller(replace(job.plan, staging=0), job.policy, prefill=job.policy.admission)
    return Controller(job.plan, job.policy, prefill=sweep.prefill)


def _judge(
    name: str, job: Job, part: _Part, controller: Controller, sweep: Sweep, training_trace: Trace | None = None
) -> list[Row]:
    """The rows of a replay; with prefetch, its misses with some of them brought before they are asked for."""
    prefetches = sweep.link is not None and sweep.prefetch != OFF
    resident = controller.table.slot_of >= 0
    done = controller.replay(part.events, log=prefetches)
    phases = [phase for phase in (Phase.DECODE, Phase.PREFILL) if part.tokens[phase]]
    rows = [_row(name, job, part, done, sweep, phase) for phase in phases]
    for row in rows:
        if prefetches and row.phase == "decode":
            _add_prefetch(row, part, done, sweep, resident, training_trace)
    return rows


def _add_prefetch(
    row: Row, part: _Part, done: Replayed, sweep: Sweep, resident: Resident, training_trace: Trace | None
) -> None:  # fmt: skip
    assert sweep.link is not None  # noqa: S101 - asked for only with one
    forecast, auto = chosen_forecast(part.trace, sweep.prefetch)
    plan = sweep.prefetch_plan(part.trace)
    result = follow_replay(
        part.trace, done, sweep.link, forecast, plan, resident=resident, training_trace=training_trace
    )
    row.times = _times(result.stall_s, result.total_s, row.tokens)
    row.prefetched = Prefetched(
        prefetch=forecast + (" (auto)" if auto else ""),
        driver=plan.driver.value,
        prefetch_slots=plan.rows,
        in_time=result.in_time,
        late=result.late,
        wasted=result.wasted,
        wasted_bytes_per_token=result.wasted_bytes / row.tokens,
    )


def _warm(name: str, job: Job, fit: _Part, judged: _Part, sweep: Sweep) -> list[Row]:
    """Learn from the fit requests, then count only the judged ones; and the same from cold, to compare."""
    controller = _controller(job, sweep)
    if job.policy.offline:  # the bound for any warm start: the best contents to begin with, known from the future
        controller.preload(1.0 / (1.0 + job.policy.with_future(controller.state, judged.events).next_use))
    elif job.policy.needs_counts:
        controller.state.counts[...] = fit.events.totals()
        controller.preload(controller.state.counts)
    else:
        controller.replay(fit.events)
    rows = _judge(name, job, judged, controller, sweep, fit.trace)
    cold = _controller(job, sweep).replay(judged.events).counters
    for row in rows:
        row.cold_hit_rate = cold.hit_rate(Phase[row.phase.upper()])
    return rows


def _row(name: str, job: Job, part: _Part, done: Replayed, sweep: Sweep, phase: Phase) -> Row:
    counters, plan, shape = done.counters, job.plan, job.plan.shape
    tokens, missed = part.tokens[phase], counters.total(Count.MISSES, phase)
    row = Row(
        trace=name,
        policy=job.label,
        scope=str(plan.scope),
        streams=sweep.streams,
        budget=str(job.budget),
        budget_slots=plan.cached,
        budget_fraction=plan.cached / shape.total_experts,
        budget_cycles=plan.cached / shape.token_cycle,
        staging_slots=plan.staging,
        phase=phase.name.lower(),
        start=job.start,
        hit_rate=counters.hit_rate(phase),
        misses_per_token=missed / tokens,
        bytes_per_token=missed / tokens * shape.expert_bytes if shape.expert_bytes else None,
        gap_closed=None,
        evictions=counters.total(Count.EVICTED, phase),
        hits=counters.total(Count.HITS, phase),
        misses=missed,
        staged=counters.total(Count.STAGED, phase),
        events=counters.total(Count.EVENTS, phase),
        tokens=tokens,
    )
    if sweep.link and shape.expert_bytes is None:
        raise HotsetError(
            "a modelled link needs the size of an expert, and this trace does not state it: pass --expert-bytes"
        )
    if sweep.link:
        row.times = _times(*sweep.link.times(part.events, done.misses, phase), tokens)
    return row


def _times(stall_s: float, total_s: float, tokens: int) -> Times:
    return Times(stall_s / tokens, total_s / tokens, tokens / total_s)


def _setting(row: Row) -> tuple[str, int, str, str]:
    """What rows must share to be compared."""
    return row.trace, row.budget_slots, row.phase, row.start


def _fill_gaps(rows: list[Row]) -> None:
    """How far each row gets from LRU towards the optimum of the same setting."""
    lru, best = ({_setting(r): r.hit_rate for r in rows if r.policy == name} for name in ("lru", "belady"))
    for row in rows:
        least = lru[_setting(row)]
        room = best[_setting(row)] - least
        row.gap_closed = (row.hit_rate - least) / room if room > 1e-12 else None


def _fill_bounds(rows: list[Row], link: Link, shape: ModelShape) -> None:
    """How near each row gets to the least time of its setting: the optimum's loads are the fewest."""
    least = {_setting(row): link.least_s(row.events, row.misses, shape) for row in rows if row.policy == "belady"}
    for row in rows:
        if row.times is not None:
            row.times = row.times.with_bound(least[_setting(row)] / row.tokens)

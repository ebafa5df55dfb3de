"""Sweeps: every policy at every budget on every trace, with LRU and the optimum always beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from hotset.cache import Controller, Counters, Scope, SlotPlan
from hotset.cache.counters import Count
from hotset.errors import HotsetError
from hotset.policies import Admit, Policy, parse
from hotset.shape import Budget
from hotset.sim.link import Link
from hotset.sim.rows import Row
from hotset.trace import Phase, Trace
from hotset.trace.combine import interleave
from hotset.trace.events import EventTable

SWEEP = ("lru", "lfu", "lfru", "slru", "window", "decay", "layered", "static", "blend")
"""The policies of a sweep that names none; belady is always there."""

BUDGETS = ("5%", "10%", "25%", "40%", "50%")
COLD, WARM = "cold", "warm"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What to compare, and how."""

    policies: Sequence[str] = SWEEP
    budgets: Sequence[str] = BUDGETS
    scope: Scope = Scope.LAYER
    streams: int = 1
    mode: Literal["batch", "turns"] = "batch"
    staging: int = 0
    prefill: Admit = Admit.FREE
    fit: float = 0.5  # share of requests that a warm start has seen
    seed: int = 0
    link: Link | None = None


@dataclass(frozen=True)
class Result:
    """The rows of a sweep, and what a person should know about them."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The result as plain values, for JSON."""
        return {"rows": [row.as_dict() for row in self.rows], "notes": self.notes}


class _Part(NamedTuple):
    """Events to replay, with the number of tokens per phase."""

    events: EventTable
    tokens: tuple[int, int]


class _Job(NamedTuple):
    trace: str
    policy: Policy
    budget: Budget
    start: str


def simulate(
    traces: Mapping[str, Trace], sweep: Sweep | None = None, *, advance: Callable[[], None] = lambda: None
) -> Result:
    """Replay each trace under each policy and budget; cold on all requests, warm on those not seen before."""
    sweep = sweep or Sweep()
    policies = _with_bounds([parse(spec) for spec in sweep.policies])
    budgets = [Budget.parse(text) for text in sweep.budgets]
    result = Result()
    for name, trace in traces.items():
        plans = {
            str(b): SlotPlan(trace.shape, b.slots_for(trace.shape) + sweep.staging, sweep.scope, sweep.staging)
            for b in budgets
        }
        result.notes.extend(_notes(name, trace, plans, policies, sweep))
        rows = _run(name, trace, sweep, policies, budgets, plans, advance)
        result.rows.extend(_asked_for(rows, sweep.policies))
    return result


def count_jobs(traces: Mapping[str, Trace], sweep: Sweep) -> int:
    """How often `simulate` will call `advance`."""
    policies = _with_bounds([parse(spec) for spec in sweep.policies])
    return sum(
        len(_jobs(name, trace, sweep, policies, [Budget.parse(b) for b in sweep.budgets]))
        for name, trace in traces.items()
    )


def _with_bounds(policies: Iterable[Policy]) -> list[Policy]:
    """The policies once each, with the baseline and the bound that every figure is read against."""
    wanted = [*policies, parse("lru"), parse("belady")]
    return list({policy.spec: policy for policy in wanted}.values())


def _jobs(name: str, trace: Trace, sweep: Sweep, policies: list[Policy], budgets: list[Budget]) -> list[_Job]:
    starts = [COLD, WARM] if trace.requests > 1 and 0 < sweep.fit < 1 else [COLD]
    return [
        _Job(name, policy, budget, start)
        for start in starts
        for budget in budgets
        for policy in policies
        if not (policy.name == "static" and start == COLD)
    ]


def _run(
    name: str, trace: Trace, sweep: Sweep, policies: list[Policy], budgets: list[Budget],
    plans: dict[str, SlotPlan], advance: Callable[[], None],
) -> list[Row]:  # fmt: skip
    whole = _part(trace, sweep)
    fit = judged = whole
    if trace.requests > 1 and 0 < sweep.fit < 1:
        fit, judged = (_part(half, sweep) for half in trace.split(sweep.fit, sweep.seed))

    def work(job: _Job) -> list[Row]:
        plan = plans[str(job.budget)]
        rows = _cold(job, plan, whole, sweep) if job.start == COLD else _warm(job, plan, fit, judged, sweep)
        advance()
        return rows

    jobs = _jobs(name, trace, sweep, policies, budgets)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:  # the replay is compiled and lets go of the lock
        rows = [row for found in pool.map(work, jobs) for row in found]
    _fill_gaps(rows)
    return rows


def _part(trace: Trace, sweep: Sweep) -> _Part:
    if sweep.streams > 1:
        trace = interleave(trace, sweep.streams, sweep.mode)
    passes = np.flatnonzero(np.diff(trace.step, prepend=trace.step[0] - 1))
    phase = np.minimum.reduceat(trace.phase, passes)  # a pass with a prompt in it is a prefill
    sizes = np.diff(np.append(passes, trace.tokens))
    return _Part(trace.events(), (int(sizes[phase == Phase.PREFILL].sum()), int(sizes[phase == Phase.DECODE].sum())))


def _controller(job: _Job, plan: SlotPlan, sweep: Sweep) -> Controller:
    """A fresh cache; the bound is not held to the rule that prompts leave the hot set alone."""
    prefill = job.policy.admission if job.policy.offline else sweep.prefill
    return Controller(plan, job.policy, prefill=prefill)


def _cold(job: _Job, plan: SlotPlan, part: _Part, sweep: Sweep) -> list[Row]:
    return _rows(job, plan, part, _replay(_controller(job, plan, sweep), part), sweep)


def _warm(job: _Job, plan: SlotPlan, fit: _Part, judged: _Part, sweep: Sweep) -> list[Row]:
    """Start with what the fit requests taught, then count only the judged ones; and the same from cold, to compare."""
    controller = _controller(job, plan, sweep)
    if job.policy.offline:  # the bound for any warm start: the best contents to begin with, known from the future
        foreseen = job.policy.foresee(controller.state, judged.events)
        controller.preload(1.0 / (1.0 + foreseen.next_use))
    elif job.policy.name == "static":
        controller.state.counts[...] = _counts(fit.events)
        controller.preload(controller.state.counts)
    else:
        controller.replay(fit.events)
    rows = _rows(job, plan, judged, _replay(controller, judged), sweep)
    cold = _replay(_controller(job, plan, sweep), judged)[0]
    for row in rows:
        row.cold_hit_rate = cold.hit_rate(Phase[row.phase.upper()])
    return rows


def _counts(events: EventTable) -> np.ndarray[Any, np.dtype[np.float64]]:
    grid = np.zeros((events.shape.layers, events.shape.experts))
    np.add.at(grid, (np.repeat(events.layer, np.diff(events.start)), events.expert), events.count)
    return grid


def _replay(controller: Controller, part: _Part) -> tuple[Counters, Any]:
    replayed = controller.replay(part.events)
    return replayed.counters, replayed.misses


def _rows(job: _Job, plan: SlotPlan, part: _Part, done: tuple[Counters, Any], sweep: Sweep) -> list[Row]:
    return [_row(job, plan, part, done, sweep, phase) for phase in (Phase.DECODE, Phase.PREFILL) if part.tokens[phase]]


def _row(job: _Job, plan: SlotPlan, part: _Part, done: tuple[Counters, Any], sweep: Sweep, phase: Phase) -> Row:
    counters, misses = done
    tokens, missed = part.tokens[phase], counters.total(Count.MISSES, phase)
    row = Row(
        trace=job.trace,
        policy=job.policy.spec,
        scope=str(sweep.scope),
        streams=sweep.streams,
        budget=str(job.budget),
        budget_slots=plan.cached,
        budget_fraction=plan.cached / plan.shape.total_experts,
        budget_cycles=plan.cached / plan.shape.token_cycle,
        staging_slots=plan.staging,
        phase=phase.name.lower(),
        start=job.start,
        hit_rate=counters.hit_rate(phase),
        misses_per_token=missed / tokens,
        bytes_per_token=missed / tokens * plan.shape.expert_bytes if plan.shape.expert_bytes else None,
        gap_closed=None,
        evictions=counters.total(Count.EVICTED, phase),
        hits=counters.total(Count.HITS, phase),
        misses=missed,
        staged=counters.total(Count.STAGED, phase),
        events=counters.total(Count.EVENTS, phase),
        tokens=tokens,
    )
    if sweep.link:
        _add_times(row, sweep.link, part, misses, phase)
    return row


def _add_times(row: Row, link: Link, part: _Part, misses: Any, phase: Phase) -> None:
    if part.events.shape.expert_bytes is None:
        raise HotsetError(
            "a modelled link needs the size of an expert, and this trace does not state it: pass --expert-bytes"
        )
    times = link.times(part.events, misses, phase)
    row.stall_s_per_token = times.stall_s / row.tokens
    row.time_s_per_token = times.total_s / row.tokens
    row.tokens_per_s = row.tokens / times.total_s


def _fill_gaps(rows: list[Row]) -> None:
    """How far each row gets from LRU towards the optimum of the same setting."""
    lru = {row.setting: row.hit_rate for row in rows if row.policy == "lru"}
    best = {row.setting: row.hit_rate for row in rows if row.policy == "belady"}
    for row in rows:
        room = best[row.setting] - lru[row.setting]
        row.gap_closed = (row.hit_rate - lru[row.setting]) / room if room > 1e-12 else None


def _asked_for(rows: list[Row], specs: Sequence[str]) -> list[Row]:
    shown = {parse(spec).spec for spec in specs} | {"belady"}
    return [row for row in rows if row.policy in shown]


def _notes(name: str, trace: Trace, plans: dict[str, SlotPlan], policies: list[Policy], sweep: Sweep) -> list[str]:
    found = []
    for plan in plans.values():
        for policy in policies:
            warning = plan.warning(policy.name)
            if warning and policy.name in {parse(spec).name for spec in sweep.policies}:
                found.append(f"{name}: {warning}")
    if any(p.name == "static" for p in policies):
        found.append(f"{name}: static needs counts from earlier requests, so it has warm rows only")
    if trace.requests < 2:
        found.append(f"{name}: one request cannot be split to fit and judge, so there are no warm rows")
    return found

"""What a cache would have done: hit rates beside lru and the optimum, and how much of what it kept was used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.analysis.residency_walk import Watched, follow
from hotset.analysis.tallies import Floats, Mask, ratio
from hotset.cache import Controller
from hotset.cache.counters import Count
from hotset.errors import HotsetError, PolicyError
from hotset.policies import parse
from hotset.policies.belady import Belady
from hotset.shape import Budget
from hotset.sim import Row, Sweep, count_jobs, simulate
from hotset.sim.sweep import Job, jobs
from hotset.trace import Phase, Trace
from hotset.trace.events import EventTable
from hotset.trace.run import Run

POLICIES = ("lru", "lfu", "blend", "nextuse")
BUDGET = "25%"
STEPS = 96
"""The most steps of one request that are drawn."""
_EVENTS_AT_ONCE = 1 << 18
_MAX_FUTURE_ACCESSES = 1 << 25  # a policy that knows the future replays in one piece, with all its loads in a log


@dataclass(frozen=True, eq=False)
class Kept:
    """One policy at one budget: of the experts that were resident before an event, how many it used, and the reverse.

    Figures are of decode events, by layer.
    """

    policy: str
    budget: str
    slots: int
    hits: npt.NDArray[np.int64]  # [layers]
    misses: npt.NDArray[np.int64]  # [layers]
    resident: npt.NDArray[np.int64]  # [layers], experts resident before an event, summed over events
    watched: Watched

    @property
    def precision(self) -> Floats:
        """Of the experts resident before an event, the share that it used."""
        return ratio(self.hits, self.resident)

    @property
    def recall(self) -> Floats:
        """Of the experts that an event used, the share that was resident: the hit rate."""
        return ratio(self.hits, self.hits + self.misses)

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain values, for JSON."""
        total = int(self.hits.sum())
        asked, resident = total + int(self.misses.sum()), int(self.resident.sum())
        return {
            "policy": self.policy,
            "budget": self.budget,
            "slots": self.slots,
            "precision": total / resident if resident else None,
            "recall": total / asked if asked else None,
            "precision_by_layer": self.precision.tolist(),
            "recall_by_layer": self.recall.tolist(),
        }


class Recorded(NamedTuple):
    """The cache that a trace was recorded with, as a sweep calls it."""

    policy: str
    budget: str
    slots: int


@dataclass(frozen=True, eq=False)
class Caching:
    """What a cache would have done with a workload."""

    rows: list[Row]  # of the simulator
    kept: list[Kept]
    layer: int  # drawn over time
    request: int
    steps: int
    notes: list[str]
    recorded: Recorded | None = None  # what the trace was recorded with, where that is replayed, too


@dataclass(frozen=True, kw_only=True)
class CacheQuestion:
    """What to replay, and which layer and request to draw; None: what suits the trace."""

    policies: Sequence[str] | None = None
    budgets: Sequence[str] | None = None
    layer: int | None = None
    request: int | None = None

    def sweep(self, trace: Trace) -> Sweep:
        """The replays; without an answer of one's own also with the cache that the trace was recorded with."""
        policies, budgets = list(self.policies or POLICIES), list(self.budgets or (usual_budget(trace),))
        if (recorded := recorded_with(trace)) is not None:
            policies += [] if self.policies or recorded.policy in policies else [recorded.policy]
            budgets += [] if self.budgets or recorded.budget in budgets else [recorded.budget]
        return Sweep(policies=tuple(policies), budgets=tuple(budgets), fit=0.0)


def usual_budget(trace: Trace) -> str:
    """What is replayed unless a budget is named: a quarter of the experts, or of a tiny model what one event needs."""
    shape = trace.shape
    return BUDGET if Budget.parse(BUDGET).slots_for(shape) >= shape.top_k else f"{shape.top_k} slots"


def recorded_with(trace: Trace) -> Recorded | None:
    """The policy and the slots of the run that a trace is a recording of, if something was evicted there."""
    run, shape = Run.of(trace), trace.shape
    if run is None or not shape.top_k <= run.slots < shape.total_experts:
        return None
    try:
        policy = parse(run.policy)
    except PolicyError:  # a file of one's own that is not here
        return None
    usual = Budget.parse(BUDGET).slots_for(shape, run.staging)
    budget = BUDGET if run.slots == usual else f"{run.slots} slots"
    return None if policy.offline else Recorded(policy.spec, budget, run.slots)


def count_replays(trace: Trace, question: CacheQuestion) -> int:
    """How often `measure_caching` will call `advance`."""
    return 2 * count_jobs({"": trace}, question.sweep(trace))


def measure_caching(
    trace: Trace, question: CacheQuestion, name: str = "", *, advance: Callable[[], None] = lambda: None
) -> Caching:
    """Replay the trace from an empty cache under every policy and budget."""
    sweep = question.sweep(trace)
    layer, request = _shown(trace, question)
    events = trace.events()
    watched = watched_events(trace, events, layer, request)
    kept = []
    for job in jobs(trace, sweep):
        if (found := _keep(job, events, watched)) is not None:
            kept.append(found)
        advance()
    result = simulate({name: trace}, sweep, advance=advance)
    notes = [text for text in result.notes if "warm rows" not in text]  # here there are cold ones only
    return Caching(result.rows, kept, layer, request, int(watched.sum()), notes, _replayed(kept, recorded_with(trace)))


def _replayed(kept: list[Kept], recorded: Recorded | None) -> Recorded | None:
    """The cache of the run, unless other policies or budgets were asked for."""
    if recorded is None:
        return None
    same = (each for each in kept if (each.policy, each.slots) == (recorded.policy, recorded.slots))
    return next((recorded._replace(budget=each.budget) for each in same), None)


def _shown(trace: Trace, question: CacheQuestion) -> tuple[int, int]:
    """The layer and the request to draw: the middle layer, and the last request with the longest answer."""
    layer, request = question.layer, question.request
    if layer is None:
        layer = trace.shape.layers // 2
    if request is None:
        of_answers = trace.request[trace.phase == Phase.DECODE]
        lengths = np.bincount(of_answers if len(of_answers) else trace.request)
        request = len(lengths) - 1 - int(lengths[::-1].argmax())
    for what, number, most in (("layer", layer, trace.shape.layers), ("request", request, trace.requests)):
        if not 0 <= number < most:
            raise HotsetError(f"there is no {what} {number} to draw: the trace has 0 to {most - 1}")
    return layer, request


def watched_events(trace: Trace, events: EventTable, layer: int, request: int) -> Mask:
    """The first events of a layer in steps that write tokens of one request."""
    passes = np.flatnonzero(np.diff(trace.step, prepend=trace.step[0] - 1))
    of_token = np.repeat(np.arange(len(passes)), np.diff(np.append(passes, trace.tokens)))
    own = np.zeros(len(passes), np.bool_)
    own[of_token[trace.request == request]] = True
    chosen = (events.layer == layer) & own[events.step]
    if (chosen & (events.phase == Phase.DECODE)).any():
        chosen &= events.phase == Phase.DECODE
    return np.asarray(chosen & (np.cumsum(chosen) <= STEPS))


def _keep(job: Job, events: EventTable, watched: Mask) -> Kept | None:
    """Replay one policy and follow which experts are resident; what bounds the optimum is as in the simulator."""
    policy, whole = job.policy, job.policy.offline
    if isinstance(policy, Belady):
        policy = replace(policy, phase="decode")
    if whole and events.accesses > _MAX_FUTURE_ACCESSES:
        return None
    plan = replace(job.plan, staging=0) if whole else job.plan  # no row of staging limits what the optimum admits
    controller = Controller(plan, policy, **({"prefill": policy.admission} if whole else {}))
    shape = events.shape
    resident = np.zeros((shape.layers, shape.experts), np.bool_)
    sums, seen = np.zeros(shape.layers, np.int64), []
    at_once = max(len(events), 1) if whole else _EVENTS_AT_ONCE
    for first in range(0, len(events), at_once):
        some = events.slice(first, min(first + at_once, len(events)))
        done = controller.replay(some, log=True)
        seen.append(follow(some, done, watched[first : first + at_once], resident, sums))
    counted = controller.counters().array[Phase.DECODE]
    return Kept(
        job.label, str(job.budget), job.plan.cached, counted[Count.HITS], counted[Count.MISSES], sums,
        Watched.joined(seen, shape.experts),
    )  # fmt: skip

"""What studies measure, all in the same way: hits, stalls and bytes of the judged half."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, NamedTuple

from hotset.cache import Controller, SlotPlan
from hotset.forecasts import names
from hotset.policies import parse as parse_policy
from hotset.prefetch import Driver, plan_prefetch, prefetch_rows
from hotset.shape import ModelShape
from hotset.sim.forecasting import can_judge
from hotset.sim.link import Link
from hotset.sim.prefetch import PrefetchResult, simulate_prefetch
from hotset.sim.studies._traces import Mix
from hotset.trace import Phase, Trace

SPEED, COMPUTE_S, SHARE = 25e9, 10e-3, 0.25
LINK = Link(SPEED, COMPUTE_S)
LINK_WORDS = "modelled link of 25 GB/s, 10 ms of compute per pass, a quarter of all experts in memory"


class Layout(NamedTuple):
    """Memory for so many experts: slots that cache, and rows for prefetched experts."""

    cached: int
    prefetch_rows: int

    @property
    def total(self) -> int:
        """All slots."""
        return self.cached + self.prefetch_rows


class Outcome(NamedTuple):
    """What the judged half saw, per new token."""

    hit_rate: float
    stall_ms: float
    tokens_per_s: float
    demand_bytes: float
    prefetched_bytes: float
    wasted_bytes: float


def layout(shape: ModelShape, share: float = SHARE, rows: int | None = None) -> Layout:
    """A share of all experts, of which some rows are for prefetch."""
    rows = prefetch_rows(Driver.CPU, shape) if rows is None else rows
    return Layout(round(share * shape.total_experts) - rows, rows)


def controller(shape: ModelShape, policy: str, slots: int) -> Controller:
    """A fresh cache."""
    return Controller(SlotPlan(shape, slots), parse_policy(policy))


def warmed(mix: Mix, policy: str, slots: int) -> Controller:
    """A cache that has served the first half."""
    cache = controller(mix.fit.shape, policy, slots)
    cache.replay(mix.fit.events())
    return cache


def hit_rate(mix: Mix, policy: str, slots: int) -> float:
    """Of the experts that new tokens of the judged half asked for, those that were resident."""
    return warmed(mix, policy, slots).replay(mix.judged_events()).counters.hit_rate(Phase.DECODE)


def drive(
    mix: Mix,
    policy: str,
    forecast: str,
    room: Layout,
    link: Link = LINK,
    *,
    auto: bool = True,
    **rules: Any,
) -> Outcome:
    """Replay with prefetch over the link, by the rules of a CPU or those given, and count the second half."""

    plan = replace(plan_prefetch(Driver.CPU, mix.fit.shape, rows=room.prefetch_rows, trial=auto), **rules)

    def run(trace: Trace) -> PrefetchResult:
        return simulate_prefetch(trace, controller(trace.shape, policy, room.cached), link, forecast, plan)

    rest = minus(run(mix.whole), run(mix.fit))
    return outcome(rest, mix.tokens, hit_rate(mix, policy, room.cached))


def minus(whole: PrefetchResult, first: PrefetchResult) -> PrefetchResult:
    """The result after its first part: a replay knows no future, so both begin alike."""
    sums = {f.name: getattr(whole, f.name) - getattr(first, f.name) for f in fields(PrefetchResult)}
    at_the_end = {"layers_switched_off": whole.layers_switched_off, "switched_off": whole.switched_off}
    return PrefetchResult(**sums | at_the_end)


def outcome(result: PrefetchResult, tokens: int, hits: float) -> Outcome:
    """A result per new token."""
    return Outcome(
        hit_rate=hits,
        stall_ms=1000 * result.stall_s / tokens,
        tokens_per_s=tokens / result.total_s,
        demand_bytes=result.demand_bytes / tokens,
        prefetched_bytes=result.prefetched_bytes / tokens,
        wasted_bytes=result.wasted_bytes / tokens,
    )


def forecasts_for(trace: Trace) -> list[str]:
    """The forecasts that have what they need in a trace."""
    return [name for name in names() if can_judge(name, trace)]

"""What to compare: the policies, budgets and starts of a sweep, and what a person should know of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hotset.cache import Scope, SlotPlan
from hotset.cache.plan import default_ahead
from hotset.checks import choice, instance, number, put, shown, text, texts, whole
from hotset.errors import BudgetError, HotsetError, PolicyError
from hotset.forecasts import parse as parse_forecast
from hotset.policies import Admit, Policy, parse
from hotset.shape import MAX_SLOTS, Budget, ModelShape
from hotset.sim.link import Link
from hotset.trace import Trace

POLICIES = ("lru", "lfu", "lfru", "slru", "window", "decay", "layered", "static", "blend")
"""The policies of a sweep that names none; belady is always there."""

BUDGETS = ("5%", "10%", "25%", "40%", "50%")
"""The budgets of a sweep that names none; those too small for a model are left out."""

Start = Literal["cold", "warm"]

_MOST_STREAMS, _MOST_AHEAD, _MOST_SEED = 1 << 20, 1 << 16, (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What to compare, and how."""

    policies: Sequence[str] = POLICIES
    budgets: Sequence[str] | None = None
    scope: Scope = Scope.LAYER
    streams: int = 1
    mode: Literal["batch", "turns"] = "batch"
    staging: int = 0
    prefill: Admit = Admit.FREE
    fit: float = 0.5  # share of requests that a warm start has seen
    seed: int = 0
    link: Link | None = None
    prefetch: str = "off"  # auto, oracle, or a forecast: what is fetched ahead over the link
    ahead: int | None = None  # slots for guesses, beside the cache

    def __post_init__(self) -> None:
        put(self, policies=texts(self.policies, "policies", PolicyError))
        if self.budgets is not None:
            put(self, budgets=texts(self.budgets, "budgets", BudgetError))
        put(self, scope=choice(self.scope, Scope, "the scope"))
        put(self, streams=whole(self.streams, "the number of streams", 1, _MOST_STREAMS))
        put(self, staging=whole(self.staging, "staging", 0, MAX_SLOTS, BudgetError))
        put(self, prefill=choice(self.prefill, Admit, "the admission of prefill"))
        put(self, fit=number(self.fit, "the share of requests to fit on", 0, 1))
        put(self, seed=whole(self.seed, "the seed", 0, _MOST_SEED))
        if text(self.mode, "the mode") not in ("batch", "turns"):
            raise HotsetError(f'the mode must be "batch" or "turns", not {shown(self.mode)}')
        if self.link is not None:
            instance(self.link, Link, "the link")
        if text(self.prefetch, "prefetch") not in ("auto", "off", "oracle"):
            parse_forecast(self.prefetch)
        if self.ahead is not None:
            put(self, ahead=whole(self.ahead, "the number of slots for guesses", 0, _MOST_AHEAD, BudgetError))

    def ahead_slots(self, shape: ModelShape) -> int:
        """The slots for guesses: as asked for, or what an engine takes."""
        return default_ahead(shape) if self.ahead is None else self.ahead

    def asked_for(self) -> list[Policy]:
        """The named policies, once each, and the bound."""
        return _once([parse(spec) for spec in (*self.policies, "belady")])

    def replayed(self) -> list[Policy]:
        """These and the baseline, which every figure is read against."""
        return _once([*self.asked_for(), parse("lru")])


class Job(NamedTuple):
    """One replay of a sweep; `label` is the policy as it was asked for."""

    label: str
    policy: Policy
    budget: Budget
    plan: SlotPlan
    start: Start


def jobs(trace: Trace, sweep: Sweep) -> list[Job]:
    """All replays that a sweep needs on one trace."""
    starts: list[Start] = ["cold", "warm"] if has_warm_rows(trace, sweep) else ["cold"]
    return [
        Job(policy.spec, policy, budget, plan, start)
        for start in starts
        for budget, plan in plans(trace, sweep)
        for policy in sweep.replayed()
        if not (policy.name == "static" and start == "cold")  # a fixed set needs a past
    ]


def plans(trace: Trace, sweep: Sweep) -> list[tuple[Budget, SlotPlan]]:
    """The slots that each budget buys; a default budget that cannot work is skipped, a named one refused."""
    found = []
    for asked in sweep.budgets or BUDGETS:
        budget = Budget.parse(asked)
        try:
            found.append((budget, _plan(trace, sweep, budget)))
        except BudgetError:
            if sweep.budgets:
                raise
    if not found:
        raise BudgetError("every default budget is too small for one event of this model: name one with --budget")
    return found


def has_warm_rows(trace: Trace, sweep: Sweep) -> bool:
    """Whether there are requests to learn from and others to judge on."""
    return trace.requests > 1 and 0 < sweep.fit < 1


def notes(name: str, trace: Trace, sweep: Sweep) -> list[str]:
    """What to know before reading the rows of this trace."""
    lines: list[str] = []
    asked, kept = sweep.asked_for(), plans(trace, sweep)
    skipped = [each for each in BUDGETS if Budget.parse(each) not in {budget for budget, _ in kept}]
    if skipped and not sweep.budgets:
        lines.append(f"{name}: {', '.join(skipped)} of the experts cannot hold one event, so they are left out")
    for _, plan in kept:
        lines.extend(f"{name}: {warning}" for policy in asked if (warning := plan.warning(policy.name)))
    if trace.requests < 2:
        lines.append(f"{name}: one request cannot be split to fit and judge, so there are no warm rows")
    if any(policy.name == "static" for policy in asked):
        rows = "warm rows only" if has_warm_rows(trace, sweep) else "no rows here"
        lines.append(f"{name}: static needs counts of earlier requests, so it has {rows}")
    return lines


def _plan(trace: Trace, sweep: Sweep, budget: Budget) -> SlotPlan:
    return SlotPlan(trace.shape, budget.slots_for(trace.shape, sweep.staging), sweep.scope, sweep.staging)


def _once(policies: list[Policy]) -> list[Policy]:
    return list({policy.spec: policy for policy in policies}.values())

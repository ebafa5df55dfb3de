"""What to compare: the policies, budgets and starts of a sweep, and what a person should know of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from hotset.cache import Scope, SlotPlan
from hotset.checks import choice, instance, number, put, renamed, shown, text, texts, whole
from hotset.errors import BudgetError, HotsetError, PolicyError
from hotset.forecasts import parse as parse_forecast
from hotset.plugins import install, resolve
from hotset.policies import Admit, Policy, names, parse
from hotset.prefetch import Driver, PrefetchPlan, plan_prefetch
from hotset.shape import MAX_SLOTS, Budget
from hotset.sim.link import Link
from hotset.sim.prefetch import AUTO, OFF, ORACLE, check_driver, chosen_forecast, driver_for
from hotset.trace import Trace
from hotset.trace.run import Run

POLICIES = (
    "lru", "class_lru", "lfu", "lfru", "slru", "window", "decay", "eam", "layered", "static", "blend", "nextuse",
)  # fmt: skip
"""The policies of hotset, in the order of a table; those of users come after them, and belady, the bound, is last."""

BUDGETS = ("5%", "10%", "25%", "40%", "50%")
"""The budgets of a sweep that names none; those too small for a model are left out."""

Start = Literal["cold", "warm"]

_MAX_STREAMS, _MAX_PREFETCH_SLOTS, _MAX_SEED = 1 << 20, 1 << 16, (1 << 63) - 1


@renamed(ahead="prefetch_slots")
@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What to compare, and how."""

    policies: Sequence[str] | None = None  # none named: all, and that of the run that the trace is a recording of
    budgets: Sequence[str] | None = None  # none named: the usual, and the slots of that run
    scope: Scope | None = None  # not given: that of the run, or the layer
    streams: int = 1
    mode: Literal["batch", "turns"] = "batch"
    staging: int | None = None  # not given: that of the run, with its prefetch slots, or none
    prefill: Admit = Admit.FREE
    fit: float = 0.5  # share of requests that a warm start has seen
    seed: int = 0
    link: Link | None = None
    prefetch: str = "off"  # auto, oracle, or a forecast: what is prefetched over the link
    driver: Driver | None = None  # whose rules prefetch follows; none named: see `hotset.sim.prefetch.driver_for`
    prefetch_slots: int | None = None  # rows for prefetched experts, beside the cache

    def __post_init__(self) -> None:
        if self.policies is not None:
            put(self, policies=tuple(map(resolve, texts(self.policies, "policies", PolicyError))))
        if self.budgets is not None:
            put(self, budgets=texts(self.budgets, "budgets", BudgetError))
        if self.scope is not None:
            put(self, scope=choice(self.scope, Scope, "the scope"))
        put(self, streams=whole(self.streams, "the number of streams", 1, _MAX_STREAMS))
        if self.staging is not None:
            put(self, staging=whole(self.staging, "staging", 0, MAX_SLOTS, BudgetError))
        put(self, prefill=choice(self.prefill, Admit, "the admission of prefill"))
        put(self, fit=number(self.fit, "the share of requests to fit on", 0, 1))
        put(self, seed=whole(self.seed, "the seed", 0, _MAX_SEED))
        if text(self.mode, "the mode") not in ("batch", "turns"):
            raise HotsetError(f'the mode must be "batch" or "turns", not {shown(self.mode)}')
        if self.link is not None:
            instance(self.link, Link, "the link")
        if text(self.prefetch, "prefetch") not in (AUTO, OFF, ORACLE):
            put(self, prefetch=resolve(self.prefetch, "forecast"))
            parse_forecast(self.prefetch)
        if self.driver is not None:
            put(self, driver=choice(self.driver, Driver, "the driver"))
        if self.prefetch_slots is not None:
            slots = whole(self.prefetch_slots, "the number of prefetch slots", 0, _MAX_PREFETCH_SLOTS, BudgetError)
            put(self, prefetch_slots=slots)

    def on(self, trace: Trace) -> Setting:
        """What is compared on one trace: what was not given is as in the run that it is a recording of."""
        run = Run.of(trace)
        policies = self.policies or (*registered_policies()[0], *_policy_of(run))
        slots = [f"{run.slots} slots"] if run is not None and run.slots <= trace.shape.total_experts else []
        return Setting(
            replace(self, policies=policies),
            run,
            Scope(run.scope if run else Scope.LAYER) if self.scope is None else self.scope,
            (run.staging if run else 0) if self.staging is None else self.staging,
            run.prefetch_rows if run and self.staging is None else 0,
            tuple(self.budgets or (*BUDGETS, *slots)),
        )

    def prefetch_plan(self, trace: Trace) -> PrefetchPlan:
        """The rules that prefetch follows on a trace, with the rows that were asked for."""
        forecast, trial = chosen_forecast(trace, self.prefetch)
        driver = driver_for(trace, self.prefetch) if self.driver is None else self.driver
        check_driver(driver, trace, forecast)
        return plan_prefetch(driver, trace.shape, rows=self.prefetch_slots, trial=trial)

    def asked_for(self) -> list[Policy]:
        """The named policies, once each, and the bound."""
        return _once([parse(spec) for spec in (*(self.policies or registered_policies()[0]), "belady")])

    def replayed(self) -> list[Policy]:
        """These and the baseline, which every figure is read against."""
        return _once([*self.asked_for(), parse("lru")])


def registered_policies() -> tuple[list[str], list[str]]:
    """All policies that need no future, in the order of a table, and a line for each that does not work."""
    install()
    known = names()
    found, lines = [], []
    for name in (*POLICIES, *(each for each in known if each not in POLICIES)):
        try:
            if name in known and not parse(name).offline:
                found.append(name)
        except PolicyError as error:
            lines.append(f"{name} is left out: {error}")
    return found, lines


class Setting(NamedTuple):
    """A sweep on one trace."""

    sweep: Sweep
    run: Run | None
    scope: Scope
    staging: int
    prefetch_rows: int  # rows for prefetch that a budget in bytes paid for, too
    budgets: tuple[str, ...]

    def shows_cold(self, policy: Policy, trace: Trace) -> bool:
        """Whether a policy has rows that begin empty; a fixed set without a past is what fills the slots first."""
        live = self.run is not None and self.run.policy == policy.spec
        return not policy.needs_counts or live or not has_warm_rows(trace, self.sweep)


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
    setting = sweep.on(trace)
    return [
        Job(policy.spec, policy, budget, plan, start)
        for start in starts
        for budget, plan in plans(trace, sweep)
        for policy in setting.sweep.replayed()
        if start == "warm" or setting.shows_cold(policy, trace)
    ]


class Replays(NamedTuple):
    """What is replayed, by policies, and by forecasts that are judged or that prefetch over a link."""

    policies: tuple[str, ...] = ()
    judged: tuple[str, ...] = ()
    prefetched: tuple[str, ...] = ()


NOTHING = Replays()


def replays_of(traces: Mapping[str, Trace], sweep: Sweep) -> Replays:
    """All that a sweep replays on these traces."""
    policies = [policy.spec for trace in traces.values() for policy in sweep.on(trace).sweep.replayed()]
    forecasts = [chosen_forecast(trace, sweep.prefetch)[0] for trace in traces.values()]
    named = ["previous" if name == ORACLE else name for name in forecasts]  # the loop is that of a forecast
    prefetches = sweep.link is not None and sweep.prefetch != OFF
    return Replays(tuple(dict.fromkeys(policies)), (), tuple(dict.fromkeys(named)) if prefetches else ())


def plans(trace: Trace, sweep: Sweep) -> list[tuple[Budget, SlotPlan]]:
    """The slots that each budget buys; a default budget that cannot work is skipped, a named one refused."""
    found, setting = [], sweep.on(trace)
    for asked in setting.budgets:
        budget = Budget.parse(asked)
        try:
            slots = budget.slots_for(trace.shape, setting.staging + setting.prefetch_rows)
            found.append((budget, SlotPlan(trace.shape, slots, setting.scope, setting.staging, setting.prefetch_rows)))
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
    setting = sweep.on(trace)
    lines = _about_run(name, setting) + ([] if sweep.policies else registered_policies()[1])
    asked, kept = setting.sweep.asked_for(), plans(trace, sweep)
    skipped = [each for each in BUDGETS if Budget.parse(each) not in {budget for budget, _ in kept}]
    if skipped and not sweep.budgets:
        lines.append(f"{name}: {', '.join(skipped)} of the experts cannot hold one event, so they are left out")
    for _, plan in kept:
        lines.extend(f"{name}: {warning}" for policy in asked if (warning := plan.warning(policy.name)))
    if trace.requests < 2:
        lines.append(f"{name}: one request cannot be split to fit and judge, so there are no warm rows")
    for policy in asked:
        if policy.needs_counts:
            warm = "its rows are warm ones" if has_warm_rows(trace, sweep) else "here the first that come stay for good"
            lines.append(f"{name}: {policy.name} needs counts of earlier requests: {warm}")
    return lines + _about_prefetch(name, trace, sweep)


def _about_prefetch(name: str, trace: Trace, sweep: Sweep) -> list[str]:
    """Whose rules prefetch follows."""
    if sweep.link is None or sweep.prefetch == OFF:
        return []
    plan = sweep.prefetch_plan(trace)
    who = {
        Driver.CPU: "on a CPU",
        Driver.HOST: "on a GPU that the host drives",
        Driver.DEVICE: "on a GPU that drives itself",
    }
    layers = "one layer" if plan.reach == 1 else f"{plan.reach} layers"
    lines = [f"{name}: prefetch as {who[plan.driver]}: {layers} ahead, {plan.rows} rows (--driver names another)"]
    recorded = 0 if trace.predictions is None else trace.predictions.shape[2]
    if plan.predicted_only and sweep.prefetch != ORACLE and recorded < plan.reach:
        lines.append(
            f"{name}: the routers' predictions reach {recorded} of them: record with --record-lookahead {plan.reach}"
        )
    return lines


def _about_run(name: str, setting: Setting) -> list[str]:
    """Which row repeats the run that a trace is a recording of."""
    run = setting.run
    if run is None:
        return []
    words = f"{name}: recorded with {run.policy} in {run.slots} slots, scope {run.scope}"
    if run.differs:
        return [f"{words}; a replay differs from that run, since {run.differs}"]
    specs = [policy.spec for policy in setting.sweep.asked_for()]
    same = setting.scope == run.scope and setting.sweep.streams == 1 and setting.sweep.prefill == Admit.FREE
    there = same and run.policy in specs and f"{run.slots} slots" in setting.budgets
    return [f"{words}; its cold row repeats that run"] if there else [words]


def _policy_of(run: Run | None) -> tuple[str, ...]:
    """The policy of a run, if this hotset has it."""
    try:
        return () if run is None or parse(run.policy).offline else (run.policy,)
    except PolicyError:
        return ()


def _once(policies: list[Policy]) -> list[Policy]:
    return list({policy.spec: policy for policy in policies}.values())

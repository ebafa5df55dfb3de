"""How soon a cache and a forecast recover when the task changes, as in MoE-Infinity's table (arXiv 2401.14361)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import permutations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.errors import HotsetError
from hotset.forecasts import parse
from hotset.sim.forecasting import HITS, USED, arrays_of, run_loop
from hotset.sim.studies._result import Chart, Job, Plan, Row, Study, columns, grouped
from hotset.sim.studies._runs import controller, forecasts_for, layout
from hotset.sim.studies._traces import shuffled
from hotset.sim.sweep import Replays
from hotset.trace import Phase, Trace
from hotset.trace.combine import concat

POLICIES = ("lru", "lfu", "blend", "eam")
FORECASTS = ("gate", "eam", "best")
FAMILIES = {
    "it": "romance", "es": "romance", "fr": "romance", "python": "code", "c": "code", "json": "code",
    "metamath": "mathematics", "latex": "mathematics", "en_prose": "english", "en_tech": "english",
    "ja": "east asian", "zh": "east asian",
}  # fmt: skip
"""Domains of the reference model that are alike; any other name is a family of its own."""
ORDERS, PAIRS = 5, 6
WITHIN, SPAN = 0.01, 3
"""Recovered: over so many requests the mean shortfall is at most this."""

Rates = npt.NDArray[np.float64]
Measure = Callable[[list[Trace]], Rates]


class Recovery(NamedTuple):
    """After how many requests the shortfall was made up, and how large it was at first."""

    requests: int
    recovered: bool
    first_gap: float
    settled: float


def plan(traces: Mapping[str, Trace]) -> Plan:
    """Every policy and forecast on switches within a family and between families."""
    pairs = _pairs(traces)
    jobs: list[Job] = []
    for kind, own in pairs.items():
        switches = [(traces[a], traces[b]) for a, b in own]
        known = [name for name in FORECASTS if all(name in forecasts_for(trace) for pair in switches for trace in pair)]
        jobs += [partial(measure, kind, "hit rate", spec, switches) for spec in POLICIES]
        jobs += [partial(measure, kind, "forecast recall", spec, switches) for spec in known]
    words = [f"{kind}: {', '.join(f'{a} to {b}' for a, b in own)}" for kind, own in pairs.items()]
    return Plan([*words, f"{ORDERS} orders of requests each (seeds 0 to {ORDERS - 1}), a quarter of all experts"], jobs)


def _pairs(traces: Mapping[str, Trace]) -> dict[str, list[tuple[str, str]]]:
    """Switches by kind, a few of each, drawn by seed 0."""
    found: dict[str, list[tuple[str, str]]] = {"within a family": [], "between families": []}
    every = [(a, b) for a, b in permutations(traces, 2) if _fits(traces[a], traces[b])]
    for place in np.random.default_rng(0).permutation(len(every)):
        a, b = every[place]
        same = FAMILIES.get(a, a) == FAMILIES.get(b, b)
        found["within a family" if same else "between families"].append((a, b))
    if not every:
        raise HotsetError("a shift needs at least two traces of one model, with two requests each: one per task")
    return {kind: own[:PAIRS] for kind, own in found.items() if own}


def _fits(one: Trace, other: Trace) -> bool:
    return one.experts.shape[1:] == other.experts.shape[1:] and min(one.requests, other.requests) > 1


def measure(kind: str, what: str, spec: str, switches: list[tuple[Trace, Trace]]) -> list[Row]:
    """One row: all switches of a kind, each in several orders."""
    rates = partial(hit_rates, spec) if what == "hit rate" else partial(recalls, spec)
    found = [recover(*pair, seed, rates) for pair in switches for seed in range(ORDERS)]
    requests = [one.requests for one in found]
    return [
        {
            "switch": kind,
            "what": what,
            "by": spec,
            "least": min(requests),
            "mean": float(np.mean(requests)),
            "most": max(requests),
            "not_recovered": sum(not one.recovered for one in found),
            "switches": len(found),
            "first_gap": 100 * float(np.mean([one.first_gap for one in found])),
            "settled": float(np.mean([one.settled for one in found])),
        }
    ]


def recover(before: Trace, after: Trace, seed: int, rates: Measure) -> Recovery:
    """Compare the same requests after another task with the same after their own."""
    rng = np.random.default_rng(seed)
    others, own = shuffled(before, rng), shuffled(after, rng)
    half = len(own) // 2
    settled, first = rates(own)[half:], others[:half]
    gap = settled - rates([*first, *own[half:]])[len(first) :]
    at = first_recovered(gap)
    return Recovery(len(gap) if at is None else at, at is not None, float(gap[0]), float(settled.mean()))


def first_recovered(gap: Rates) -> int | None:
    """The request from which the mean gap over the next few is small; None if there is none."""
    span = min(SPAN, len(gap))
    near = np.convolve(gap, np.full(span, 1 / span), mode="valid") <= WITHIN
    return int(np.argmax(near)) if near.any() else None


def hit_rates(policy: str, requests: list[Trace]) -> Rates:
    """The decode hit rate of each request, in their order, from a cold start."""
    events = concat(requests).events()
    cache = controller(events.shape, policy, layout(events.shape, rows=0).cached)
    misses = cache.replay(events).misses
    new = events.phase == Phase.DECODE
    asked = np.bincount(events.request[new], np.diff(events.start)[new], len(requests))
    return np.asarray(1 - np.bincount(events.request[new], misses[new], len(requests)) / asked)


def recalls(spec: str, requests: list[Trace]) -> Rates:
    """The recall one layer ahead of each request, in their order, while the forecast learns."""
    forecast = parse(spec)
    state, found = forecast.start(requests[0].shape), []
    for number, trace in enumerate(requests):
        events = trace.events()
        events.request[:] = number  # alone, every request is number 0
        sums, _ = run_loop(forecast, state, trace, arrays_of(trace, events, events.phase == Phase.DECODE), (1,))
        total = sums[0, 1:].sum(0)
        found.append(total[HITS] / total[USED])
    return np.array(found)


def conclude(rows: list[Row]) -> list[str]:
    """What recovers soonest and latest for each kind of switch."""
    notes = [
        f"recovered: over {SPAN} requests in a row the mean shortfall is at most {100 * WITHIN:.0f} point, against the "
        "same requests after others of their own task; a switch that never recovers counts with all judged requests"
    ]
    for (switch, what), own in grouped(rows, "switch", "what").items():
        fast, *_, slow = sorted(own, key=lambda row: float(row["mean"]))
        notes.append(
            f"{switch}, {what}: {fast['by']} recovers soonest ({fast['mean']:.1f} requests on average), "
            f"{slow['by']} latest ({slow['mean']:.1f}, {slow['not_recovered']} of {slow['switches']} never)"
        )
    return notes


STUDY = Study(
    title="Recovery after a change of task",
    question="After how many requests are hit rate and forecasts as good as if the task had never changed?",
    columns=columns("switch what by least mean most not_recovered switches first_gap settled"),
    charts=tuple(
        Chart("by", "mean", "switch", "spans", {"what": what}, title=what, ends=("least", "most"))
        for what in ("hit rate", "forecast recall")
    ),
    conclude=conclude,
    replays=Replays(POLICIES, FORECASTS),
    split="half of a task's requests warm the cache that never switched; the other half is judged on both caches",
    plan_of=plan,
)

"""Which settings matter: each is varied on its own around a default, and the range of the outcome is compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hotset.cache.learning import PRIOR_TOKENS, prime
from hotset.policies.eam import CAPACITY
from hotset.prefetch import MIN_PROBABILITY, Driver, plan_prefetch, prefetch_rows
from hotset.profile import Fingerprint
from hotset.profile.fold import profile_of
from hotset.profile.profile import UNKNOWN
from hotset.sim.prefetch import simulate_prefetch
from hotset.sim.studies._result import Chart, Column, Plan, Row, Study
from hotset.sim.studies._runs import LINK, LINK_WORDS, SHARE, Outcome, controller, drive, layout, outcome
from hotset.sim.studies._traces import SPLIT, Mix, mixes
from hotset.trace import Phase, Trace

MAX_EVENTS = 60_000
DECAY = 16


@dataclass(frozen=True, slots=True)
class Setting:
    """All that can be varied; `prior` teaches a cold cache what the first half used, else both halves are replayed."""

    policy: str = f"decay:half_life={DECAY}"
    forecast: str = "best"
    share: float = SHARE
    slots: int | None = None
    distances: int = 1
    min_probability: float = MIN_PROBABILITY
    prior: int | None = None


@dataclass(frozen=True, slots=True)
class Knob:
    """One thing to turn: the values tried, its default, and the setting that a value makes."""

    name: str
    default: Any
    settings: Mapping[Any, Setting]


def knobs(trace: Trace) -> list[Knob]:
    """All knobs, each with the policy and forecast that it belongs to."""
    base, slots = Setting(), prefetch_rows(Driver.CPU, trace.shape)
    rooms = sorted({1, 2, slots, 2 * slots, 4 * slots})
    eam = partial(_collection, base)
    return [
        Knob("cache size", SHARE, {share: replace(base, share=share) for share in (0.1875, 0.25, 0.375, 0.5)}),
        Knob("decay half-life", DECAY, {n: replace(base, policy=f"decay:half_life={n}") for n in (2, 8, 16, 64, 256)}),
        Knob("prior weight", PRIOR_TOKENS, {n: replace(base, prior=n) for n in (0, 16, 64, 256, 1024)}),
        Knob("slots for guesses", slots, {n: replace(base, slots=n) for n in rooms}),
        Knob("distance", 1, {n: replace(base, distances=n) for n in (1, 2, 3) if n <= trace.shape.layers}),
        Knob(
            "guess threshold", MIN_PROBABILITY, {p: replace(base, min_probability=p) for p in (0.1, 0.2, 0.3, 0.5, 0.7)}
        ),
        Knob("collection capacity", CAPACITY, {n: eam(f"capacity={n}") for n in (1, 10, 50, CAPACITY)}),
        Knob("matching depth", 1, {n: eam(f"nearest={n}") for n in (1, 2, 4, 8)}),
    ]


def _collection(base: Setting, option: str) -> Setting:
    return replace(base, policy=f"eam:{option}", forecast=f"eam:{option}")


def plan(traces: Mapping[str, Trace]) -> Plan:
    """Every knob on every model."""
    found = mixes(traces, MAX_EVENTS)
    jobs = [partial(measure, mix, knob) for mix in found for knob in knobs(mix.test)]
    notes = [
        "the collection's knobs are turned on policy and forecast eam, the others on decay with forecast best",
        "prior weight is judged from an empty cache whose policy was taught a profile of the first half; the other "
        "knobs after the first half was replayed",
        "more slots for guesses leave fewer that cache: memory is the same, except where cache size itself is turned",
        "the guess threshold is the least probability at which an expert is sent for",
        "guesses are sent in every pass: where auto decides the other way, that would drown what a setting does",
    ]
    return Plan([*(mix.words() for mix in found), LINK_WORDS], jobs, notes)


def measure(mix: Mix, knob: Knob) -> list[Row]:
    """One row: the range of outcomes over all values of a knob."""
    found = {value: run(mix, setting) for value, setting in knob.settings.items()}
    stalls = {value: one.stall_ms for value, one in found.items()}
    hits = [one.hit_rate for one in found.values()]
    base, least, most = stalls[knob.default], min(stalls.values()), max(stalls.values())
    return [
        {
            "trace": mix.name,
            "knob": knob.name,
            "default": knob.default,
            "values": ", ".join(f"{value:g}" for value in found),
            "best": min(stalls, key=lambda value: stalls[value]),
            "base_stall_ms": base,
            "least_stall_ms": least,
            "most_stall_ms": most,
            "range": (most - least) / base if base else 0.0,
            "left": (base - least) / base if base else 0.0,
            "hit_points": 100 * (max(hits) - min(hits)),
        }
    ]


def run(mix: Mix, setting: Setting) -> Outcome:
    """One setting on the judged half."""
    room = layout(mix.test.shape, setting.share, setting.slots)
    if setting.prior is None:
        return drive(
            mix, setting.policy, setting.forecast, room,
            auto=False, distances=setting.distances, min_probability=setting.min_probability,
        )  # fmt: skip
    profile = profile_of(mix.fit, Fingerprint(UNKNOWN, ""))
    caches = [controller(mix.test.shape, setting.policy, room.cached) for _ in range(2)]
    for cache in caches:
        prime(cache, profile, setting.prior)
    hits = caches[0].replay(mix.test.events()).counters.hit_rate(Phase.DECODE)
    plan = plan_prefetch(Driver.CPU, mix.test.shape, rows=room.ahead, trial=False)
    result = simulate_prefetch(mix.test, caches[1], LINK, setting.forecast, plan)
    return outcome(result, mix.tokens, hits)


def conclude(rows: list[Row]) -> tuple[list[Row], list[str]]:
    """The knobs of each model, the one that matters most first."""
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    ordered = sorted(rows, key=lambda row: (traces.index(row["trace"]), -row["range"]))
    notes = []
    for name in traces:
        own = [row for row in ordered if row["trace"] == name]
        flat = [row["knob"] for row in own if row["range"] < 0.02]
        left = max(own[1:], key=lambda row: float(row["left"]))
        notes.append(
            f"{name}: {own[0]['knob']} matters most ({100 * own[0]['range']:.0f} % of the default's stall); "
            f"under 2 %: {', '.join(flat) or 'none'}; beside cache size, {left['knob']} leaves most on the table at "
            f"its default ({100 * left['left']:.1f} %)"
        )
    return ordered, notes


STUDY = Study(
    title="Sensitivity to settings",
    question="Which settings change the stall per token, and by how much?",
    split=SPLIT,
    columns=(
        Column("trace", "trace"),
        Column("knob", "knob"),
        Column("values", "values"),
        Column("default", "default", "count"),
        Column("best", "best", "count"),
        Column("base_stall_ms", "stall ms/token at default", "ms"),
        Column("least_stall_ms", "least", "ms"),
        Column("most_stall_ms", "most", "ms"),
        Column("range", "range", "share"),
        Column("left", "default above best", "share"),
        Column("hit_points", "hit rate range, points", "points"),
    ),
    charts=(Chart("knob", "base_stall_ms", "trace", "spans", ends=("least_stall_ms", "most_stall_ms")),),
    plan=plan,
    conclude=conclude,
)

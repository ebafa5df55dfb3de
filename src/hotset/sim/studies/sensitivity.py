"""Which settings matter: each is varied on its own around a default, and the range of the outcome is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hotset.cache.learning import PRIOR_TOKENS, prime
from hotset.policies.eam import CAPACITY
from hotset.prefetch import MIN_PROBABILITY, Driver, plan_prefetch, prefetch_rows
from hotset.profile import Fingerprint
from hotset.profile.fold import profile_of
from hotset.profile.profile import UNKNOWN
from hotset.sim.prefetch import simulate_prefetch
from hotset.sim.studies._result import Chart, Job, Row, Study, columns, grouped
from hotset.sim.studies._runs import LINK, LINK_WORDS, SHARE, Outcome, controller, drive, layout, outcome
from hotset.sim.studies._traces import Mix
from hotset.sim.sweep import Replays
from hotset.trace import Phase, Trace

DECAY = 16


@dataclass(frozen=True, slots=True)
class Setting:
    """All that can be varied; with `prior` a cold cache begins with a profile of the first half, not with a replay."""

    policy: str = f"decay:half_life={DECAY}"
    forecast: str = "best"
    share: float = SHARE
    rows: int | None = None
    rules: Mapping[str, Any] = field(default_factory=dict)  # of prefetch
    prior: int | None = None


@dataclass(frozen=True, slots=True)
class Knob:
    """One thing to turn: its default, and the setting that each value makes."""

    name: str
    default: Any
    settings: Mapping[Any, Setting]


def knobs(trace: Trace) -> list[Knob]:
    """All knobs, each with the policy and forecast that it belongs to."""
    rows, layers = prefetch_rows(Driver.CPU, trace.shape), trace.shape.layers
    return [
        _knob("cache size", SHARE, (0.1875, 0.25, 0.375, 0.5), lambda share: {"share": share}),
        _knob("decay half-life", DECAY, (2, 8, 16, 64, 256), lambda n: {"policy": f"decay:half_life={n}"}),
        _knob("prior weight", PRIOR_TOKENS, (0, 16, 64, 256, 1024), lambda n: {"prior": n}),
        _knob("rows for prefetch", rows, sorted({1, 2, rows, 2 * rows, 4 * rows}), lambda n: {"rows": n}),
        _knob("distance", 1, range(1, min(3, layers) + 1), lambda n: {"rules": {"layers_ahead": n}}),
        _knob("probability", MIN_PROBABILITY, (0.1, 0.2, 0.3, 0.5, 0.7), lambda p: {"rules": {"min_probability": p}}),
        _knob("collection capacity", CAPACITY, (1, 10, 50, CAPACITY), lambda n: _collection(f"capacity={n}")),
        _knob("matching depth", 1, (1, 2, 4, 8), lambda n: _collection(f"nearest={n}")),
    ]


def _knob(name: str, default: Any, values: Iterable[Any], change: Callable[[Any], dict[str, Any]]) -> Knob:
    return Knob(name, default, {value: Setting(**change(value)) for value in values})


def _collection(option: str) -> dict[str, Any]:
    return {"policy": f"eam:{option}", "forecast": f"eam:{option}"}


def jobs(mix: Mix) -> list[Job]:
    """Every knob."""
    return [partial(measure, mix, knob) for knob in knobs(mix.test)]


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
    room = layout(mix.test.shape, setting.share, setting.rows)
    if setting.prior is None:
        return drive(mix, setting.policy, setting.forecast, room, auto=False, **setting.rules)
    profile = profile_of(mix.fit, Fingerprint(UNKNOWN, ""))
    caches = [controller(mix.test.shape, setting.policy, room.cached) for _ in range(2)]
    for cache in caches:
        prime(cache, profile, setting.prior)
    hits = caches[0].replay(mix.test.events()).counters.hit_rate(Phase.DECODE)
    plan = plan_prefetch(Driver.CPU, mix.test.shape, rows=room.prefetch_rows, trial=False)
    result = simulate_prefetch(mix.test, caches[1], LINK, setting.forecast, plan)
    return outcome(result, mix.tokens, hits)


def conclude(rows: list[Row]) -> list[str]:
    """The knobs of each model, the one that matters most first."""
    traces = list(grouped(rows, "trace"))
    rows.sort(key=lambda row: (traces.index(row["trace"]), -row["range"]))
    notes = []
    for name, own in grouped(rows, "trace").items():
        flat = [row["knob"] for row in own if row["range"] < 0.02]
        left = max(own[1:], key=lambda row: float(row["left"]))
        notes.append(
            f"{name}: {own[0]['knob']} matters most ({100 * own[0]['range']:.0f} % of the default's stall); "
            f"under 2 %: {', '.join(flat) or 'none'}; beside cache size, {left['knob']} leaves most on the table at "
            f"its default ({100 * left['left']:.1f} %)"
        )
    return notes


STUDY = Study(
    title="Sensitivity to settings",
    question="Which settings change the stall per token, and by how much?",
    columns=columns("trace knob values default best base_stall_ms least_stall_ms most_stall_ms range left hit_points"),
    charts=(Chart("knob", "base_stall_ms", "trace", "spans", ends=("least_stall_ms", "most_stall_ms")),),
    conclude=conclude,
    jobs=jobs,
    replays=Replays(("decay", "eam"), (), ("best", "eam")),
    max_events=60_000,
    ran_on=LINK_WORDS,
    notes=(
        "the collection's knobs are turned on policy and forecast eam, the others on decay with forecast best",
        "prior weight is judged from an empty cache whose policy began with a profile of the first half; the other "
        "knobs after the first half was replayed",
        "more rows for prefetch leave fewer slots that cache: memory is the same, but for cache size",
        "every pass is prefetched for: where auto decides the other way, that would drown what a setting does",
    ),
)

"""LRU against LFU against all: precision and recall of caching and of predicting, as arXiv 2511.05814 studies them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from hotset.cache.controller import Replayed
from hotset.policies import names, parse
from hotset.sim.forecasting import evaluate
from hotset.sim.studies._result import Chart, Job, Plan, Row, Study, columns, grouped
from hotset.sim.studies._runs import forecasts_for, warmed
from hotset.sim.studies._traces import Mix, mixes
from hotset.sim.sweep import Replays
from hotset.trace import Phase, Trace
from hotset.trace.events import EventTable
from hotset.trace.synth import SynthConfig, synthesise

MIXTRAL = SynthConfig(layers=32, experts=8, top_k=2, requests=60, prompt_tokens=0, new_tokens=48, topics=6)
SHARES = (0.125, 0.25, 0.375, 0.5)
SMALL = 8
"""A layer of no more experts than this is cached by single slots, 2 to 6 of 8, not by shares."""
MAX_EVENTS = 100_000
NOTES = [
    "the routing of the Mixtral-like model is synthetic, drawn from a model of popularity, topics and noise: its "
    "figures rank policies under such routing and say nothing of Mixtral itself",
    "with as many slots as a token uses experts, all that admit every expert are alike: an event fills the layer",
    "layered is lru wherever slots belong to layers, as they do here",
    "recall of caching is its hit rate: hits over experts used; predictions are as many as experts used, so that "
    "precision and recall of predicting are the same by construction",
]
_DRAWN = ("belady", "blend", "eam", "lfru", "lru", "lfu")


def plan(traces: Mapping[str, Trace]) -> Plan:
    """Every policy at every size on every model, a synthetic one among them, and the forecast of routers."""
    found = mixes({**traces, "synthetic, as Mixtral": synthesise(MIXTRAL)}, MAX_EVENTS)
    jobs: list[Job] = [
        partial(measure, mix, policy, slots)
        for mix in found
        for slots in sizes(mix)
        for policy in names()
        if not parse(policy).needs_counts
    ]
    return Plan([mix.words() for mix in found], [*jobs, *(partial(measure_predictions, mix) for mix in found)], NOTES)


def sizes(mix: Mix) -> list[int]:
    """Slots per layer to try."""
    shape = mix.fit.shape
    if shape.experts <= SMALL:
        return list(range(shape.top_k, shape.experts - 1))
    return sorted({max(round(share * shape.experts), shape.top_k) for share in SHARES})


def measure(mix: Mix, policy: str, slots: int) -> list[Row]:
    """One row: a policy with so many slots in every layer."""
    cache = warmed(mix, policy, slots * mix.fit.shape.layers)
    before = cache.table.resident.copy()
    events = mix.judged_events()
    done = cache.replay(events, log=True)
    return [_row(mix, policy, "caching", slots, *rates(events, done, before))]


def rates(events: EventTable, done: Replayed, before: npt.NDArray[np.int32]) -> tuple[float, float]:
    """Precision and recall of what was resident when new tokens asked."""
    new = events.phase == Phase.DECODE
    asked = np.diff(events.start)
    hits = (asked - done.misses)[new].sum()
    return float(hits / residents(events, done, before)[new].sum()), float(hits / asked[new].sum())


def residents(events: EventTable, done: Replayed, before: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """How many experts of its layer were resident when each event came."""
    event = np.repeat(np.arange(len(events)), done.misses)
    change = np.zeros((len(events) + 1, events.shape.layers), np.int64)
    came, left = done.log[:, 2] >= 0, done.log[:, 4] >= 0
    np.add.at(change, (event[came] + 1, done.log[came, 0]), 1)
    np.add.at(change, (event[left] + 1, done.log[left, 3]), -1)
    level = before + np.cumsum(change, axis=0)
    return np.asarray(level[np.arange(len(events)), events.layer])


def measure_predictions(mix: Mix) -> list[Row]:
    """The predictions of the next layer's router, judged; none where they were not recorded."""
    if "gate" not in forecasts_for(mix.whole):
        return []
    score = evaluate(mix.whole, ["gate"], (1,), mix.fit.requests / mix.whole.requests).scores[0]
    return [_row(mix, "gate", "predicting", None, score.precision, score.recall)]


def _row(mix: Mix, policy: str, what: str, slots: int | None, precision: float | None, recall: float | None) -> Row:
    return {
        "trace": mix.name,
        "what": what,
        "by": policy,
        "slots": slots,
        "share": slots / mix.fit.shape.experts if slots else None,
        "precision": precision,
        "recall": recall,
        "hit_rate": recall if what == "caching" else None,
    }


def conclude(rows: list[Row]) -> list[str]:
    """How far LFU is from LRU at every size, and which policy is best."""
    caching = grouped((row for row in rows if row["what"] == "caching"), "trace")
    return [
        f"{name}: " + "; ".join(_compare(same, slots) for slots, same in grouped(own, "slots").items())
        for name, own in caching.items()
    ]


def _compare(rows: list[Row], slots: int) -> str:
    rate = {row["by"]: 100 * row["hit_rate"] for row in rows}
    best = max((name for name in rate if name != "belady"), key=lambda name: rate[name])
    return (
        f"{slots} slots: lfu {rate['lfu'] - rate['lru']:+.1f} points against lru, best {best} "
        f"({rate[best] - rate['lru']:+.1f}), bound {rate['belady'] - rate['lru']:+.1f}"
    )


STUDY = Study(
    title="Policies by precision and recall",
    question="Is LFU better than LRU, and what do residents and predictions bring, at 2 to 6 of 8 experts?",
    columns=columns("trace what by slots share precision recall hit_rate"),
    charts=tuple(Chart("share", y, "by", where={"what": "caching"}, only=_DRAWN) for y in ("hit_rate", "precision")),
    conclude=conclude,
    replays=Replays(tuple(name for name in names() if not parse(name).needs_counts), ("gate",)),
    plan_of=plan,
)

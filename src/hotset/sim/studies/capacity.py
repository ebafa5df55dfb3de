"""How many past requests are worth keeping: MoE-Infinity's collection of 1 to 1,000 matrices (arXiv 2401.14361)."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from hotset.policies import eam
from hotset.policies.base import bind
from hotset.policies.eam import EamState, match, take
from hotset.sim.forecasting import evaluate
from hotset.sim.studies._result import Chart, Job, Row, Study, columns, grouped
from hotset.sim.studies._runs import LINK_WORDS, drive, layout, warmed
from hotset.sim.studies._traces import SPLIT, Mix
from hotset.sim.sweep import Replays

CAPACITIES = (1, 10, 50, 100, 200, 1000)
OTHERS = (("lru", "transition"), ("blend", "best"))
"""What needs no matrices, to compare with."""
_ROUNDS, _EVENTS = 5, 2000


def jobs(mix: Mix) -> list[Job]:
    """Every capacity, then what keeps no matrices."""
    specs = [(f"eam:capacity={n}", f"eam:capacity={n}", n) for n in CAPACITIES]
    return [partial(measure, mix, *spec) for spec in (*specs, *((*pair, None) for pair in OTHERS))]


def measure(mix: Mix, policy: str, forecast: str, capacity: int | None) -> list[Row]:
    """One row: a policy and a forecast of the same collection."""
    room = layout(mix.fit.shape)
    found = drive(mix, policy, forecast, room)
    score = evaluate(mix.whole, [forecast], (1,), mix.fit.requests / mix.whole.requests).scores[0]
    held, match_us = _match_time(mix, policy, room.cached) if capacity else (None, None)
    return [
        {
            "trace": mix.name,
            "policy": policy.partition(":")[0],
            "forecast": forecast.partition(":")[0],
            "capacity": capacity,
            "held": held,
            "hit_rate": found.hit_rate,
            "recall": score.recall,
            "stall_ms": found.stall_ms,
            "match_us": match_us,
        }
    ]


def _match_time(mix: Mix, policy: str, slots: int) -> tuple[int, float]:
    """The matrices held after the first half, and the time to take in an event and to search them; best of a few."""
    state, match_often = warmed(mix, policy, slots).state, _compiled()
    experts = np.arange(mix.fit.shape.top_k, dtype=np.int32)
    match_often(state, experts, np.ones_like(experts), 1)
    taken = []
    for _ in range(_ROUNDS):
        began = time.thread_time()
        match_often(state, experts, np.ones_like(experts), _EVENTS)
        taken.append(time.thread_time() - began)
    return int(state.held[0]), 1e6 * min(taken) / _EVENTS


@cache
def _compiled() -> Callable[..., None]:
    """The loop below, kept on disk under a name that changes with all policies."""
    sources = [Path(__file__), *sorted(Path(eam.__file__).parent.glob("*.py"))]
    made: Callable[..., None] = bind([_match_often], [_match_often], globals(), "eam_", sources)["_match_often"]
    return made


def _match_often(state: EamState, experts: Any, counts: Any, times: int) -> None:
    """Take in so many events, and look for requests like the running one after each."""
    layers = state.running.shape[1]
    for i in range(times):
        take(state, i % layers, experts, counts, 1, 0)
        match(state, 1)


def conclude(rows: list[Row]) -> list[str]:
    """From which capacity on nothing is gained, and how that compares with keeping no matrices."""
    notes = ["larger collections than requests run before the judged ones fill up only while judging, or never"]
    for name, own in grouped(rows, "trace").items():
        notes.append(_saturation(name, [row for row in own if row["capacity"]]))
        notes.extend(_comparison(name, own, row) for row in own if not row["capacity"])
    return notes


def _saturation(name: str, rows: list[Row]) -> str:
    best = max(row["hit_rate"] for row in rows)
    enough = next(row for row in rows if row["hit_rate"] >= best - 0.002)
    sharp = max(row["recall"] for row in rows)
    knows = next(row for row in rows if row["recall"] >= sharp - 0.002)
    return (
        f"{name}: hit rate is within 0.2 points of its best from a capacity of {enough['capacity']} on, recall from "
        f"{knows['capacity']} on; from 1 to {rows[-1]['capacity']} matrices hit rate gains "
        f"{100 * (rows[-1]['hit_rate'] - rows[0]['hit_rate']):+.1f} points, recall "
        f"{100 * (rows[-1]['recall'] - rows[0]['recall']):+.1f}, and the stall changes by "
        f"{rows[-1]['stall_ms'] - rows[0]['stall_ms']:+.2f} ms"
    )


def _comparison(name: str, rows: list[Row], other: Row) -> str:
    best = max((row for row in rows if row["capacity"]), key=lambda row: float(row["hit_rate"]))
    return (
        f"{name}: the best collection hits {100 * (best['hit_rate'] - other['hit_rate']):+.1f} points against "
        f"{other['policy']}, and its forecast recalls {100 * (best['recall'] - other['recall']):+.1f} points "
        f"against {other['forecast']}"
    )


STUDY = Study(
    title="Capacity of the collection of requests",
    question="How many matrices of past requests does activation-aware caching need, and what does a search cost?",
    columns=columns("trace policy forecast capacity held hit_rate recall stall_ms match_us"),
    charts=tuple(
        Chart("capacity", y, "trace", where={"policy": "eam"}, log_x=True)
        for y in ("hit_rate", "recall", "stall_ms", "match_us")
    ),
    conclude=conclude,
    jobs=jobs,
    replays=Replays(("eam", *(pair[0] for pair in OTHERS)), *[("eam", *(pair[1] for pair in OTHERS))] * 2),
    max_events=300_000,
    ran_on=LINK_WORDS,
    split=SPLIT + "; the collection goes on learning while it is judged",
)

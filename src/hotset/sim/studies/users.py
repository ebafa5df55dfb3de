"""What several people at once do to a cache and to forecasts: requests that share passes, or take turns."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Literal

from hotset.sim.studies._result import Chart, Column, Plan, Row, Study
from hotset.sim.studies._runs import LINK_WORDS, drive, forecasts_for, layout
from hotset.sim.studies._traces import SPLIT, Mix, mixes
from hotset.trace import Trace
from hotset.trace.combine import interleave

USERS = (1, 2, 4, 8, 16)
MODES: tuple[Literal["batch", "turns"], ...] = ("batch", "turns")
POLICIES = ("lru", "lfu", "blend", "eam")
FORECASTS = ("off", "gate", "best")
MAX_EVENTS, NEW_TOKENS = 40_000, 32


def plan(traces: Mapping[str, Trace]) -> Plan:
    """Every number of users, in both modes, under every policy and forecast."""
    found = mixes(traces, MAX_EVENTS, NEW_TOKENS)
    jobs = [
        partial(measure, mix, mode, users, policy)
        for mix, mode, users, policy in product(found, MODES, USERS, POLICIES)
    ]
    return Plan([*(mix.words() for mix in found), LINK_WORDS], jobs)


def measure(mix: Mix, mode: Literal["batch", "turns"], users: int, policy: str) -> list[Row]:
    """The rows of one policy, one for each forecast."""
    crowd = Mix(mix.name, interleave(mix.fit, users, mode), interleave(mix.test, users, mode))
    room = layout(mix.fit.shape)
    known = ["off", *forecasts_for(mix.whole)]
    rows: list[Row] = []
    for forecast in (name for name in FORECASTS if name in known):
        found = drive(crowd, policy, forecast, room)
        setting = {"trace": mix.name, "mode": mode, "users": users, "policy": policy, "forecast": forecast}
        rows.append(
            setting
            | {"hit_rate": found.hit_rate, "stall_ms": found.stall_ms, "tokens_per_s": found.tokens_per_s}
            | {"loaded_bytes": found.demand_bytes + found.guessed_bytes}
        )
    return rows


def conclude(rows: list[Row]) -> tuple[list[Row], list[str]]:
    """The best policy of each crowd, and what a forecast still saves there."""
    notes = [
        "in a batch, eam counts all of a pass for one request, that of the pass's first token",
        "so many users take requests until none waits: towards the end of a half fewer are left",
        "a pass of several users computes in the same 10 ms, so that tokens/s of a batch are of all users together",
    ]
    for name, mode in dict.fromkeys((row["trace"], row["mode"]) for row in rows):
        own = [row for row in rows if (row["trace"], row["mode"]) == (name, mode)]
        notes.append(f"{name}, {mode}: " + "; ".join(_say(own, users) for users in (USERS[0], USERS[-1])))
    return rows, notes


def _say(rows: list[Row], users: int) -> str:
    own = [row for row in rows if row["users"] == users]
    plain = [row for row in own if row["forecast"] == "off"]
    best = max(plain, key=lambda row: float(row["hit_rate"]))
    least = min(own, key=lambda row: float(row["stall_ms"]))
    without = next(row for row in plain if row["policy"] == least["policy"])
    saved = 1 - least["stall_ms"] / without["stall_ms"] if without["stall_ms"] else 0.0
    return (
        f"{users} user{'s' if users > 1 else ''}: {best['policy']} hits most ({100 * best['hit_rate']:.1f} %), "
        f"{least['policy']} with {least['forecast']} stalls least ({least['stall_ms']:.2f} ms/token, "
        f"{100 * saved:.0f} % less than without a forecast)"
    )


def _chart(y: str, by: str, mode: str, other: str, fixed: str) -> Chart:
    title = mode if fixed == "off" else f"{mode}, {fixed}"
    return Chart("users", y, by, "line", {"mode": mode, other: fixed}, title=title, log_x=True)


STUDY = Study(
    title="Several users at once",
    question="What becomes of hit rate and stalls when requests share passes or take turns?",
    split=SPLIT,
    columns=(
        Column("trace", "trace"),
        Column("mode", "mode"),
        Column("users", "users", "count"),
        Column("policy", "policy"),
        Column("forecast", "forecast"),
        Column("hit_rate", "hit rate", "share"),
        Column("stall_ms", "stall ms/token", "ms"),
        Column("loaded_bytes", "loaded /token", "bytes"),
        Column("tokens_per_s", "tokens/s", "speed"),
    ),
    charts=(
        *(_chart("hit_rate", "policy", mode, "forecast", "off") for mode in MODES),
        *(_chart("stall_ms", "forecast", mode, "policy", "blend") for mode in MODES),
    ),
    plan=plan,
    conclude=conclude,
)

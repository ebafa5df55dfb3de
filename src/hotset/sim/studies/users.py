"""What several people at once do to a cache and to forecasts: requests that share passes, or take turns."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Literal

from hotset.sim.studies._result import Chart, Job, Row, Study, columns, grouped
from hotset.sim.studies._runs import LINK_WORDS, drive, forecasts_for, layout
from hotset.sim.studies._traces import Mix
from hotset.sim.sweep import Replays
from hotset.trace.combine import interleave

USERS = (1, 2, 4, 8, 16)
MODES: tuple[Literal["batch", "turns"], ...] = ("batch", "turns")
POLICIES = ("lru", "lfu", "blend", "eam")
FORECASTS = ("off", "gate", "best")


def jobs(mix: Mix) -> list[Job]:
    """Every number of users, in both modes, under every policy and forecast."""
    return [partial(measure, mix, *setting) for setting in product(MODES, USERS, POLICIES)]


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
            | {"loaded_bytes": found.demand_bytes + found.prefetched_bytes}
        )
    return rows


def conclude(rows: list[Row]) -> list[str]:
    """The best policy of each crowd, and what a forecast still saves there."""
    return [
        f"{name}, {mode}: " + "; ".join(_say(own, users) for users in (USERS[0], USERS[-1]))
        for (name, mode), own in grouped(rows, "trace", "mode").items()
    ]


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


STUDY = Study(
    title="Several users at once",
    question="What becomes of hit rate and stalls when requests share passes or take turns?",
    columns=columns("trace mode users policy forecast hit_rate stall_ms loaded_bytes tokens_per_s"),
    charts=tuple(
        Chart("users", y, by, "line", {"mode": mode, **fixed}, title=", ".join([mode, *title]), log_x=True)
        for y, by, fixed, title in (
            ("hit_rate", "policy", {"forecast": "off"}, ()),
            ("stall_ms", "forecast", {"policy": "blend"}, ("blend",)),
        )
        for mode in MODES
    ),
    conclude=conclude,
    jobs=jobs,
    replays=Replays(POLICIES, (), ("previous", *FORECASTS[1:])),
    max_events=40_000,
    new_tokens=32,
    ran_on=LINK_WORDS,
    notes=(
        "in a batch, eam counts all of a pass for one request, that of the pass's first token",
        "so many users take requests until none waits: towards the end of a half fewer are left",
        "a pass of several users computes in the same 10 ms, so that tokens/s of a batch are of all users together",
    ),
)

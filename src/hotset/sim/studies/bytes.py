"""Prefetch at equal bytes: its rows are taken from the cache, and demand alone keeps them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hotset.forecasts import names
from hotset.prefetch import Driver, prefetch_rows
from hotset.sim.link import Link
from hotset.sim.studies._result import Chart, Job, Row, Study, columns, grouped
from hotset.sim.studies._runs import COMPUTE_S, SHARE, Layout, drive, forecasts_for, layout
from hotset.sim.studies._traces import EXPERT_BYTES, Mix
from hotset.sim.sweep import Replays

SPEEDS_GB = (3, 25, 50)
POLICY = "blend"
SLOWER, SAVED = 0.02, 0.25
TIMES = 4
MORE = "best, more slots"


def jobs(mix: Mix) -> list[Job]:
    """Demand alone, idle rows, every forecast with and without auto, and the oracle, at every speed."""
    named = [(forecast, auto) for forecast in forecasts_for(mix.whole) for auto in ("on", "off")]
    fits = 2 * TIMES * prefetch_rows(Driver.CPU, mix.fit.shape) <= layout(mix.fit.shape).total
    more = [(MORE, auto) for auto in ("on", "off") if fits]
    ways = [("demand only", "-"), ("off", "-"), *named, *more, ("oracle", "off")]
    return [partial(measure, mix, speed, *way) for speed in SPEEDS_GB for way in ways]


def room_for(mix: Mix, forecast: str) -> Layout:
    """The same memory for all: without prefetch, all of it caches."""
    shape = mix.fit.shape
    return layout(shape, SHARE, {"demand only": 0, MORE: TIMES * prefetch_rows(Driver.CPU, shape)}.get(forecast))


def measure(mix: Mix, speed: int, forecast: str, auto: str) -> list[Row]:
    """One row: a forecast at one speed."""
    room = room_for(mix, forecast)
    link = Link(speed * 1e9, COMPUTE_S)
    spec = {"demand only": "off", MORE: "best"}.get(forecast, forecast)
    found = drive(mix, POLICY, spec, room, link, auto=auto == "on")
    return [
        {
            "trace": mix.name,
            "link_gb_per_s": speed,
            "forecast": forecast,
            "auto": auto,
            "cached_slots": room.cached,
            "prefetch_rows": room.prefetch_rows,
            "memory_bytes": room.total * EXPERT_BYTES,
            **found._asdict(),
        }
    ]


def conclude(rows: list[Row]) -> list[str]:
    """Each row against demand alone and against idle rows, and where auto loses or wins."""
    _compare(rows, "demand only", "stall_saved", "faster")
    _compare(rows, "off", "stall_saved_off", "faster_off")
    auto = [row for row in rows if row["auto"] == "on"]
    return [
        "demand only: the rows for prefetch cache instead; off: they stay idle, as if nothing was ever predicted",
        f"rows for prefetch are as many as the engine takes by default, {TIMES} times as many in {MORE}",
        f"auto more than 2 % slower than off: {_list(auto, 'faster_off', lambda share: share < -SLOWER)}",
        f"auto slower than off by at most 2 %: {_list(auto, 'faster_off', lambda share: -SLOWER <= share < 0)}",
        f"auto more than 2 % slower than demand only: {_list(auto, 'faster', lambda share: share < -SLOWER)}",
        f"auto saves 25 % of off's stall: {_list(auto, 'stall_saved_off', lambda share: share >= SAVED)}",
        f"auto saves 25 % of demand only's stall: {_list(auto, 'stall_saved', lambda share: share >= SAVED)}",
        f"auto slower than the same without auto: {_against_always(rows)}",
        "predictions travel only while the modelled link has nothing else to do, so they delay no load on demand: auto "
        "cannot win in this model, and what is seen here is its price",
        "what a forecast itself keeps in memory is not counted, only slots for experts",
    ]


def _compare(rows: list[Row], with_whom: str, saved: str, faster: str) -> None:
    """Off is to be compared only with those that cache in as many slots; demand alone with all."""
    base = {(row["trace"], row["link_gb_per_s"]): row for row in rows if row["forecast"] == with_whom}
    for row in rows:
        plain = base[row["trace"], row["link_gb_per_s"]]
        row[saved] = row[faster] = None
        if with_whom == "demand only" or row["cached_slots"] == plain["cached_slots"]:
            row[saved] = 1 - row["stall_ms"] / plain["stall_ms"] if plain["stall_ms"] else 0.0
            row[faster] = row["tokens_per_s"] / plain["tokens_per_s"] - 1


def _against_always(rows: list[Row]) -> str:
    speed = {(r["trace"], r["link_gb_per_s"], r["forecast"], r["auto"]): r["tokens_per_s"] for r in rows}
    ratios = [speed[*key, "on"] / speed[*key, "off"] - 1 for *key, auto in speed if auto == "on"]
    slower = [ratio for ratio in ratios if ratio < 0]
    if not slower:
        return "nowhere"
    return f"in {len(slower)} of {len(ratios)} settings, at most by {-100 * min(slower):.1f} %"


def _list(rows: list[Row], key: str, wanted: Callable[[float], bool]) -> str:
    """The settings in question, by trace and speed."""
    found = grouped((row for row in rows if row[key] is not None and wanted(row[key])), "trace", "link_gb_per_s")
    words = {
        place: ", ".join(f"{row['forecast']} {100 * row[key]:+.1f} %" for row in own) for place, own in found.items()
    }
    return "; ".join(f"{trace}, {speed} GB/s ({own})" for (trace, speed), own in words.items()) or "nowhere"


STUDY = Study(
    title="Prefetch at equal bytes",
    question="Do rows for prefetch bring more than the same slots in the cache, and what do wrong predictions cost?",
    columns=columns(
        "trace link_gb_per_s forecast auto cached_slots prefetch_rows memory_bytes hit_rate stall_ms stall_saved "
        "demand_bytes prefetched_bytes wasted_bytes tokens_per_s faster faster_off"
    ),
    charts=tuple(
        Chart("forecast", "tokens_per_s", "auto", "bars", {"link_gb_per_s": speed}, title=f"{speed} GB/s")
        for speed in SPEEDS_GB
    ),
    conclude=conclude,
    jobs=jobs,
    replays=Replays((POLICY,), (), tuple(names())),
    max_events=50_000,
    ran_on=f"policy {POLICY}, a quarter of all experts in memory, 10 ms of compute per pass, modelled link",
)

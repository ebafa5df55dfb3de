"""How fast a trace is replayed: every policy, LRU at all sizes at once, and libCacheSim's LRU on the same accesses."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from hotset.cache import Controller, Scope, SlotPlan
from hotset.policies import names, parse
from hotset.sim import lru_curve
from hotset.trace import Trace
from hotset.trace.events import EventTable

from common import best_of, large_trace, publish

REPEATS = 5
FRACTIONS = (0.125, 0.25, 0.5)


def hotset_rates(events: EventTable) -> dict[str, dict[str, float]]:
    """Accesses per second, in millions, of every policy at every size, on one core."""
    return {name: {f"{share:g}": rate(events, name, share) for share in FRACTIONS} for name in names()}


def rate(events: EventTable, policy: str, share: float, scope: Scope = Scope.LAYER) -> float:
    """Million accesses per second of one policy at one size."""
    plan = SlotPlan(events.shape, int(share * events.shape.total_experts), scope)
    replay(plan, policy, events)  # compile
    return round(events.accesses / best_of(REPEATS, lambda: replay(plan, policy, events)) / 1e6, 1)


def replay(plan: SlotPlan, policy: str, events: EventTable) -> Any:
    """One cold replay."""
    return Controller(plan, parse(policy)).replay(events)


def libcachesim_rates(events: EventTable) -> dict[str, Any] | None:
    """libCacheSim's LRU through its Python binding: one cache for all layers, experts asked for one by one."""
    try:
        import libcachesim
    except ImportError:
        return None
    records = np.zeros(events.accesses, np.dtype([("t", "<u4"), ("id", "<u8"), ("sz", "<u4"), ("nxt", "<i8")]))
    records["id"] = np.repeat(events.layer, np.diff(events.start)) * events.shape.experts + events.expert + 1
    records["sz"] = 1
    records["nxt"] = -1
    rates = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "accesses.oracleGeneral"
        records.tofile(path)
        for fraction in FRACTIONS:
            slots = int(fraction * events.shape.total_experts)

            def work(slots: int = slots) -> None:
                reader = libcachesim.TraceReader(str(path), trace_type=libcachesim.TraceType.ORACLE_GENERAL_TRACE)
                libcachesim.LRU(slots, hashpower=16).process_trace(reader)

            rates[f"{fraction:g}"] = round(events.accesses / best_of(REPEATS, work) / 1e6, 1)
    return rates


def main() -> None:
    """Measure, print and publish."""
    name, trace = large_trace()
    events = Trace.events(trace)
    lru_curve(events)
    figures = {
        "trace": name,
        "accesses": events.accesses,
        "events": len(events),
        "unit": "million accesses per second, one core, after compilation, best of runs, by share of experts resident",
        "layer_scope": hotset_rates(events),
        "pool_scope_lru": {f"{share:g}": rate(events, "lru", share, Scope.POOL) for share in FRACTIONS},
        "libcachesim_lru": libcachesim_rates(events),
        "lru_all_sizes_s": {
            "layer": round(best_of(REPEATS, lambda: lru_curve(events)), 3),
            "pool": round(best_of(REPEATS, lambda: lru_curve(events, Scope.POOL)), 3),
        },
    }
    for policy, rates in figures["layer_scope"].items():
        print(f"{policy:>10}  " + "  ".join(f"{share}: {rate:6.1f} M/s" for share, rate in rates.items()))
    print("lru in one pool", figures["pool_scope_lru"])
    print("libCacheSim LRU", figures["libcachesim_lru"])
    print("LRU, all sizes at once", figures["lru_all_sizes_s"], "s")
    publish("replay_speed", figures)


if __name__ == "__main__":
    main()

"""What `nextuse` hits beside lru, blend and the optimum: public traces, reference workloads, and after a change.

``python benchmarks/next_use.py``; without the public traces beside the checkout those rows are left out. Decode hit
rates from a cold start, layer scope, prompts admit nothing. The share of the gap is of that from lru to the optimum.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import Any

import numpy as np

from hotset import reference
from hotset.cache import Controller, SlotPlan
from hotset.policies import parse
from hotset.sim import Sweep, simulate
from hotset.trace import Phase, Trace
from hotset.trace.combine import concat, interleave

from common import gpt_oss, publish, qwen_short

POLICIES = ("lru", "blend", "nextuse", "nextuse:admit=score", "nextuse:depth=1", "nextuse:streams=1")
BUDGETS = ("12.5%", "25%", "50%")
SHARES = (8, 4, 2)
ROWS = (1, 2, 3, 4, 8, 0)
"""Rows of staging; 0 sets no limit to what an event exchanges."""
FIRST = (32, 128)
"""Decode tokens after a change that are looked at."""


def traces() -> Iterator[tuple[str, Trace, int]]:
    """What is replayed, by name, and the number of streams."""
    public = gpt_oss()
    for streams in (1, 4, 16) if public is not None else ():
        yield f"gpt-oss-20b, {streams} streams", public, streams
    short = qwen_short()
    if short is not None:
        yield "qwen3-30b-a3b, short", short, 1
    domains = concat([reference.trace(name) for name in reference.DOMAINS])
    for streams in (1, 4, 16):
        yield f"14 domains one after the other, {streams} streams", domains, streams
    for name in ("users", "chat_it"):
        yield name, reference.trace(name), 1


def rates(trace: Trace, streams: int) -> dict[str, dict[str, dict[str, float]]]:
    """Hit rates and shares of the gap in percent, by budget and policy."""
    rows = simulate({"trace": trace}, Sweep(policies=POLICIES, budgets=BUDGETS, streams=streams)).rows
    found: dict[str, dict[str, dict[str, float]]] = {budget: {} for budget in BUDGETS}
    for row in rows:
        if row.start == "cold" and row.phase == "decode":
            gap = None if row.gap_closed is None else round(100 * row.gap_closed, 1)
            found[row.budget][row.policy] = {"hit_rate": round(100 * row.hit_rate, 2), "gap_closed": gap}
    return found


def by_staging(trace: Trace, streams: int) -> dict[str, dict[str, float]]:
    """Decode hit rates in percent by budget and rows of staging, of which each exchange within an event takes one."""
    events, shape = interleave(trace, streams).events(), trace.shape

    def rate(share: int, rows: int) -> float:
        plan = SlotPlan(shape, shape.total_experts // share, staging=rows)
        return round(100 * Controller(plan, parse("nextuse")).replay(events).counters.hit_rate(Phase.DECODE), 2)

    return {
        budget: {str(rows): rate(share, rows) for rows in ROWS} for share, budget in zip(SHARES, BUDGETS, strict=True)
    }


def after_a_change(policy: str, share: int, first: str, then: str) -> list[float]:
    """Hit rates in percent of the first decode tokens of a workload, in a cache that served another."""
    before, after = reference.trace(first), reference.trace(then)
    decoded = np.cumsum(after.phase == Phase.DECODE)
    after = after.take(slice(0, int(np.searchsorted(decoded, max(FIRST))) + 1))
    cache = Controller(SlotPlan(before.shape, before.shape.total_experts // share), parse(policy))
    events = concat([before, after]).events()
    replayed, begin = cache.replay(events), before.events()
    misses, sizes = replayed.misses[len(begin) :], np.diff(events.start)[len(begin) :]
    is_decode = events.phase[len(begin) :] == Phase.DECODE
    nth = np.cumsum(is_decode)
    chosen = [is_decode & (nth <= count * before.shape.layers) for count in FIRST]
    return [100 * float(1 - misses[some].sum() / sizes[some].sum()) for some in chosen]


def changes() -> dict[str, Any]:
    """All ordered pairs of domains: how far nextuse is behind the better of lru and blend, on average and at worst."""
    pairs, found = list(permutations(reference.DOMAINS, 2)), {}
    for share, budget in zip(SHARES, BUDGETS, strict=True):
        with ThreadPoolExecutor(2) as pool:
            by_policy = {
                policy: np.array(list(pool.map(lambda pair, p=policy, s=share: after_a_change(p, s, *pair), pairs)))
                for policy in ("lru", "blend", "nextuse")
            }
        behind = np.maximum(by_policy["lru"], by_policy["blend"]) - by_policy["nextuse"]
        found[budget] = {
            f"first {count} tokens": {
                **{policy: round(float(rate[:, at].mean()), 2) for policy, rate in by_policy.items()},
                "behind_the_better_mean": round(float(behind[:, at].mean()), 2),
                "behind_the_better_worst": round(float(behind[:, at].max()), 2),
            }
            for at, count in enumerate(FIRST)
        }
    return found


def main() -> None:
    """Measure, print and publish."""
    table = {}
    for name, trace, streams in traces():
        table[name] = rates(trace, streams)
        for budget, row in table[name].items():
            told = (f"{policy} {one['hit_rate']:.1f} ({one['gap_closed']})" for policy, one in row.items())
            print(f"{name}, {budget}:", *told, sep="  ", flush=True)
    figures: dict[str, Any] = {"unit": "decode hit rate in percent, cold start", "traces": table}
    public = gpt_oss()
    if public is not None:
        figures["by_rows_of_staging"] = {f"{streams} streams": by_staging(public, streams) for streams in (1, 4)}
        print(figures["by_rows_of_staging"])
    figures["after_a_change"] = changes()
    print(figures["after_a_change"])
    publish("next_use", figures)


if __name__ == "__main__":
    main()

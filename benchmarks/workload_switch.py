"""How fast each policy settles again when the workload changes in mid-session: Italian, then Python, then German."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset import reference
from hotset.cache import Controller, SlotPlan
from hotset.policies import parse
from hotset.trace import Phase, Trace
from hotset.trace.combine import concat
from hotset.trace.events import EventTable

from common import publish

WORKLOADS = ("it", "python", "de")
POLICIES = (
    "lru", "lfu", "lfru", "slru", "slru:hint=on", "slru:hint=on,hint_half_life=inf", "window", "window:tokens=auto",
    "decay", "decay:half_life=auto", "blend", "nextuse",
)  # fmt: skip
SHARES = {"12.5%": 0.125, "25%": 0.25, "50%": 0.5}
ORDERS = 100
SPAN = 32  # tokens of a moving mean: one request, so that the rise and fall within requests cancels
WITHIN = 2.0  # points
AFTER = 256  # tokens over which what a switch costs is added up

Curve = npt.NDArray[np.float64]


def sequence(traces: list[Trace], seed: int) -> EventTable:
    """One workload after the other, the requests of each in an order of their own."""
    rng = np.random.default_rng(seed)
    return concat([_shuffled(trace, rng) for trace in traces]).events()


def _shuffled(trace: Trace, rng: np.random.Generator) -> Trace:
    rows = [np.flatnonzero(trace.request == request) for request in rng.permutation(trace.requests)]
    return concat([trace.take(part) for part in rows])


def curve(events: EventTable, spec: str, share: float) -> Curve:
    """The hit rate of each decode token over all layers, in percent."""
    shape = events.shape
    plan = SlotPlan(shape, int(share * shape.total_experts))
    misses = Controller(plan, parse(spec)).replay(events).misses
    decode = events.phase == Phase.DECODE
    asked = np.diff(events.start)[decode].reshape(-1, shape.layers).sum(axis=1)
    return np.asarray(100 * (1 - misses[decode].reshape(-1, shape.layers).sum(axis=1) / asked))


def mean_curve(tables: list[EventTable], spec: str, share: float) -> Curve:
    """The mean over all orders, token by token."""
    return np.asarray(np.mean([curve(events, spec, share) for events in tables], axis=0))


def moving_mean(rates: Curve) -> Curve:
    """Entry t is the mean of SPAN tokens from t on."""
    return np.convolve(rates, np.full(SPAN, 1 / SPAN), mode="valid")


def settled_rate(rates: Curve) -> float:
    """The mean of the second half."""
    return float(rates[len(rates) // 2 :].mean())


def tokens_to_reach(rates: Curve, level: float) -> int | None:
    """The first token from which SPAN moving means in a row are within reach of a level."""
    near = moving_mean(rates) >= level - WITHIN
    runs = np.convolve(near, np.ones(SPAN), mode="valid") > SPAN - 0.5
    return int(np.argmax(runs)) if runs.any() else None


def describe(rates: Curve, lru: Curve, accesses: int) -> dict[str, Any]:
    """What one workload looks like to one policy, from its first token on."""
    settled = settled_rate(rates)
    lost = (settled - rates[:AFTER]).sum() / 100 * accesses
    behind = moving_mean(rates)[:AFTER] < moving_mean(lru)[:AFTER]
    return {
        "settled": round(settled, 2),
        "first_32_tokens": round(float(rates[:SPAN].mean()), 2),
        "first_256_tokens": round(float(rates[:AFTER].mean()), 2),
        "tokens_to_settle": tokens_to_reach(rates, settled),
        "tokens_to_lru_level": tokens_to_reach(rates, settled_rate(lru)),
        "hits_lost": round(float(lost), 1),
        "hits_lost_per_token": round(float(lost) / AFTER, 3),
        "moving_means_below_lru": int(behind.sum()),
    }


def measure(tables: list[EventTable], share: float) -> dict[str, dict[str, Any]]:
    """All policies at one size, by policy and workload."""
    with ThreadPoolExecutor() as pool:  # the replay is compiled and lets go of the lock
        curves = dict(zip(POLICIES, pool.map(lambda spec: mean_curve(tables, spec, share), POLICIES), strict=True))
    accesses = tables[0].shape.layers * tables[0].shape.top_k
    lru = np.split(curves["lru"], len(WORKLOADS))
    return {
        spec: {
            name: describe(part, base, accesses)
            for name, part, base in zip(WORKLOADS, np.split(whole, len(WORKLOADS)), lru, strict=True)
        }
        for spec, whole in curves.items()
    }


def claims(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Whether blend settles higher than lru, and no later, after each switch: at its own level, and at lru's."""
    blend, lru = found["blend"], found["lru"]
    switched = WORKLOADS[1:]
    return {
        "blend_settles_higher": all(blend[name]["settled"] > lru[name]["settled"] for name in switched),
        "blend_settles_no_later": _no_later(blend, lru, "tokens_to_settle"),
        "blend_reaches_lru_no_later": _no_later(blend, lru, "tokens_to_lru_level"),
        "blend_never_below_lru": all(blend[name]["moving_means_below_lru"] == 0 for name in switched),
    }


def _no_later(one: dict[str, Any], other: dict[str, Any], key: str) -> bool:
    return all(_tokens(one[name][key]) <= _tokens(other[name][key]) for name in WORKLOADS[1:])


def _tokens(found: int | None) -> float:
    return np.inf if found is None else found


def show(size: str, found: dict[str, dict[str, Any]]) -> None:
    """Print what happened after each switch."""
    titles = "  ".join(
        f"{f'settled {n}':>14} {'first 32':>8} {'tokens':>6} {'to lru':>6} {'lost':>6} {'<lru':>4}"
        for n in WORKLOADS[1:]
    )
    print(f"\n{size:<32}{titles}")
    for spec, rows in found.items():
        cells = (
            f"{row['settled']:14.1f} {row['first_32_tokens']:8.1f} {row['tokens_to_settle']!s:>6} "
            f"{row['tokens_to_lru_level']!s:>6} {row['hits_lost_per_token']:6.2f} {row['moving_means_below_lru']:4}"
            for row in (rows[name] for name in WORKLOADS[1:])
        )
        print(f"{spec:<32}{'  '.join(cells)}")
    print("; ".join(f"{claim.replace('_', ' ')}: {'yes' if holds else 'NO'}" for claim, holds in claims(found).items()))


def main() -> None:
    """Measure, print and publish."""
    traces = [reference.trace(name) for name in WORKLOADS]
    tables = [sequence(traces, seed) for seed in range(ORDERS)]
    table = {size: measure(tables, share) for size, share in SHARES.items()}
    for size, found in table.items():
        show(size, found)
    publish(
        "workload_switch",
        {
            "trace": f"reference model, {' -> '.join(WORKLOADS)}: {traces[0].count(Phase.DECODE)} decode tokens each, "
            f"no request twice in a workload, mean over {ORDERS} orders of requests (seeds 0 to {ORDERS - 1})",
            "unit": "decode hit rate in percent; layer scope; one stream; cold start before the first workload",
            "settled": "mean over the second half of a workload",
            "tokens_to_settle": f"the first token from which {SPAN} moving means in a row, each over the next {SPAN} "
            f"tokens, are at least settled - {WITHIN:g} points; null: never",
            "tokens_to_lru_level": "the same with the settled rate of lru: one bar for all",
            "hits_lost": f"settled less found, summed over the first {AFTER} tokens",
            "moving_means_below_lru": f"of the {AFTER} that begin after the switch",
            "claims": {size: claims(found) for size, found in table.items()},
            "sizes": table,
        },
    )


if __name__ == "__main__":
    main()

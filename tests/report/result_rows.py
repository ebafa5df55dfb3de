"""Hand-made rows, so that every figure of a report is known."""

from dataclasses import replace
from typing import Any

from hotset.sim import Result, Row

EXPERTS, CYCLE, EXPERT_BYTES = 768, 96, 26_542_080
BUDGETS = {"10%": 76, "25%": 192, "50%": 384}
RATES = {
    "lru": (0.40, 0.70, 0.90),
    "lfu": (0.42, 0.68, 0.86),
    "blend": (0.46, 0.76, 0.93),
    "belady": (0.55, 0.85, 0.96),
}


def row(**changes: Any) -> Row:
    """One decode row from a cold start; give `hit_rate` and what else matters."""
    slots = changes.get("budget_slots", 192)
    base = Row(
        trace="demo", policy="lru", scope="layer", streams=1, budget="25%", budget_slots=slots,
        budget_fraction=slots / EXPERTS, budget_cycles=slots / CYCLE, staging_slots=0, phase="decode", start="cold",
        hit_rate=0.5, misses_per_token=0.0, bytes_per_token=None, gap_closed=None, evictions=1234, hits=0, misses=0,
        staged=0, events=24_000, tokens=1000,
    )  # fmt: skip
    found = replace(base, **changes)
    found.misses_per_token = CYCLE * (1 - found.hit_rate)
    return found


def sized(found: Row) -> Row:
    """The row of a trace that states how large an expert is."""
    return replace(found, bytes_per_token=found.misses_per_token * EXPERT_BYTES)


def sweep(rates: dict[str, tuple[float, ...]] | None = None, **changes: Any) -> list[Row]:
    """Rows of some policies at three budgets, with the gaps filled in as the simulator does."""
    rates = rates or RATES
    rows = []
    for policy, found in rates.items():
        for (budget, slots), rate, low, high in zip(BUDGETS.items(), found, rates["lru"], rates["belady"], strict=True):
            gap = (rate - low) / (high - low) if high > low else None
            rows.append(row(policy=policy, budget=budget, budget_slots=slots, hit_rate=rate, gap_closed=gap, **changes))
    return rows


def result(*rows: Row) -> Result:
    return Result(list(rows))

"""What every policy hits on the public gpt-oss-20b trace, at 1, 4 and 16 streams and three sizes."""

from __future__ import annotations

from typing import Literal

import numpy as np

from hotset.sim import Row, Sweep, simulate
from hotset.sim.sweep import POLICIES
from hotset.trace import Trace

from common import gpt_oss, publish

BUDGETS = ("12.5%", "25%", "50%")
# The variants of blend (docs/log.md) were compared on requests from the front of this permutation, never beyond the
# 120th, so the rest can judge the one that was kept.
CHOSEN_ON = 120
PERMUTATION_SEED = 1
EXTRA = ("slru:hint=on", "decay:half_life=8", "blend:transitions=off", "blend:admit=always", "belady:bypass=off")


def rates(trace: Trace, streams: int, mode: Literal["batch", "turns"] = "batch") -> dict[str, dict[str, float]]:
    """Decode hit rates from a cold start, in percent, by budget and policy."""
    sweep = Sweep(policies=(*POLICIES, *EXTRA), budgets=BUDGETS, streams=streams, mode=mode)
    rows = simulate({"gpt-oss-20b": trace}, sweep).rows
    return {budget: {r.policy: _percent(r) for r in rows if _wanted(r, budget)} for budget in BUDGETS}


def judged(trace: Trace) -> dict[str, dict[str, dict[str, float]]]:
    """The same on the requests that no variant of blend was compared on."""
    rest = np.random.default_rng(PERMUTATION_SEED).permutation(trace.requests)[CHOSEN_ON:]
    return {str(streams): rates(trace.select(rest), streams) for streams in (1, 4, 16)}


def _wanted(row: Row, budget: str) -> bool:
    return row.budget == budget and row.start == ("warm" if row.policy == "static" else "cold")


def _percent(row: Row) -> float:
    return round(100 * row.hit_rate, 2)


def main() -> None:
    """Measure, print and publish; without the public trace there is nothing to measure."""
    trace = gpt_oss()
    if trace is None:
        print("the public gpt-oss-20b trace is not beside the checkout: skipped")
        return
    table = {str(streams): rates(trace, streams) for streams in (1, 4, 16)}
    table |= {f"{streams} in turns": rates(trace, streams, "turns") for streams in (4, 16)}
    for streams, budgets in table.items():
        for budget, found in budgets.items():
            print(
                f"{streams:>2} streams, {budget:>5}:", "  ".join(f"{name} {rate:.1f}" for name, rate in found.items())
            )
    publish(
        "policy_quality",
        {
            "trace": "gpt-oss-20b, all 92,453 decode tokens in recorded order",
            "unit": "decode hit rate in percent; layer scope; streams share passes unless in turns; cold start "
            "(static: fit on half)",
            "streams": table,
            "judged_on_180_requests": judged(trace),
        },
    )


if __name__ == "__main__":
    main()

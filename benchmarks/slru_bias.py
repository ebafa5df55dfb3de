"""What frequency adds to segmented LRU at equal slots, workload by workload, beside how skewed the workload is."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hotset import reference
from hotset.sim import Sweep, simulate
from hotset.trace import Phase, Trace

from common import gpt_oss, publish

BUDGETS = ("12.5%", "25%", "50%", "100%")
RECENCY, BIASED, ALL_TIME = "slru", "slru:hint=on", "slru:hint=on,hint_half_life=inf"
POLICIES = ("lru", RECENCY, BIASED, ALL_TIME, "blend", "belady")
CLEAR = 0.1  # points; less than this counts for neither
Rates = dict[str, dict[str, float]]


def rates(name: str, trace: Trace) -> Rates:
    """Decode hit rates from a cold start, in percent, by budget and policy."""
    rows = simulate({name: trace}, Sweep(policies=POLICIES, budgets=BUDGETS, fit=0.0)).rows
    found = {(row.budget, row.policy): 100 * row.hit_rate for row in rows if row.phase == "decode"}
    return {budget: {policy: round(found[budget, policy], 2) for policy in POLICIES} for budget in BUDGETS}


def skew(trace: Trace) -> dict[str, float]:
    """How unevenly decode uses the experts of a layer, as a mean over layers."""
    uses = np.sort(_uses(trace), axis=1)
    busiest = -(-uses.shape[1] // 4)
    share = uses[:, -busiest:].sum(axis=1) / uses.sum(axis=1)
    return {"gini": round(float(_gini(uses).mean()), 3), "top_quarter_share": round(float(share.mean()), 3)}


def _uses(trace: Trace) -> npt.NDArray[np.int64]:
    experts = trace.experts[trace.phase == Phase.DECODE]
    return np.stack(
        [np.bincount(column[column >= 0], minlength=trace.shape.experts) for column in experts.swapaxes(0, 1)]
    )


def _gini(rising: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """0 when all are used alike, near 1 when one is used alone."""
    number = rising.shape[1]
    rank = 2 * np.arange(1, number + 1) - number - 1
    return np.asarray((rank * rising).sum(axis=1) / (number * rising.sum(axis=1)))


def compare(table: dict[str, Rates], skews: dict[str, dict[str, float]], budget: str) -> dict[str, Any]:
    """What the bias gains over recency alone in the reference domains, and whether skew tells where."""
    gains = {name: table[name][budget][BIASED] - table[name][budget][RECENCY] for name in reference.DOMAINS}
    ginis = [skews[name]["gini"] for name in reference.DOMAINS]
    values = list(gains.values())
    varied = np.std(values) > 0
    return {
        "mean_gain": round(float(np.mean(values)), 2),
        "domains_where_biased_wins": sum(gain > CLEAR for gain in values),
        "domains_where_recency_wins": sum(gain < -CLEAR for gain in values),
        "domains": len(gains),
        "correlation_of_gain_and_gini": round(float(np.corrcoef(values, ginis)[0, 1]), 2) if varied else None,
        "mean_rates": {
            policy: round(float(np.mean([table[name][budget][policy] for name in reference.DOMAINS])), 2)
            for policy in POLICIES
        },
    }


def check_full_budget(table: dict[str, Rates]) -> None:
    """With a slot for every expert nothing is ever evicted, so all policies must hit alike."""
    for name, budgets in table.items():
        if len(set(budgets["100%"].values())) > 1:
            raise RuntimeError(f"{name}: at 100 % the policies differ: {budgets['100%']}")


def show(table: dict[str, Rates], skews: dict[str, dict[str, float]], summary: dict[str, Any]) -> None:
    """Print one table per budget."""
    for budget in BUDGETS:
        print(
            f"\n{budget:<12} gini  top quarter  " + "  ".join(f"{policy[-18:]:>18}" for policy in POLICIES) + "   gain"
        )
        for name, budgets in table.items():
            found = budgets[budget]
            columns = "  ".join(f"{found[policy]:18.2f}" for policy in POLICIES)
            skewed = f"{skews[name]['gini']:.3f}  {skews[name]['top_quarter_share']:11.3f}"
            print(f"{name:<11} {skewed}  {columns}  {found[BIASED] - found[RECENCY]:+5.2f}")
        found = summary[budget]
        print(
            f"mean gain {found['mean_gain']:+.2f}, wins in {found['domains_where_biased_wins']} of {found['domains']}"
        )


def main() -> None:
    """Measure, print and publish; the public trace is left out where it is not beside the checkout."""
    traces = {name: reference.trace(name) for name in reference.DOMAINS}
    public = gpt_oss()
    if public is not None:
        traces["gpt-oss-20b"] = public
    table = {name: rates(name, trace) for name, trace in traces.items()}
    skews = {name: skew(trace) for name, trace in traces.items()}
    check_full_budget(table)
    summary = {budget: compare(table, skews, budget) for budget in BUDGETS}
    show(table, skews, summary)
    publish(
        "slru_bias",
        {
            "traces": "the 14 domains of the reference model (8 layers x 64 experts, top 8; 832 decode tokens each) "
            "and gpt-oss-20b (24 layers x 32 experts, top 4; all 92,453 decode tokens), one stream",
            "unit": "decode hit rate in percent; layer scope; cold start; the gain is slru:hint=on less slru, "
            "and a win is more than 0.1 points",
            "note": "at 12.5 % a layer has as many slots as a token uses experts, so a policy that always admits keeps "
            "the last token's experts and no bias can show; only prompts, which fill empty slots, make a difference",
            "reference_domains": summary,
            "skew": skews,
            "rates": table,
        },
    )


if __name__ == "__main__":
    main()

"""What the policy is worth live on a CPU: bytes read and tokens per second of nextuse beside blend and LRU.

The inflated reference model (real routing, 4.4 GB of experts in bfloat16), greedy text, batch 1, one process at a time
in a control group that counts page cache too, so that a miss is read from the disk. Policies take turns within every
setting. Needs Linux with cgroup v1 and root.

python benchmarks/next_use_live.py --folder DIR      DIR holds, or will hold, 4.5 GB
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from cpu_speed import DEFAULT_READ_AHEAD_KIB, WIDTH, measure

from common import publish

POLICIES = ("lru", "blend", "nextuse")
BUDGETS = {"12.5%": 0.125, "25%": 0.25, "50%": 0.5}
WORKLOADS = ("it", "c")
EXPERTS_MIB, REST_MIB = 4224, 720
"""All experts; and the rest of the model with the process, compiled code and rows for staging and prefetch."""
TOKENS = 64


def one(folder: Path, policy: str, budget: str, workload: str) -> dict[str, Any]:
    """One run under the limit of its budget."""
    command = ["hotset_run.py", "--model", str(folder), "--memory", budget, "--policy", policy]
    limit = int(BUDGETS[budget] * EXPERTS_MIB) + REST_MIB
    row = measure(
        policy, command, [folder], limit_mib=limit, read_ahead=DEFAULT_READ_AHEAD_KIB, workload=workload, tokens=TOKENS
    )
    return row | {"budget": budget}


def table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians by budget, workload and policy, and their ratios to blend's of the same round."""
    found: dict[str, Any] = {}
    for budget in BUDGETS:
        for workload in WORKLOADS:
            mine = [row for row in rows if row["budget"] == budget and row["workload"] == workload]
            by_policy = {policy: [row for row in mine if row["engine"] == policy] for policy in POLICIES}
            found[f"{budget}, {workload}"] = {
                policy: {
                    "tokens_per_s": round(statistics.median(row["tokens_per_s"] for row in runs), 2),
                    "read_mb_per_token": round(statistics.median(row["read_mb_per_token"] for row in runs), 1),
                    "decode_hit_rate": round(100 * statistics.median(row["decode_hit_rate"] for row in runs), 2),
                    "speed_to_blend": [
                        round(row["tokens_per_s"] / other["tokens_per_s"], 3)
                        for row, other in zip(runs, by_policy["blend"], strict=True)
                    ],
                }
                for policy, runs in by_policy.items()
            }
    return found


def main() -> None:
    """Measure, print and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    folder = asked.folder / "w5632"
    if not (folder / "config.json").exists():
        from hotset import reference

        folder.parent.mkdir(parents=True, exist_ok=True)
        reference.inflate(WIDTH, folder)
    rows = [
        one(folder, policy, budget, workload)
        for budget in BUDGETS
        for workload in WORKLOADS
        for _ in range(asked.rounds)
        for policy in POLICIES
    ]
    if failed := [row for row in rows if "tokens_per_s" not in row]:
        sys.exit(f"{len(failed)} runs failed, the first: {failed[0]}")
    texts = {(row["workload"], row["budget"]): str(row["texts"]) for row in rows}
    same = all(str(row["texts"]) == texts[row["workload"], row["budget"]] for row in rows)
    found = table(rows)
    for setting, policies in found.items():
        print(setting, policies)
    publish("next_use_live", {"table": found, "same_text_by_all_policies": same, "runs": rows})


if __name__ == "__main__":
    main()

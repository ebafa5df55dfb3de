"""What one version of hotset costs beside another, on a CPU: the benchmarks of both checkouts in turns, best of rounds.

Each version runs its own scripts in processes of its own. Other work on the machine only ever adds, so the best round
of each figure counts. A ratio is this version's time over the other's, of rates the other way round: below 1 is faster.

python benchmarks/cpu_side_by_side.py --before FOLDER [--rounds 3] [--scripts event_latency replay_speed ...]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import ROOT, publish

PARTS = {
    "event_latency": ("by_scope",),
    "replay_speed": ("layer_scope", "pool_scope_lru"),
    "layer_overhead": ("times",),
    "tracking_overhead": ("route_us_per_event", "supervisor_us_per_pass", "live"),
    "import_time": ("import_s",),
}
"""The scripts, and which parts of their results are compared."""
RATES = {"replay_speed"}
"""Scripts whose figures are better when they are larger."""
KEPT = {"event_latency", "replay_speed", "import_time"}
"""Scripts all of whose numbers are times or rates; of the others only those below."""
STATISTICS = ("best_us", "median")
OTHERS = ("grouped_mm", "batched_mm", "statistics", "policy", "more_than", "share", "decode_hit", "tokens_per")
"""How keys begin that lead to times of stock, to differences of two times, or to no time."""


def numbers(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Every number of a document with the keys that lead to it."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, (*path, str(key)))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def is_compared(script: str, path: tuple[str, ...]) -> bool:
    """Whether a number is a time of hotset's own: not stock's, not the difference of two others."""
    if script in KEPT:
        return True
    return path[-1] in STATISTICS and not any(key.startswith(OTHERS) for key in path)


def figures(tree: Path, script: str) -> dict[str, float]:
    """Run one script of a checkout and read what it published."""
    own = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    path = tree / "benchmarks" / f"{script}.py"
    subprocess.run([sys.executable, "-W", "ignore", str(path)], cwd=tree, env=own, check=True, capture_output=True)
    document = json.loads((tree / "benchmarks" / "results" / f"{script}.json").read_text(encoding="utf-8"))
    parts = {part: document[part] for part in PARTS[script] if part in document}
    return {" / ".join(path): value for path, value in numbers(parts) if is_compared(script, path)}


def best(rounds: list[dict[str, float]], is_rate: bool) -> dict[str, float]:
    """The best round of every figure."""
    found: dict[str, list[float]] = defaultdict(list)
    for each in rounds:
        for name, value in each.items():
            found[name].append(value)
    return {name: (max if is_rate else min)(values) for name, values in found.items()}


def compared(before: dict[str, float], now: dict[str, float], is_rate: bool) -> dict[str, Any]:
    """Both versions and their ratios, figure by figure, and the mean ratio of the script."""
    rows = {}
    for name in before.keys() & now.keys():
        if before[name] > 0 and now[name] > 0:
            ratio = before[name] / now[name] if is_rate else now[name] / before[name]
            rows[name] = {"before": before[name], "now": now[name], "ratio": round(ratio, 3)}
    mean = math.exp(sum(math.log(row["ratio"]) for row in rows.values()) / len(rows))
    worst = max(rows, key=lambda name: rows[name]["ratio"])
    return {
        "mean_ratio": round(mean, 3),
        "worst_ratio": rows[worst]["ratio"],
        "worst": worst,
        "rows": dict(sorted(rows.items())),
    }


def main() -> None:
    """Measure both in turns, print the ratios and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the version to compare with")
    parser.add_argument("--commit", default="", help="what that checkout is of, for the record")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scripts", nargs="*", default=list(PARTS), choices=list(PARTS))
    options = parser.parse_args()
    trees = {"before": options.before.resolve(), "now": ROOT}
    results = {}
    for script in options.scripts:
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        for _ in range(options.rounds):
            for name, tree in trees.items():
                rounds[name].append(figures(tree, script))
        is_rate = script in RATES
        results[script] = compared(best(rounds["before"], is_rate), best(rounds["now"], is_rate), is_rate)
        print(script, *(f"{key} {results[script][key]}" for key in ("mean_ratio", "worst_ratio", "worst")), flush=True)
    publish("cpu_side_by_side", {"before_commit": options.commit, "rounds": options.rounds, "scripts": results})


if __name__ == "__main__":
    main()

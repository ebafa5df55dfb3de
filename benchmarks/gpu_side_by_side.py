"""Decode on a GPU by two versions of hotset in one run: the rows of gpu_decode.py, three times each, and their medians.

Each version runs in a process of its own, one after the other, with its own benchmarks; the other one is a checkout.

python benchmarks/gpu_side_by_side.py --before FOLDER [--settings gpt-oss-20b] [--routing FILE] [--rows 1.0 0.5 0.5p]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ROWS = ("1.0", "0.5", "0.5p", "0.25", "0.25p")

CHILD = """
import json, statistics, sys
tree, out, name, routing, rows = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5].split()
sys.path[:0] = [tree + "/src", tree + "/benchmarks"]
import gpu_decode
from gpu_engine import Bench, routing_of
from gpu_shapes import SHAPES
from hotset.trace import Trace
trace = Trace.load(routing) if routing else routing_of(SHAPES[name])
bench, found = Bench(SHAPES[name], "blend"), []
for row in rows:
    share, prefetch = float(row.rstrip("p")), row.endswith("p")
    trial = gpu_decode.Trial(bench, share, trace, guess=prefetch)
    trial.decoder.step(gpu_decode.WARM if share < 1 else 20)
    trial.handle.reset_stats()
    times = [trial.decoder.ms(gpu_decode.TIMED) for _ in range(3)]
    hit_rate = trial.handle.stats()["decode"]["hit_rate"]
    trial.undo()
    by_host = [] if prefetch else [trial.decoder.ms(gpu_decode.BY_HOST) for _ in range(3)]
    found.append({"share": share, "prefetch": "auto" if prefetch else "off", "hit_rate": hit_rate,
                  "ms_per_token": times, "by_host_ms_per_token": by_host})
    open(out, "w").write(json.dumps(found))
    trial.close()
bench.host.close()
"""


def measured(tree: Path, name: str, routing: str, rows: str) -> list[dict[str, Any]]:
    """The rows of one version."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        subprocess.run([sys.executable, "-c", CHILD, str(tree), str(out), name, routing, rows], check=True)
        found: list[dict[str, Any]] = json.loads(out.read_text())
        return found


def median(values: list[float]) -> float | None:
    """The middle one of three."""
    return sorted(values)[len(values) // 2] if values else None


def ratio(after: list[float], before: list[float]) -> float | None:
    """Of the medians."""
    now, then = median(after), median(before)
    return None if now is None or then is None else now / then


def main() -> None:
    """Measure both, print the ratios and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the version to compare with")
    parser.add_argument("--settings", nargs="*", default=["gpt-oss-20b"])
    parser.add_argument("--routing", default="", help="a trace to force instead of the public one")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), help="shares of the experts; with a p: with prefetch")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from common import publish

    for name in options.settings:
        rows = " ".join(options.rows)
        before = measured(options.before, name, options.routing, rows)
        after = measured(ROOT, name, options.routing, rows)
        for mine, other in zip(after, before, strict=True):
            mine["before"] = {key: other[key] for key in ("ms_per_token", "by_host_ms_per_token", "hit_rate")}
            mine["ratio"] = ratio(mine["ms_per_token"], other["ms_per_token"])
            mine["by_host_ratio"] = ratio(mine["by_host_ms_per_token"], other["by_host_ms_per_token"])
            print(name, mine["share"], mine["prefetch"], mine["ratio"], mine["by_host_ratio"], flush=True)
        publish(f"gpu_side_by_side_{name}", {"rows": after})


if __name__ == "__main__":
    main()

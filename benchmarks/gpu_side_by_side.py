"""Decode on a GPU by two versions of hotset in one run: the rows of gpu_decode.py, three times each, and their medians.

Each version has a process of its own, with its own benchmarks; the other one is a checkout. Both make their experts at
once, and then take turns, row by row: while one measures the other waits. RAM must hold the experts twice; `--layers`
takes fewer of them.

python benchmarks/gpu_side_by_side.py --before FOLDER [--settings gpt-oss-20b] [--routing FILE] [--rows 1.0 0.5 0.5p]
    [--layers 36] [--warm 140] [--timed 60]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ROWS = ("1.0", "0.5", "0.5p", "0.25", "0.25p")

CHILD = """
import dataclasses, inspect, json, sys, time
tree, out, other, given = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
sys.path[:0] = [tree + "/src", tree + "/benchmarks"]
import gpu_decode
from gpu_engine import Bench, routing_of
from gpu_shapes import SHAPES
from hotset.trace import Trace

def measured(bench, trace, share, prefetch):
    named = "prefetch" if "prefetch" in inspect.signature(gpu_decode.Trial).parameters else "guess"  # of before
    trial = gpu_decode.Trial(bench, share, trace, **{named: prefetch})
    trial.decoder.step(given["warm"] if share < 1 else 20)
    trial.handle.reset_stats()
    times = [trial.decoder.ms(given["timed"]) for _ in range(3)]
    hit_rate = trial.handle.stats()["decode"]["hit_rate"]
    trial.undo()
    by_host = [] if prefetch else [trial.decoder.ms(gpu_decode.BY_HOST) for _ in range(3)]
    trial.close()
    return {"share": share, "prefetch": "auto" if prefetch else "off", "hit_rate": hit_rate,
            "ms_per_token": times, "by_host_ms_per_token": by_host}

shape = SHAPES[given["name"]]
if given["layers"]:
    shape = dataclasses.replace(shape, options=shape.options | {"num_hidden_layers": given["layers"]})
trace = Trace.load(given["routing"]) if given["routing"] else routing_of(shape)
bench, deadline = Bench(shape, "blend"), time.monotonic() + 600
for number, row in enumerate(given["rows"]):
    while len(open(other).readlines()) < number + given["turn"]:
        if time.monotonic() > deadline:
            raise SystemExit("the other version does not come to an end")
        time.sleep(0.1)
    found = measured(bench, trace, float(row.rstrip("p")), row.endswith("p"))
    with open(out, "a") as done:
        done.write(json.dumps(found) + chr(10))
bench.host.close()
"""


def measured(before: Path, given: dict[str, Any], limit_s: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of both versions, as far as both have them: the one before goes first in each."""
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / name for name in ("before", "after")]
        for out in outs:
            out.touch()
        runs = []
        for turn, tree in enumerate((before, ROOT)):
            files = [str(outs[turn]), str(outs[1 - turn])]
            command = [sys.executable, "-c", CHILD, str(tree), *files, json.dumps(given | {"turn": turn})]
            runs.append(subprocess.Popen(command))
        deadline = time.monotonic() + limit_s
        for run in runs:
            try:
                run.wait(max(deadline - time.monotonic(), 1))
            except subprocess.TimeoutExpired:
                run.kill()
        found = [[json.loads(line) for line in out.read_text().splitlines()] for out in outs]
        return found[0], found[1]


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
    parser.add_argument("--layers", type=int, default=0, help="of the model, where not all are wanted")
    parser.add_argument("--warm", type=int, default=140, help="tokens before a row is timed")
    parser.add_argument("--timed", type=int, default=60, help="tokens of each of the three stretches")
    parser.add_argument("--limit", type=float, default=1200, help="seconds of a setting, at most")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from common import publish

    given = {name: getattr(options, name) for name in ("routing", "rows", "layers", "warm", "timed")}
    for name in options.settings:
        before, after = measured(options.before, given | {"name": name}, options.limit)
        for mine, other in zip(after, before, strict=False):
            mine["before"] = {key: other[key] for key in ("ms_per_token", "by_host_ms_per_token", "hit_rate")}
            mine["ratio"] = ratio(mine["ms_per_token"], other["ms_per_token"])
            mine["by_host_ratio"] = ratio(mine["by_host_ms_per_token"], other["by_host_ms_per_token"])
            times = [f"{value:.3f}" for value in (median(other["ms_per_token"]), median(mine["ms_per_token"])) if value]
            print(name, mine["share"], mine["prefetch"], *times, mine["ratio"], mine["by_host_ratio"], flush=True)
        settings = {key: given[key] for key in ("layers", "warm", "timed")}
        publish(f"gpu_side_by_side_{name}", {**settings, "rows": after})


if __name__ == "__main__":
    main()

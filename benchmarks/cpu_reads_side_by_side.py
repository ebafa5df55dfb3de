"""Tokens per second of experts read from disk under a memory limit, by several versions of hotset in turns.

The inflated reference model, packed, bfloat16, greedy text, batch 1, in a control group that counts page cache too: the
setting of `cpu_speed.py`. Slots are the same in all versions, so that the cache is, and then as `auto` chooses. Each
version's own engine reads one pack. Needs Linux with cgroup v1 and root.

python benchmarks/cpu_reads_side_by_side.py --folder DIR --before CHECKOUT [--before CHECKOUT ...]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from cpu_speed import DEFAULT_READ_AHEAD_KIB, LIMIT_MIB, TOKENS, WIDTH, measure

from common import ROOT, publish

MEMORY = ("80 slots", "auto")
WORKLOADS = ("it", "c")


def prepare(folder: Path) -> None:
    """Make the checkpoint and its pack, where they are missing."""
    from hotset import reference

    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "w5632" / "config.json").exists():
        reference.inflate(WIDTH, folder / "w5632")
    if not (folder / "packed").exists():
        command = [sys.executable, "-m", "hotset", "pack", str(folder / "w5632"), "-o", str(folder / "packed")]
        subprocess.run(command, check=True)


def one(tree: Path, name: str, folder: Path, memory: str, workload: str) -> dict[str, Any]:
    """One run of one version."""
    before, os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH", ""), str(tree / "src")
    try:
        command = ["hotset_run.py", "--model", str(folder / "packed"), "--memory", memory]
        row = measure(
            name, command, [folder / "packed"], limit_mib=LIMIT_MIB, read_ahead=DEFAULT_READ_AHEAD_KIB,
            workload=workload, tokens=TOKENS,
        )  # fmt: skip
    finally:
        os.environ["PYTHONPATH"] = before
    return row | {"memory": memory}


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians of each setting and version."""
    settings = dict.fromkeys((row["memory"], row["workload"], row["engine"]) for row in rows)
    found = []
    for setting in settings:
        mine = [row for row in rows if (row["memory"], row["workload"], row["engine"]) == setting]
        figures = {
            key: round(statistics.median(row[key] for row in mine), 3)
            for key in ("tokens_per_s", "read_mb_per_token", "decode_hit_rate", "slots", "peak_mib", "prefill_s")
        }
        runs = [round(row["tokens_per_s"], 2) for row in mine]
        found.append(dict(zip(("memory", "workload", "version"), setting, strict=True)) | figures | {"runs": runs})
    return found


def main() -> None:
    """Measure, print and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--before", type=Path, action="append", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    prepare(asked.folder)
    versions = {_commit(tree): tree.resolve() for tree in asked.before} | {"now": ROOT}
    settings = [(memory, workload) for memory in MEMORY for workload in WORKLOADS]
    for name, tree in versions.items():  # compiles, and is not counted
        one(tree, name, asked.folder, MEMORY[0], WORKLOADS[0])
    rows = [
        one(tree, name, asked.folder, memory, workload)
        for _ in range(asked.rounds)
        for memory, workload in settings
        for name, tree in versions.items()
    ]
    if failed := [row for row in rows if "tokens_per_s" not in row]:
        sys.exit(f"{len(failed)} runs failed, the first: {failed[0]}")
    texts = {row["workload"]: row["texts"] for row in rows}
    found = table(rows)
    for row in found:
        print(row)
    publish(
        "cpu_reads_side_by_side",
        {
            "limit_mib": LIMIT_MIB,
            "table": found,
            "same_text_by_all": all(row["texts"] == texts[row["workload"]] for row in rows),
            "runs": rows,
        },
    )


def _commit(tree: Path) -> str:
    """The commit of a checkout."""
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()

"""Random cases in child processes, so that one that crashes or hangs the interpreter is seen and named."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hotset.errors import HotsetError

BATCH = 100
BATCH_SECONDS = 900
MAX_LETTERS = 1200
FAULT = "FAULT"

Case = Callable[[int], str]
"""Runs the case of a seed; returns what kind it was, and raises what it raises."""


def attempt(case: Case, seed: int) -> str:
    """One case; says how it ended: anything but a return or one line of HotsetError is a fault."""
    try:
        return f"returned {case(seed)}"
    except HotsetError as error:
        kind, text = getattr(error, "kind", ""), str(error)
        fine = "\n" not in text and len(text) <= MAX_LETTERS
        return (
            f"refused {kind}" if fine else f"{FAULT} {seed}: the message is long or has several lines: {text[:200]!r}"
        )
    except BaseException as error:
        return f"{FAULT} {seed}: {type(error).__name__}: {str(error)[:300]!r}"


def work(case: Case, first: int, count: int, memory_bytes: int) -> None:
    """What a child does: every case is announced, so that the last one is known if the child dies."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    for seed in range(first, first + count):
        print(f"try {seed}", flush=True)
        print(attempt(case, seed), flush=True)
    print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}", flush=True)


def batch(script: Path, first: int, count: int) -> list[str]:
    """Run some cases in a child; returns how each ended."""
    command = [sys.executable, str(script), "--worker", "--seed", str(first), "--count", str(count)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BATCH_SECONDS)
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode().splitlines()
        return [f"{FAULT} a child hung after {said[-1] if said else 'nothing'}"]
    lines = done.stdout.splitlines()
    ends = [line for line in lines if not line.startswith("try ")]
    if done.returncode:
        last = lines[-1] if lines else "nothing"
        ends.append(f"{FAULT} after {last}: the child ended with {done.returncode}: {done.stderr[-300:]!r}")
    return ends


def run(script: Path, case: Case, name: str, memory_bytes: int, about: str) -> None:
    """The command line of a stress script: run all batches, print, publish, and fail if there was a fault."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--dry", action="store_true", help="write no result")
    asked = parser.parse_args()
    if asked.worker:
        work(case, asked.seed, asked.count, memory_bytes)
        return
    ends: list[str] = []
    for first in range(0, asked.count, BATCH):
        ends += batch(script, asked.seed * 1_000_000 + first, min(BATCH, asked.count - first))
    faults = [end for end in ends if end.startswith(FAULT)]
    peaks = [int(end.split()[1]) for end in ends if end.startswith("peak ")]
    counts = Counter(end.strip() for end in ends if end.startswith(("returned", "refused")))
    for end, number in sorted(counts.items()):
        print(f"{number:7,}  {end}")
    print(*faults, sep="\n")
    print(f"{sum(counts.values()):,} cases, {len(faults)} faults, at most {max(peaks, default=0):,} MiB of memory")
    if not asked.dry:
        _publish(name, asked.seed, counts, faults, max(peaks, default=0), memory_bytes)
    sys.exit(bool(faults))


def _publish(
    name: str, seed: int, counts: Counter[str], faults: list[str], peak_mib: int, memory_bytes: int
) -> None:  # fmt: skip
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from importlib.metadata import version

    from common import publish

    figures = {
        "cases": sum(counts.values()),
        "seed": seed,
        "refused": sum(number for end, number in counts.items() if end.startswith("refused")),
        "returned": sum(number for end, number in counts.items() if end.startswith("returned")),
        "faults": len(faults),
        "by_kind": dict(sorted(counts.items())),
        "peak_memory_mib": peak_mib,
        "memory_limit_mib": memory_bytes >> 20,
        "versions": {each: version(each) for each in ("hotset", "numpy", "numba", "safetensors")},
    }
    publish(name, figures)

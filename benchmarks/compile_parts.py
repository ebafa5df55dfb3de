"""What each part of the code that is compiled for a machine costs: processor time of a fresh process with no folder.

The processor time of importing, which is measured by a part that is on disk already, is taken off.

python benchmarks/compile_parts.py      Linux, macOS
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from hotset import ahead
from hotset.sim.sweep import Replays

from common import publish

GROUPS = {
    "a live cache, blend and gate": ahead.parts_of("blend"),
    "the usual replays": ahead.usual_parts(),
    "replays by eam": ahead.parts_of_replays(Replays(("eam",))),
    "a figure of simulate": [ahead.Part("curve")],
    "judging gate": ahead.parts_of_replays(Replays(judged=("gate",))),
    "judging best": ahead.parts_of_replays(Replays(judged=("best",))),
    "prefetch by gate over a link": ahead.parts_of_replays(Replays(prefetched=("gate",))),
    "products of int4": [ahead.Part("products", "integer:short=on 256x32 64x256")],
}


def seconds(part: ahead.Part, folder: Path) -> float:
    """Processor time of a process that compiles, or loads, a part."""
    words = [sys.executable, "-W", "ignore", "-m", "hotset.ahead", *part]
    running = subprocess.Popen(words, env={**os.environ, "NUMBA_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"})
    _, status, used = os.wait4(running.pid, 0)
    running.returncode = os.waitstatus_to_exitcode(status)
    if running.returncode:
        raise SystemExit(f"{part} was not compiled")
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Compile every part on its own, print the groups, and publish."""
    found: dict[str, dict[str, float]] = {}
    for group, parts in GROUPS.items():
        for part in parts:
            with tempfile.TemporaryDirectory(prefix="hotset-parts-") as folder:
                cold, warm = (seconds(part, Path(folder)) for _ in range(2))
            found.setdefault(group, {})[" ".join(part).strip()] = round(cold - warm, 2)
        print(f"{group}: {sum(found[group].values()):.1f} s of {len(parts)} parts", flush=True)
    publish("compile_parts", {"seconds": found})


if __name__ == "__main__":
    main()

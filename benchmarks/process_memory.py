"""`--process-memory` is held: `hotset run` in control groups of just that limit, and the peak of the same run outside.

A control group counts the page cache, too, and kills what goes beyond its limit; `peak_rss_bytes` is the process's own
peak (VmHWM), mapped files included. Linux, cgroup v1, root.

python benchmarks/process_memory.py --model DIR      DIR as made by hotset.reference.inflate(5632, DIR); made if missing
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from hotset import reference
from hotset.shape import format_size, parse_size

from common import RESULTS, publish
from limits import run as run_limited

LIMITS = ("1200MiB", "1536MiB", "2GiB", "3GiB")
PROMPT_WORDS, NEW_TOKENS = 400, 32

CHILD = """
import contextlib, io, json, sys
from hotset.cli.app import app
model, limit, prompt, tokens = sys.argv[1:]
words = ["run", model, "--process-memory", limit, "-p", prompt, "--max-new-tokens", tokens, "--greedy", "--json"]
out = io.StringIO()
with contextlib.redirect_stdout(out):
    app(words, standalone_mode=False)
found = json.loads(out.getvalue())
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
print(json.dumps({
    "peak_rss_bytes": int(status["VmHWM"].split()[0]) * 1024,
    **{key: found[key] for key in ("resident_bytes", "prompt_tokens", "new_tokens", "decode_hit_rate", "tokens_per_s")},
}))
"""


def one(model: Path, limit: str) -> dict[str, Any]:
    """The same run twice: in a group of the limit, and free."""
    prompt = " ".join(["mercato"] * PROMPT_WORDS)
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(model), limit, prompt, str(NEW_TOKENS)]
    ended = run_limited(command, parse_size(limit))
    free = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        "limit": limit,
        "limit_bytes": parse_size(limit),
        "outcome": "killed" if ended.oom_killed else "worked" if ended.result else "failed",
        "why": ended.stderr_tail[-300:],
        "peak_group_bytes": ended.max_usage_bytes,
        "limit_hits": ended.limit_hits,
        "in_group": ended.result,
        "free": json.loads(free.splitlines()[-1]),
    }


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=RESULTS.parents[1] / "out" / "cpu_speed" / "w5632")
    options = parser.parse_args()
    if not (options.model / "config.json").exists():
        reference.inflate(5632, options.model)
    rows = []
    for limit in LIMITS:
        rows.append(one(options.model, limit))
        row, free = rows[-1], rows[-1]["free"]
        print(
            f"{limit:>8}: {row['outcome']}, peak outside of a group {format_size(free['peak_rss_bytes'])}, "
            f"{format_size(free['resident_bytes'])} of experts, limit hits {row['limit_hits']} {row['why']}",
            flush=True,
        )
    size = sum(file.stat().st_size for file in options.model.glob("*.safetensors"))
    publish("process_memory", {"checkpoint_bytes": size, "new_tokens": NEW_TOKENS, "rows": rows})


if __name__ == "__main__":
    main()

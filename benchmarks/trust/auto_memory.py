"""`--memory auto` under hard limits: 27 control groups, each with its own process, and a prompt of 32,000 tokens.

Every process loads the inflated reference model with `memory="auto"` and generates from a prompt; all but the first
sequence of a batch are padded, so that attention needs a mask. `killed` is the kernel's doing; `refused` is a line of
hotset's before the work. Where the sequences together are longer than the default context, it is asked for. Needs Linux
with cgroup v1, and root.

python benchmarks/trust/auto_memory.py --model DIR      DIR as made by hotset.reference.inflate(2816, DIR), if missing
"""

from __future__ import annotations

import argparse
import random
import sys
from itertools import product
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "peers")]

from hotset import reference  # noqa: E402

from common import RESULTS, publish  # noqa: E402
from limits import run as run_limited  # noqa: E402

LIMITS_MIB = (800, 1200, 2000)
PROMPTS = (500, 1500, 4000)
BATCHES = (1, 2, 4)
LONG = (2000, 32_000, 1)
NEW_TOKENS = 8

CHILD = """
import json, sys
import torch
from transformers import AutoConfig
from transformers.utils import logging
logging.disable_progress_bar()
torch.set_num_threads(1)
import hotset
from hotset.errors import HotsetError
path, prompt, batch, context = sys.argv[1], *map(int, sys.argv[2:])
config = AutoConfig.from_pretrained(path)
config.max_position_embeddings = max(config.max_position_embeddings, prompt + 64)
said = {"outcome": "worked"}
try:
    model = hotset.load(path, memory="auto", device="cpu", config=config, **({"context": context} if context else {}))
    said["slots"] = model.hotset.stats()["slots"]
    ids = torch.randint(10, 8000, (batch, prompt), generator=torch.Generator().manual_seed(prompt + batch))
    mask = torch.ones_like(ids)
    mask[1:, : prompt // 4] = 0
    length = dict(max_new_tokens=NEW, min_new_tokens=NEW)
    out = model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **length)
    said["text"] = out[:, prompt:].tolist()
except HotsetError as error:
    said |= {"outcome": "refused", "line": str(error)}
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
said["peak_rss_bytes"] = int(status["VmHWM"].split()[0]) * 1024
print(json.dumps(said))
""".replace("NEW", str(NEW_TOKENS))


def command(model: Path, prompt: int, batch: int, context: int) -> list[str]:
    """One run in a process of its own."""
    words = [str(model), str(prompt), str(batch), str(context)]
    return [sys.executable, "-W", "ignore", "-c", CHILD, *words]


def one(model: Path, limit_mib: int, prompt: int, batch: int, context: int, timeout_s: float) -> dict[str, Any]:
    """Load and generate in a group of this limit, and say how it ended."""
    ended = run_limited(command(model, prompt, batch, context), limit_mib << 20, timeout_s)
    found = ended.result or {"outcome": "killed" if ended.oom_killed else "failed", "line": ended.stderr_tail[-300:]}
    return {
        "limit_mib": limit_mib,
        "prompt": prompt,
        "batch": batch,
        "seconds": round(ended.seconds, 1),
        "peak_group_bytes": ended.max_usage_bytes,
        "limit_hits": ended.limit_hits,
        **found,
    }


def main() -> None:
    """Run the grid, print it as it comes, and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=RESULTS.parents[1] / "out" / "cpu_speed" / "w2816")
    parser.add_argument("--count", type=int, default=27, help="groups of the grid, drawn at random if fewer than all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-long", action="store_true", help="without the prompt of 32,000 tokens")
    parser.add_argument("--timeout", type=float, default=900.0)
    options = parser.parse_args()
    if not (options.model / "config.json").exists():
        reference.inflate(2816, options.model)
    grid = list(product(LIMITS_MIB, PROMPTS, BATCHES))
    if options.count < len(grid):
        grid = sorted(random.Random(options.seed).sample(grid, options.count))  # noqa: S311
    rows = []
    for limit, prompt, batch in grid + ([] if options.no_long else [LONG]):
        context = prompt * batch + 256 if prompt * batch > 4096 else 0  # 0: as it is by default
        rows.append(one(options.model, limit, prompt, batch, context, options.timeout))
        show(rows[-1])
    report(rows)


def show(row: dict[str, Any]) -> None:
    """One group for people."""
    said, group, own = row.get("line", ""), row["peak_group_bytes"] >> 20, row.get("peak_rss_bytes", 0) >> 20
    print(
        f"{row['limit_mib']:>5} MiB  {row['batch']} x {row['prompt']:<6} {row['outcome']:<8} "
        f"{row.get('slots', 0):>4} slots  peak {group} MiB, rss {own} MiB  {row['seconds']:.0f} s  {said}",
        flush=True,
    )


def report(rows: list[dict[str, Any]]) -> None:
    """Count and publish."""
    grid, long = [r for r in rows if r["prompt"] != LONG[1]], [r for r in rows if r["prompt"] == LONG[1]]
    counts = {word: sum(row["outcome"] == word for row in grid) for word in ("worked", "refused", "killed", "failed")}
    print(counts, [row["outcome"] for row in long])
    publish("trust_auto_memory", {"groups": len(grid), **counts, "new_tokens": NEW_TOKENS, "rows": rows})


if __name__ == "__main__":
    main()

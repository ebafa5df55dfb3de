"""How much memory hotset takes beyond its budget: peak resident set of fresh processes, load and generation included.

What a process needs anyway (libraries, the rest of the model, activations) is what stock transformers takes for the
small reference model, less its experts: the inflated model differs from it in nothing but the experts.

python benchmarks/memory.py --model DIR      DIR as made by hotset.reference.inflate(5632, DIR); made if missing
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from hotset import reference
from hotset.shape import format_size, parse_size

from common import RESULTS, publish

BUDGETS = ("256MiB", "512MiB", "1GiB", "2GiB")
TOKENS, PROMPT_TOKENS = 32, 500

CHILD = """
import json, sys, torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging
logging.disable_progress_bar()
torch.set_num_threads(2)
path, memory = sys.argv[1:3]
if memory == "stock":
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
else:
    import hotset
    model = hotset.load(path, memory=memory, device="cpu")
ids = torch.randint(10, 4000, (1, {prompt}), generator=torch.Generator().manual_seed(0))
model.generate(ids, max_new_tokens={tokens}, min_new_tokens={tokens}, do_sample=False, pad_token_id=0)
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
held = model.hotset.stats()["resident_bytes"] if memory != "stock" else 0
print(json.dumps({{"peak": int(status["VmHWM"].split()[0]) * 1024, "held": held}}))
"""


def run(path: Path, memory: str) -> dict[str, int]:
    """Load and generate in a fresh process, and say what it took."""
    code = CHILD.format(prompt=PROMPT_TOKENS, tokens=TOKENS)
    command = [sys.executable, "-W", "ignore", "-c", code, str(path), memory]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    figures: dict[str, int] = json.loads(out.splitlines()[-1])
    return figures


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=RESULTS.parents[1] / "out" / "cpu_speed" / "w5632")
    options = parser.parse_args()
    if not (options.model / "config.json").exists():
        reference.inflate(5632, options.model)
    stock = run(reference.path(), "stock")
    small_experts = reference.trace("it").shape.expert_bytes or 0
    rest = stock["peak"] - small_experts * 8 * 64
    rows: list[dict[str, Any]] = []
    for memory in BUDGETS:
        found = run(options.model, memory)
        beyond = found["peak"] - rest - parse_size(memory)
        rows.append(
            {"budget": memory, "peak_bytes": found["peak"], "held_bytes": found["held"], "beyond_bytes": beyond}
        )
        print(f"{memory:>8}: peak {format_size(found['peak'])}, {format_size(beyond)} beyond the budget and the rest")
    size = sum(file.stat().st_size for file in options.model.glob("*.safetensors"))
    publish(
        "memory",
        {
            "checkpoint_bytes": size,
            "prompt_tokens": PROMPT_TOKENS,
            "new_tokens": TOKENS,
            "stock_small_peak_bytes": stock["peak"],
            "rest_bytes": rest,
            "rows": rows,
            "constant_bytes": max(row["beyond_bytes"] for row in rows),
        },
    )


if __name__ == "__main__":
    main()

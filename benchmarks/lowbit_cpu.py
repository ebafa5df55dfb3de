"""Tokens per second of packed experts on a CPU: int4 and int8 beside bfloat16, and beside llama.cpp with as many bits.

The inflated reference model of cpu_speed.py (4.4 GB of experts in bfloat16), greedy text, batch 1, one process at a
time in a control group that counts page cache too. llama.cpp's files are made by its own quantiser, experts in Q4_0 or
Q4_K and the rest in bfloat16, and mapped. Kinds alternate. Needs Linux with cgroup v1, root, and the extra `bench`.

python benchmarks/lowbit_cpu.py --folder DIR      DIR holds, or will hold, some 15 GB
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from cpu_speed import DEFAULT_READ_AHEAD_KIB, LIMIT_MIB, PEERS, PROMPTS, ROOMY_MIB, TOKENS, WIDTH, measure

from common import RESULTS, publish

SHARES = (0.36, 0.60)
"""Of a file's size: what memory holds of it beside the process."""
PROCESS_MIB = 300
PACKS = {"bf16": "auto", "int8": "int8", "int4": "int4"}
BLOCKS = ("Q4_0", "Q4_K")
Engine = tuple[list[str], list[Path]]


def prepare(folder: Path) -> None:
    """Make what is missing. Scales are not searched for: what they are has no part in how long a product takes."""
    from hotset import reference
    from hotset.formats import _search
    from hotset.models.packing import pack

    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "w5632" / "config.json").exists():
        reference.inflate(WIDTH, folder / "w5632")
    _search.STEPS.update({bits: [1.0] for bits in _search.STEPS})
    for name, experts in PACKS.items():
        if not (folder / name).exists():
            pack(folder / "w5632", folder / name, experts=experts)
    for kind in BLOCKS:
        out = folder / f"{kind}.gguf"
        command = ["--model", str(folder / "w5632"), "--out", str(out), "--experts", kind]
        if not out.exists():
            subprocess.run([sys.executable, str(PEERS / "gguf_export.py"), *command], check=True)


def hotset(folder: Path, name: str, memory: str = "auto") -> Engine:
    """A pack through hotset."""
    return ["hotset_run.py", "--model", str(folder / name), "--memory", memory], [folder / name]


def llama(folder: Path, kind: str) -> Engine:
    """The model through llama.cpp in blocks of a type."""
    gguf = folder / f"{kind}.gguf"
    return ["llamacpp.py", "--model", str(folder / "w5632"), "--gguf", str(gguf)], [gguf]


def in_turn(engines: dict[str, Engine], limit_mib: int, repeats: int, tokens: int) -> list[dict[str, Any]]:
    """All engines, one after another, several times."""
    return [
        measure(
            name, command, cold, limit_mib=limit_mib, read_ahead=DEFAULT_READ_AHEAD_KIB, workload="it", tokens=tokens
        )
        for _ in range(repeats)
        for name, (command, cold) in engines.items()
    ]


def row_of(what: str, limit_mib: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of every engine under one limit, with all runs."""
    speeds: dict[str, list[float]] = {}
    for row in rows:
        speeds.setdefault(row["engine"], []).extend([row["tokens_per_s"]] if "tokens_per_s" in row else [])
    medians = {name: statistics.median(found) for name, found in speeds.items() if found}
    return {"what": what, "limit_mib": limit_mib, "median_tokens_per_s": medians, "runs": speeds}


def ratios(row: dict[str, Any]) -> dict[str, float]:
    """How many times as fast as its peers hotset's int4 is."""
    medians = row["median_tokens_per_s"]
    own = medians.get("hotset, int4")
    others = {name: speed for name, speed in medians.items() if name != "hotset, int4"}
    return {} if own is None else {name: own / speed for name, speed in others.items()}


def main() -> None:
    """Prepare, measure, publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=RESULTS.parents[1] / "out" / "lowbit_cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    options = parser.parse_args()
    folder = options.folder
    prepare(folder)
    packs = {f"hotset, {name}": hotset(folder, name) for name in PACKS}
    beside = {"hotset, int4": packs["hotset, int4"], **{f"llama.cpp, {k}": llama(folder, k) for k in BLOCKS}}
    whole = {"hotset, int4": hotset(folder, "int4", "100%"), **{f"llama.cpp, {k}": llama(folder, k) for k in BLOCKS}}
    whole["hotset, bf16"] = hotset(folder, "bf16", "100%")
    file_mib = (folder / "Q4_0.gguf").stat().st_size >> 20
    plan = [("the limit of cpu_speed.py", LIMIT_MIB, packs)]
    plan += [(f"{share:.0%} of the file", int(share * file_mib) + PROCESS_MIB, beside) for share in SHARES]
    plan += [("everything resident", ROOMY_MIB, whole)]
    table, runs = [], []
    for what, limit_mib, engines in plan:
        rows = in_turn(engines, limit_mib, options.repeats, options.tokens)
        runs += [{key: value for key, value in row.items() if key != "texts"} for row in rows]
        row = row_of(what, limit_mib, rows)
        table.append(row | {"int4_is_times": ratios(row)})
        print(table[-1], flush=True)
    figures = {
        "model": f"hotset.reference.inflate({WIDTH}): 8 layers x 64 experts, top 8, 4.4 GB of experts in bfloat16",
        "threads": 2, "prompts": PROMPTS, "new_tokens": options.tokens, "file_mib": file_mib,
        "process_mib": PROCESS_MIB, "rows": table, "runs": runs,
    }  # fmt: skip
    publish("lowbit_cpu", figures)


if __name__ == "__main__":
    main()

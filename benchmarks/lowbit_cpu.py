"""Tokens per second of packed experts on a CPU: int4 and int8 beside bfloat16, and beside llama.cpp with as many bits.

The inflated reference model of cpu_speed.py (4.4 GB of experts in bfloat16), greedy text, batch 1, one process at a
time in a control group that counts page cache too. llama.cpp's files are made by its own quantiser, experts in Q4_0 or
Q4_K and the rest in bfloat16, and mapped. Kinds alternate. Each prompt is begun once before the clock runs, by all
engines alike. Needs Linux with cgroup v1, root, and the extra `bench`.

python benchmarks/lowbit_cpu.py --folder DIR      DIR holds, or will hold, some 15 GB
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from cpu_speed import DEFAULT_READ_AHEAD_KIB, LIMIT_MIB, PEERS, PROMPTS, ROOMY_MIB, TOKENS, WIDTH, measure

from common import RESULTS, publish

SHARES = (0.36, 0.60)
"""Of a file's size: what memory holds of it beside the process, which takes what it takes or, for all alike, this."""
PROCESS_MIB = 300
WARM = ["--warm", "8"]
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


def in_turn(engines: dict[str, Engine], limits_mib: dict[str, int], repeats: int, tokens: int) -> list[dict[str, Any]]:
    """All engines, one after another, several times, each under its limit."""
    # What a process does once, as loading compiled kernels, is answered before the clock runs, by all alike.
    fixed = {"read_ahead": DEFAULT_READ_AHEAD_KIB, "workload": "it", "tokens": tokens}
    return [
        measure(name, [*command, *WARM], cold, limit_mib=limits_mib[name], **fixed)
        for _ in range(repeats)
        for name, (command, cold) in engines.items()
    ]


def own_mib(runs: list[dict[str, Any]], file_mib: int) -> dict[str, int]:
    """What the process of each engine takes beside the weights, by its peak where all of them are resident."""
    peaks: dict[str, list[int]] = {}
    for run in runs:
        if run["limit_mib"] == ROOMY_MIB and "peak_mib" in run:
            peaks.setdefault(run["engine"], []).append(run["peak_mib"])
    return {name: int(statistics.median(found)) - file_mib for name, found in peaks.items()}


def row_of(what: str, limits_mib: dict[str, int], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of every engine under its limit, with all runs."""
    speeds: dict[str, list[float]] = {}
    for row in rows:
        speeds.setdefault(row["engine"], []).extend([row["tokens_per_s"]] if "tokens_per_s" in row else [])
    medians = {name: statistics.median(found) for name, found in speeds.items() if found}
    return {"what": what, "limits_mib": limits_mib, "median_tokens_per_s": medians, "runs": speeds}


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
    parser.add_argument("--only", nargs="+", default=[], help="measure the rows of these names again; the others stay")
    options = parser.parse_args()
    folder = options.folder
    prepare(folder)
    packs = {f"hotset, {name}": hotset(folder, name) for name in PACKS}
    beside = {"hotset, int4": packs["hotset, int4"], **{f"llama.cpp, {k}": llama(folder, k) for k in BLOCKS}}
    whole = {"hotset, int4": hotset(folder, "int4", "100%"), **{f"llama.cpp, {k}": llama(folder, k) for k in BLOCKS}}
    whole["hotset, bf16"] = hotset(folder, "bf16", "100%")
    file_mib = (folder / "Q4_0.gguf").stat().st_size >> 20
    plan = [("everything resident", ROOMY_MIB, whole), ("the limit of cpu_speed.py", LIMIT_MIB, packs)]
    plan += [(f"{share:.0%} of the file and each process", int(share * file_mib), beside) for share in SHARES]
    plan += [(f"{share:.0%} of the file", int(share * file_mib) + PROCESS_MIB, beside) for share in SHARES]
    figures: dict[str, Any] = {
        "model": f"hotset.reference.inflate({WIDTH}): 8 layers x 64 experts, top 8, 4.4 GB of experts in bfloat16",
        "threads": 2, "prompts": PROMPTS, "new_tokens": options.tokens, "file_mib": file_mib,
        "process_mib": PROCESS_MIB, "rows": [], "runs": [],
    }  # fmt: skip
    if options.only:
        earlier = json.loads((RESULTS / "lowbit_cpu.json").read_text(encoding="utf-8"))
        for name in ("rows", "runs"):
            figures[name] = [each for each in earlier[name] if each["what"] not in options.only]
        plan = [each for each in plan if each[0] in options.only]
    for what, limit_mib, engines in plan:
        tokens = max(options.tokens, TOKENS) if engines is whole else options.tokens
        own = own_mib(figures["runs"], file_mib) if what.endswith("each process") else {}
        limits_mib = {name: limit_mib + own.get(name, 0) for name in engines}
        rows = in_turn(engines, limits_mib, options.repeats, tokens)
        row = row_of(what, limits_mib, rows)
        figures["rows"].append(row | {"int4_is_times": ratios(row)})
        figures["runs"] += [
            {"what": what} | {key: value for key, value in each.items() if key != "texts"} for each in rows
        ]
        print(figures["rows"][-1], flush=True)
        publish("lowbit_cpu", figures)  # what is there, should a later part be interrupted


if __name__ == "__main__":
    main()

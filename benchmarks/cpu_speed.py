"""Tokens per second of a model that does not fit: hotset and its peers on the same weights under the same memory limit.

The inflated reference model (real routing, 4.4 GB of experts in bfloat16), greedy text, batch 1, one process at a time
in a control group that counts page cache too. Needs Linux with cgroup v1, root, and the extra `bench`.

python benchmarks/cpu_speed.py --folder DIR      DIR holds, or will hold, some 22 GB of checkpoints
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import RESULTS, publish

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import limits

PEERS = Path(__file__).parent / "peers"
WIDTH = 5632
LIMIT_MIB = 1366
"""A quarter of the experts (1,056 MiB), the rest of the model, and 300 MiB for the process."""
ROOMY_MIB = 16_000
DEFAULT_READ_AHEAD_KIB = 128
TOKENS, FEW_TOKENS, PROMPTS = 48, 12, 2


def engines(folder: Path) -> dict[str, tuple[list[str], list[Path]]]:
    """The command of every engine, and the files that must be cold before it starts."""
    plain, fused, packed, gguf = (folder / name for name in ("w5632", "w5632-fused", "packed", "w5632.gguf"))
    return {
        "hotset": (["hotset_run.py", "--model", str(plain), "--memory", "auto"], [plain]),
        "hotset, packed": (["hotset_run.py", "--model", str(packed), "--memory", "auto"], [packed]),
        "hotset, lru": (["hotset_run.py", "--model", str(plain), "--memory", "auto", "--policy", "lru"], [plain]),
        "llama.cpp, mmap": (["llamacpp.py", "--model", str(plain)], [gguf]),
        "transformers, as is": (["stock.py", "--model", str(plain)], [plain]),
        "transformers, fused and mapped": (["stock.py", "--model", str(fused)], [fused]),
        "accelerate, disk offload": (
            ["accelerate_disk.py", "--model", str(fused), "--keep", "safetensors"],
            [fused],
        ),
    }


def prepare(folder: Path) -> None:
    """Make the checkpoints that are missing."""
    from hotset import reference

    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "w5632" / "config.json").exists():
        reference.inflate(WIDTH, folder / "w5632")
    makers = {
        "w5632-fused": [str(PEERS / "fuse.py"), "--model", str(folder / "w5632"), "--out"],
        "w5632.gguf": [str(PEERS / "gguf_export.py"), "--model", str(folder / "w5632"), "--out"],
        "packed": ["-m", "hotset", "pack", str(folder / "w5632"), "-o"],
    }
    for name, command in makers.items():
        if not (folder / name).exists():
            subprocess.run([sys.executable, *command, str(folder / name)], check=True)


def measure(
    name: str,
    command: list[str],
    cold: list[Path],
    *,
    limit_mib: int,
    read_ahead: int | None,
    workload: str,
    tokens: int,
) -> dict[str, Any]:
    """One run of one engine."""
    argv = [sys.executable, "-W", "ignore", str(PEERS / command[0]), *command[1:]]
    argv += ["--workload", workload, "--tokens", str(tokens), "--prompts", str(PROMPTS), "--threads", "2"]
    _wait_for_quiet()
    with limits.read_ahead(cold[0], read_ahead) as kib:
        limits.evict(cold)
        outcome = limits.run(argv, limit_mib << 20, timeout_s=240)
    row: dict[str, Any] = {
        "engine": name, "limit_mib": limit_mib, "read_ahead_kib": kib, "workload": workload, "new_tokens": tokens,
        "killed": outcome.oom_killed, "timed_out": outcome.seconds >= 240,
        "others_cores": round(outcome.others_cores, 2), "peak_mib": outcome.max_usage_bytes >> 20,
    }  # fmt: skip
    if outcome.result:
        result = outcome.result
        row |= {
            "tokens_per_s": result["decode_tokens_per_s"], "prefill_s": result["prefill_s"], "load_s": result["load_s"],
            "read_mb_per_token": result["decode_read_bytes_per_token"] / 1e6,
            "texts": [request["tokens"] for request in result["requests"]],
        }  # fmt: skip
        row |= {key: result[key] for key in ("slots", "decode_hit_rate", "resident_bytes") if key in result}
    elif not outcome.oom_killed:
        row["error"] = outcome.stderr_tail[-300:]
    print({key: value for key, value in row.items() if key != "texts"}, flush=True)
    return row


def _wait_for_quiet(most_s: float = 20.0) -> None:
    began = time.perf_counter()
    while time.perf_counter() - began < most_s:
        before = limits._busy_seconds()
        time.sleep(1)
        if limits._busy_seconds() - before < 0.2:
            return


def limited(folder: Path, repeats: int) -> list[dict[str, Any]]:
    """All engines under the limit: at Linux's default read-ahead, and at the machine's own with fewer tokens."""
    rows = []
    for _ in range(repeats):
        for workload in ("it", "c"):
            for name, (command, cold) in engines(folder).items():
                rows.append(
                    measure(
                        name, command, cold, limit_mib=LIMIT_MIB, read_ahead=DEFAULT_READ_AHEAD_KIB,
                        workload=workload, tokens=TOKENS,
                    )
                )  # fmt: skip
    for name, (command, cold) in engines(folder).items():
        rows.append(
            measure(
                name, command, cold, limit_mib=LIMIT_MIB, read_ahead=None, workload="it",
                tokens=TOKENS if name.startswith("hotset") else FEW_TOKENS,
            )
        )  # fmt: skip
    return rows


def roomy(folder: Path, repeats: int) -> list[dict[str, Any]]:
    """Stock's implementations and hotset with everything resident, interleaved."""
    plain = folder / "w5632"
    kinds = {
        f"transformers, {name}": ["stock.py", "--model", str(plain), "--experts", name]
        for name in ("grouped_mm", "batched_mm", "eager")
    } | {"hotset, 100%": ["hotset_run.py", "--model", str(plain), "--memory", "100%"]}
    return [
        measure(name, command, [plain], limit_mib=ROOMY_MIB, read_ahead=None, workload="it", tokens=TOKENS)
        for _ in range(repeats)
        for name, command in kinds.items()
    ]


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The median of every engine, by workload and read-ahead."""
    keys = {(row["read_ahead_kib"], row["workload"], row["engine"]): None for row in rows}
    table = []
    for kib, workload, engine in keys:
        chosen = [r for r in rows if (r["read_ahead_kib"], r["workload"], r["engine"]) == (kib, workload, engine)]
        speeds = [r["tokens_per_s"] for r in chosen if "tokens_per_s" in r]
        row = {"read_ahead_kib": kib, "workload": workload, "engine": engine, "runs": speeds}
        table.append(row | ({"median_tokens_per_s": statistics.median(speeds)} if speeds else {"killed": True}))
    for row in table:
        peers = [
            other.get("median_tokens_per_s", 0.0)
            for other in table
            if other["read_ahead_kib"] == row["read_ahead_kib"]
            and other["workload"] == row["workload"]
            and not other["engine"].startswith("hotset")
        ]
        if row["engine"].startswith("hotset") and peers and max(peers) and "median_tokens_per_s" in row:
            row["times_the_best_peer"] = row["median_tokens_per_s"] / max(peers)
    return table


def agreement(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many tokens of each text are those of hotset before the first that is not; bfloat16 breaks ties anyhow."""
    shared: dict[str, Any] = {}
    for workload in ("it", "c"):
        whole = [row for row in rows if row["workload"] == workload and row["new_tokens"] == TOKENS and "texts" in row]
        texts = {row["engine"]: row["texts"] for row in whole}
        ours = texts.get("hotset", [])
        shared[workload] = {
            name: [_common(a, b) for a, b in zip(ours, text, strict=False)] for name, text in texts.items()
        }
    return shared


def _common(some: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(some, other, strict=False)) if a != b), len(some))


def main() -> None:
    """Prepare, measure, publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=RESULTS.parents[1] / "out" / "cpu_speed")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    prepare(options.folder)
    under_limit = limited(options.folder, options.repeats)
    in_memory = roomy(options.folder, options.repeats + 1)
    figures = {
        "model": f"hotset.reference.inflate({WIDTH}): 8 layers x 64 experts, top 8, 4.4 GB of experts in bfloat16",
        "limit_mib": LIMIT_MIB, "threads": 2, "prompts": PROMPTS,
        "under_the_limit": summary(under_limit), "everything_resident": summary(in_memory),
        "tokens_in_common_with_hotset": agreement(under_limit),
        "runs": [{key: value for key, value in row.items() if key != "texts"} for row in under_limit + in_memory],
    }  # fmt: skip
    for row in figures["under_the_limit"] + figures["everything_resident"]:
        print(row)
    publish("cpu_speed", figures)


if __name__ == "__main__":
    main()

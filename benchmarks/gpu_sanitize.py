"""The kernels of the device-driven engine under compute-sanitizer: no access out of bounds, no race in shared memory.

By itself this drives the kernels once or twice on small shapes, without graphs and without torch.compile; it plans with
blend and lru only, and writes no packed matrices out for many tokens:
compute-sanitizer --tool memcheck python benchmarks/gpu_sanitize.py
With --run it starts both tools itself, after a run without them that compiles all kernels, and publishes the verdicts.

python benchmarks/gpu_sanitize.py --run [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TOOLS = {"memcheck": r"ERROR SUMMARY: (\d+) error", "racecheck": r"RACECHECK SUMMARY: (\d+) hazard"}
LIMIT_S = 180
SHAPE = 3, 20, 3  # layers, experts, top_k
PASSES = 4


def planning(policy: str) -> None:
    """Events planned by the device as by the host, of one token and of two."""
    import numpy as np
    from plan_twins import Twins

    from hotset.shape import ModelShape

    layers, experts, top_k = SHAPE
    rng, shape = np.random.default_rng(1), ModelShape(*SHAPE)
    for tokens in (1, 2):
        twins = Twins(shape, 5 * layers, policy, tokens * top_k)
        events = [
            (layer, np.concatenate([rng.choice(experts + 1, top_k, replace=False) for _ in range(tokens)]))
            for _ in range(PASSES)
            for layer in range(layers)
        ]
        twins.run(events)
        if not twins.evicted:
            raise SystemExit("no expert was evicted: these events are too few")


def gathering() -> None:
    """Copies of what an event misses, some of experts that do not fill their slot, one row far into the memory."""
    import torch

    from hotset.engine.device.gather import Gather

    device, slot, used = device_name(), 8 * 640, [8 * 640, 8 * 513 - 3]
    host = torch.randint(0, 255, (2 * 6, slot), dtype=torch.uint8)
    host = host.pin_memory() if device == "cuda" else host
    rows = torch.full((9, slot), 255, dtype=torch.uint8, device=device)
    host_row_of = torch.arange(11, -1, -1, dtype=torch.int32, device=device).view(2, 6)
    gather = Gather(host, rows, slot, used, host_row_of)
    loads = torch.full((3, 4), -1, dtype=torch.int32, device=device)
    for layer in (0, 1):
        loads[:, 0] = torch.tensor([5, 0, 2], dtype=torch.int32)
        job_row = torch.tensor([8, 0, 3], dtype=torch.int32, device=device)
        gather(layer, loads, torch.full((1,), 3, dtype=torch.int32, device=device), job_row)
        for expert, row in ((5, 8), (0, 0), (2, 3)):
            source = host[int(host_row_of[layer, expert]), : used[layer]]
            require(torch.equal(rows[row, : used[layer]].cpu(), source), "a copy differs")


def prefetching(tokens: int) -> None:
    """Prefetched experts claimed whole, in part and never, exchanged for slots: everything looks as its test has it."""
    import test_device_prefetch as samples

    machine = samples.Machine(tokens=tokens, seed=2)
    machine.state.max_queued.fill_(samples.PER_PART)
    on_gpu = device_name() == "cuda"
    for turn in range(3 * PASSES if on_gpu else 2):
        begins = ("after", "meanwhile", "before")[turn % 3] if on_gpu else "after"
        machine.run(samples.events_of(machine.rng, tokens, ("oracle", "mixed", "random")[turn % 3]), begins)
    require(machine.exchanged > 0, "no prefetched expert was exchanged for a slot's row")


def computing(family: str, packed: str = "") -> None:
    """Experts in one phase and in two, with some that belong to others; as plain numbers, or in a format."""
    import expert_samples as samples
    import torch

    from hotset.engine.kernels.triton_experts import Phase, TritonExperts

    sizes = {"hidden_size": 96, "moe_intermediate_size": 64} if packed else {}
    sample = samples.sample_of(*samples.spec_of(family, **sizes), torch.bfloat16)
    if packed:
        from packed_samples import encoded_sample

        from hotset import formats

        sample = encoded_sample(sample, formats.parse(packed))
    routing = samples.routing_of(sample, tokens=2, top_k=3, sentinels=2)
    rows = routing.rows(sample)
    kernels = TritonExperts(sample.arena, sample.layout, sample.spec, top_k=3, max_tokens=2)
    whole, parts = torch.empty_like(routing.x), torch.empty_like(routing.x)
    late = (torch.arange(len(rows)) % 2).to(torch.int8).to(rows.device)
    kernels(routing.x, rows, None, routing.weights, whole)
    kernels(routing.x, rows, late, routing.weights, parts, Phase.EARLY)
    kernels(routing.x, rows, late, routing.weights, parts, Phase.LATE)
    require(torch.equal(whole, parts), "two phases differ from one")
    require(bool(whole.isfinite().all()), "not a number")


def attending(heads: int, kv_heads: int, length: int, masked: bool) -> None:
    """Attention of one new token for two sequences, in one pass or in several with a sum."""
    import torch

    from hotset.engine.kernels import attention

    device = device_name()
    shapes = (2, heads, 1, 32), (2, kv_heads, length, 32), (2, kv_heads, length, 32)
    q, k, v = (torch.randn(shape, device=device).to(torch.float32) for shape in shapes)
    mask = (torch.arange(length, device=device) < length - 3).expand(2, 1, 1, length) if masked else None
    found = attention.attend(q, k, v, mask, 0.2, None, torch.zeros(heads, device=device) if masked else None)
    require(bool(found.isfinite().all()), "not a number")


def require(held: bool, otherwise: str) -> None:
    """Stop where kernels do not even compute what they should."""
    if not held:
        raise SystemExit(otherwise)


def parts() -> dict[str, Callable[[], None]]:
    """Everything that is driven, by name."""
    return {
        "plan blend": lambda: planning("blend"),
        "plan lru": lambda: planning("lru"),
        "gather": gathering,
        "predictions of one token": lambda: prefetching(1),
        "predictions of three tokens": lambda: prefetching(3),
        "experts qwen3_moe": lambda: computing("qwen3_moe"),
        "experts gpt_oss": lambda: computing("gpt_oss"),
        "experts in mxfp4": lambda: computing("qwen3_moe", "mxfp4"),
        "experts in int4": lambda: computing("qwen3_moe", "integer:zeros=bytes,scales=float16"),
        "experts in fp8": lambda: computing("qwen3_moe", "fp8:block_n=16,block_k=32"),
        "attention": lambda: attending(4, 1, 70, False),
        "attention of single heads": lambda: attending(2, 2, 70, True),
        "attention in splits": lambda: attending(8, 2, 1100, True),
    }


def device_name() -> str:
    """Where the kernels run."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def drive(only: str) -> None:
    """Run all parts here, and say how long each took."""
    sys.path[:0] = [str(HERE.parent / "tests" / name) for name in ("support", "families", "formats")]
    import torch

    if not torch.cuda.is_available():
        mend_interpreter()
    for name, part in parts().items():
        if only not in name:
            continue
        began = time.perf_counter()
        part()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)


def mend_interpreter() -> None:
    """Without a GPU: Triton's interpreter takes loop bounds from arrays of one element, which NumPy 2.4 refuses."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    plain = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


def sanitizer() -> str | None:
    """The program, on the path or where CUDA keeps it."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    places = [Path(home) / "bin" / "compute-sanitizer" for home in homes if home]
    return shutil.which("compute-sanitizer") or next((str(place) for place in places if place.exists()), None)


def check(program: str, tool: str) -> dict[str, Any]:
    """One tool over all parts. Tensors get memory of their own: within a pool nothing is out of bounds."""
    command = [program, "--tool", tool, "--target-processes", "application-only"]
    if tool == "memcheck":
        command += ["--report-api-errors", "no"]  # torch asks the driver what it may refuse
    command += [sys.executable, __file__]
    began = time.perf_counter()
    try:
        ran = subprocess.run(
            command, env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, capture_output=True, text=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"tool": tool, "errors": None, "seconds": LIMIT_S, "exit": None}
    output = ran.stdout + ran.stderr
    found = re.search(TOOLS[tool], output)
    row = {"tool": tool, "errors": None if found is None else int(found.group(1)), "exit": ran.returncode}
    if row["errors"] != 0 or ran.returncode:
        print(output[-6000:], flush=True)
    return row | {
        "seconds": round(time.perf_counter() - began, 1),
        "parts": re.findall(r"^(.+): [\d.]+ s$", output, re.M),
    }


def run(out: Path | None) -> None:
    """Compile everything, then both tools; publish what they say."""
    import torch

    program = sanitizer()
    if program is None:
        raise SystemExit("compute-sanitizer is not installed: it comes with the CUDA toolkit")
    subprocess.run([sys.executable, __file__], check=True, timeout=LIMIT_S)
    rows = [check(program, tool) for tool in TOOLS]
    for row in rows:
        print(row, flush=True)
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout.split("\n")
    figures = {
        "rows": rows, "parts": list(parts()), "sanitizer": next((line for line in version if "ersion" in line), ""),
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
    }  # fmt: skip
    if out is not None:
        (out / "gpu_sanitize.json").write_text(json.dumps(figures, indent=1) + "\n")
        return
    from common import publish

    publish("gpu_sanitize", figures)


def main() -> None:
    """Drive the kernels, or have the tools drive them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="store_true", help="start both tools")
    parser.add_argument("--only", default="", help="parts whose names contain this")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.run:
        run(options.out)
    else:
        drive(options.only)


if __name__ == "__main__":
    main()

"""What every benchmark shares: the traces it runs on, the machine it states, and where results go."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hotset.files import write_beside
from hotset.trace import Trace
from hotset.trace.importers import import_trace
from hotset.trace.synth import SynthConfig, synthesise

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PUBLIC = ROOT.parent / "shared" / "traces"


def gpt_oss() -> Trace | None:
    """The public gpt-oss-20b trace (92,453 tokens), where it lies beside the checkout."""
    path = PUBLIC / "gpt-oss-20b.npz"
    return import_trace(path, experts=32) if path.exists() else None


def qwen_short() -> Trace | None:
    """The short public trace of Qwen3-30B-A3B, where it lies beside the checkout."""
    path = PUBLIC / "qwen3-30b-a3b_short.npz"
    return import_trace(path) if path.exists() else None


def large_trace() -> tuple[str, Trace]:
    """The public trace, or a synthetic one of the same shape and size."""
    real = gpt_oss()
    if real is not None:
        return "gpt-oss-20b", real
    return "synthetic", synthesise(
        SynthConfig(layers=24, experts=32, top_k=4, requests=300, prompt_tokens=0, new_tokens=308)
    )


def best_of(repeats: int, work: Callable[[], object]) -> float:
    """The shortest of several runs, in seconds: other work on the machine only ever adds."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.system(),
        "numba": version("numba"),
        "numpy": version("numpy"),
        "load_average": round(os.getloadavg()[0], 2),
    }


def plain(value: Any) -> Any:
    """The same without what JSON cannot say: no number is null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def publish(name: str, figures: dict[str, Any]) -> None:
    """Write the result as JSON for the repository, and say where it is."""
    document = {
        "benchmark": name,
        "command": " ".join(["python", str(Path(sys.argv[0]).resolve().relative_to(ROOT)), *_shown(sys.argv[1:])]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        **figures,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    with write_beside(path) as scratch:
        scratch.write_text(json.dumps(plain(document), indent=1, allow_nan=False) + "\n")
    print(f"-> {path.relative_to(ROOT)}")


def _shown(arguments: list[str]) -> list[str]:
    """The arguments without anybody's paths."""
    return ["DIR" if "/" in argument else argument for argument in arguments]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")

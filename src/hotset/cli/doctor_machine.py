"""What this machine offers: software, processor, memory, GPUs and limits, each asked for on its own."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "numba", "triton", "safetensors")
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
_BOUND = re.compile(r"(>=|<)\s*([\d.]+)")


def software() -> list[dict[str, Any]]:
    """Python and the packages that matter, and whether each is one that hotset is made for."""
    ranges = _ranges()
    rows = [_package("python", platform.python_version(), ranges)]
    return rows + [_package(name, _version(name), ranges) for name in _PACKAGES]


def _package(name: str, version: str | None, ranges: dict[str, str]) -> dict[str, Any]:
    wanted = ranges.get(name)
    supported = None if version is None or wanted is None else fits(version, wanted)
    return {"name": name, "version": version, "wanted": wanted, "supported": supported}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _ranges() -> dict[str, str]:
    """What the installed hotset says that it needs, so that it is said in one place only."""
    found = {"python": metadata.metadata("hotset")["Requires-Python"]}
    for line in metadata.requires("hotset") or []:
        need = line.split(";")[0].strip()
        name = re.split(r"[<>=!~\s\[]", need)[0]
        found.setdefault(name, need.removeprefix(name))
    return found


def fits(version: str, wanted: str) -> bool:
    """Whether a version is within bounds such as ">=5.17,<6"."""
    own = _numbers(version)
    bounds = [(sign, _numbers(bound)) for sign, bound in _BOUND.findall(wanted)]
    return all(own >= bound if sign == ">=" else own < bound for sign, bound in bounds)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d+", version.split("+")[0])[:3])


def processor() -> dict[str, Any]:
    """The CPU: its name, the cores that this process may use, and the instructions that matter."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return {
        "name": fields.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "flags": [flag for flag in _FLAGS if flag in flags],
    }


def memory() -> dict[str, Any]:
    """The memory of the machine, and what this process may still take of it."""
    from hotset.engine.memory import available_memory_bytes, memory_limit_bytes, total_memory_bytes

    total, limit = total_memory_bytes(), memory_limit_bytes()
    return {
        "total_bytes": total,
        "available_bytes": available_memory_bytes(),
        "group_limit_bytes": limit if limit < total else None,
    }


def gpus() -> list[dict[str, Any]]:
    """The CUDA devices that torch can use."""
    import torch

    if not torch.cuda.is_available():
        return []
    path = Path("/proc/driver/nvidia/version")
    driver = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text()) if path.exists() else None
    rows = []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        sizes = {"name": torch.cuda.get_device_name(number), "free_bytes": free, "total_bytes": total}
        rows.append(sizes | {"driver": driver[1] if driver else None, "cuda": torch.version.cuda})
    return rows


def pinnable_bytes() -> dict[str, Any]:
    """How much memory may be locked, which pinning for a GPU needs; None: as much as there is."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {"memlock_bytes": None if soft == resource.RLIM_INFINITY else soft}

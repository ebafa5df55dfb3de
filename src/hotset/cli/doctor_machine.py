"""What this machine offers: software, processor, memory, GPUs, limits and the speed of a disk, each asked by itself."""

from __future__ import annotations

import os
import platform
import random
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from hotset.errors import HotsetError
from hotset.store.layout import PAGE_BYTES
from hotset.transfer.file import StoreFile, aligned_buffer

SIZES_BYTES = (1 << 20, 8 << 20)
THREADS = (1, 2, 4)
SECONDS_EACH = 0.3
SAMPLE_BYTES = 256 << 20
_WRITE_S = 2.0
_SPARE_BYTES = 1 << 30
_PACKAGES = ("torch", "transformers", "numba", "triton", "safetensors")
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
_BOUND = re.compile(r"(>=|<)\s*([\d.]+)")


def software() -> list[dict[str, Any]]:
    """Python and the packages that matter, and whether each is one that hotset is made for."""
    ranges, versions = _ranges(), {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    found = [(name, versions.get(name), ranges.get(name)) for name in ("python", *_PACKAGES)]
    return [
        {"name": name, "version": version, "wanted": wanted,
         "supported": None if version is None or wanted is None else fits(version, wanted)}
        for name, version, wanted in found
    ]  # fmt: skip


def _ranges() -> dict[str, str]:
    """What the installed hotset says that it needs, so that it is stated in one place only."""
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


def disk(where: Path, checkpoint: Path | None = None) -> dict[str, Any]:
    """The disk under a folder: its room, its settings, and its speed on a checkpoint file or on a temporary one.

    Experts are read at random places, past the page cache, by a few threads: so are these.
    """
    free = shutil.disk_usage(where).free
    about = {"path": str(where), "free_bytes": free, "read_ahead_kb": _read_ahead_kb(where)}
    if checkpoint is not None:
        return about | {"measured_on": str(checkpoint)} | speeds(checkpoint)
    with _temporary_file(where, free) as path:
        return about | {"measured_on": "a temporary file"} | speeds(path)


def speeds(path: Path) -> dict[str, Any]:
    """Bytes per second for every size of read and number of threads that the file is large enough for."""
    with closing(StoreFile(path)) as file:
        sizes = [size for size in SIZES_BYTES if size <= file.size_bytes]
        return {"direct": file.direct, "reads": [_measure(file, size, number) for size in sizes for number in THREADS]}


def _measure(file: StoreFile, size: int, threads: int) -> dict[str, Any]:
    began = time.perf_counter()

    def read(number: int) -> int:
        """Read at random places until the time is over, at least once; returns how often."""
        places = random.Random(number)  # noqa: S311 - places, not secrets
        buffer, last = memoryview(aligned_buffer(size)), (file.size_bytes - size) // PAGE_BYTES
        count = 0
        while count == 0 or time.perf_counter() < began + SECONDS_EACH:
            file.fill(buffer, places.randint(0, last) * PAGE_BYTES, size)
            count += 1
        return count

    with ThreadPoolExecutor(threads) as crew:
        count = sum(crew.map(read, range(threads)))
    return {"read_bytes": size, "threads": threads, "bytes_per_s": count * size / (time.perf_counter() - began)}


@contextmanager
def _temporary_file(where: Path, free_bytes: int) -> Iterator[Path]:
    """A file of noise, large enough for a disk's own memory not to hold all of it; a slow disk gets a smaller one."""
    if free_bytes < _SPARE_BYTES:
        raise HotsetError("less than 1 GiB is free, so no file was written to measure with")
    noise, until_s, written = os.urandom(SIZES_BYTES[-1]), time.perf_counter() + _WRITE_S, 0
    with tempfile.NamedTemporaryFile(prefix=".hotset-doctor-", dir=where, buffering=0) as file:
        while written < SAMPLE_BYTES and (written == 0 or time.perf_counter() < until_s):
            written += file.write(noise)
            os.fsync(file.fileno())
        yield Path(file.name)


def _read_ahead_kb(where: Path) -> int | None:
    """What the system reads ahead on this device; None where it does not say."""
    device = where.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for place in (f"/sys/class/bdi/{number}/read_ahead_kb", f"/sys/dev/block/{number}/queue/read_ahead_kb"):
        if Path(place).exists():
            return int(Path(place).read_text())
    return None

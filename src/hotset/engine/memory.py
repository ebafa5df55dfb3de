"""What memory this process may still take: the machine's, or less where a control group says so."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

SMALL_BYTES = 4 << 30
"""A process that may hold less than this has to mind what its allocator keeps."""
_LIBC = ctypes.CDLL(None)
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_GROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def available_memory_bytes() -> int:
    """The memory that can be had without swapping, as far as the system tells."""
    left = [limit - used for limit, used in _groups()]  # by the control groups, from its own up to the root
    return max(min([_machine_bytes(), *left]), 0)


def total_memory_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def return_free_blocks() -> None:
    """Have the allocator give back what it keeps of freed memory; where it is not glibc's there is nothing to ask."""
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_large_blocks_apart() -> None:
    """Where memory is small, have the allocator map large blocks one by one, so that none leaves a hole when it goes.

    Key-value caches grow by being copied: in a heap they come to twice their size. It costs a prompt a fifth of its
    speed, so a machine with more memory goes without.
    """
    told = "MALLOC_MMAP_THRESHOLD_" in os.environ
    if memory_limit_bytes() < SMALL_BYTES and not told and hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def memory_limit_bytes() -> int:
    """The most memory that this process may ever hold: the machine's, or the limit of its control groups."""
    return min([total_memory_bytes(), *(limit for limit, _ in _groups())])


def _machine_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return total_memory_bytes()
    fields = {line.split(":")[0]: line.split()[1] for line in lines if ":" in line}
    return int(fields.get("MemAvailable", fields["MemTotal"])) * 1024


def _groups() -> Iterator[tuple[int, int]]:
    """The limit of each control group that this process is in, and what is used of it and cannot be dropped."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, where = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        root, limit, usage = _GROUPS[0] if number == "0" else _GROUPS[1]
        folder = root / where.lstrip("/")
        for place in (folder, *folder.parents):
            found = _read_group(place, limit, usage) if place.is_relative_to(root) else None
            if found is not None:
                yield found


def _read_group(folder: Path, limit: str, usage: str) -> tuple[int, int] | None:
    try:
        most = int((folder / limit).read_text())
        used = int((folder / usage).read_text())
        inactive = _stat(folder, "total_inactive_file") or _stat(folder, "inactive_file")
    except (OSError, ValueError):
        return None
    return most, used - inactive


def _stat(folder: Path, name: str) -> int:
    for line in (folder / "memory.stat").read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0

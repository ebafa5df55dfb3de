"""How fast experts come from a disk: reads of their size at random places, past the page cache, by a few threads."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


def disk(where: Path, checkpoint: Path | None = None) -> dict[str, Any]:
    """The disk under a folder: its room, its settings, and its speed on a checkpoint file or on a passing one."""
    free = shutil.disk_usage(where).free
    about = {"path": str(where), "free_bytes": free, "read_ahead_kb": read_ahead_kb(where)}
    if checkpoint is not None:
        return about | {"measured_on": str(checkpoint)} | speeds(checkpoint)
    with passing_file(where, free) as path:
        return about | {"measured_on": "a temporary file"} | speeds(path)


def speeds(path: Path) -> dict[str, Any]:
    """Bytes per second for every size of read and number of threads that the file is large enough for."""
    file = StoreFile(path)
    try:
        sizes = [size for size in SIZES_BYTES if size <= file.size_bytes]
        reads = [_measure(file, size, threads) for size in sizes for threads in THREADS]
        return {"direct": file.direct, "reads": reads}
    finally:
        file.close()


def _measure(file: StoreFile, size: int, threads: int) -> dict[str, Any]:
    done = [0] * threads
    errors: list[Exception] = []
    until = time.perf_counter() + SECONDS_EACH

    def read(number: int) -> None:
        try:
            done[number] = _read_until(file, size, random.Random(number), until)  # noqa: S311 - places, not secrets
        except Exception as error:
            errors.append(error)

    began = time.perf_counter()
    crew = [threading.Thread(target=read, args=(number,)) for number in range(threads)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    if errors:
        raise errors[0]
    return {"read_bytes": size, "threads": threads, "bytes_per_s": sum(done) * size / (time.perf_counter() - began)}


def _read_until(file: StoreFile, size: int, places: random.Random, until: float) -> int:
    """Read at random places until the time is over; at least once."""
    buffer, last = memoryview(aligned_buffer(size)), (file.size_bytes - size) // PAGE_BYTES
    count = 0
    while count == 0 or time.perf_counter() < until:
        file.fill(buffer, places.randint(0, last) * PAGE_BYTES, size)
        count += 1
    return count


@contextmanager
def passing_file(where: Path, free_bytes: int) -> Iterator[Path]:
    """A file of noise that is gone after the block, large enough for a disk's own memory not to hold all of it."""
    if free_bytes < _SPARE_BYTES:
        raise HotsetError("less than 1 GiB is free, so no file was written to measure with")
    handle, name = tempfile.mkstemp(prefix=".hotset-doctor-", dir=where)
    try:
        _fill(handle)
        yield Path(name)
    finally:
        os.close(handle)
        Path(name).unlink(missing_ok=True)


def _fill(handle: int) -> None:
    """Write until the file is large enough or the time is over; a slow disk gets a smaller file."""
    noise = os.urandom(SIZES_BYTES[-1])
    began, written = time.perf_counter(), 0
    while written < SAMPLE_BYTES and (written == 0 or time.perf_counter() - began < _WRITE_S):
        written += os.write(handle, noise)
        os.fsync(handle)


def read_ahead_kb(where: Path) -> int | None:
    """What the system reads ahead on this device; None where it does not say."""
    device = where.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for place in (f"/sys/class/bdi/{number}/read_ahead_kb", f"/sys/dev/block/{number}/queue/read_ahead_kb"):
        if Path(place).exists():
            return int(Path(place).read_text())
    return None

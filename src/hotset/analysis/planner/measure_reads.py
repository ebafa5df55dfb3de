"""How fast missing experts come from disk: by the engine's reader threads, alone and beside compute."""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hotset.analysis.planner.measure_experts import EVENT_EXPERTS, event_of, pool_of, usual_s
from hotset.errors import HotsetError
from hotset.store import Catalog, LayerSource, Part, Segment, SlotLayout
from hotset.store.digest import digest_of
from hotset.store.layout import PAGE_BYTES
from hotset.transfer import Readers, ReadTransfer
from hotset.transfer.file import huge_buffer
from hotset.transfer.reads import Load

SAMPLE_BYTES = 256 << 20
_SPARE_BYTES = 1 << 30
_MOST = 64  # experts that are read in turn
_BESIDE = ("int4", ((1536, 2048), (2048, 768)))
"""The experts that are computed while others are read."""


class DiskRates(NamedTuple):
    """A first byte and bytes per second alone, and what is left of reading and of compute where both go on."""

    read_s: float  # of each event with a miss, beside its bytes
    bytes_per_s: float
    busy: float
    kept: float


class _Reading:
    """Experts of one size in a file, read at random places by the engine's threads."""

    def __init__(self, path: Path, expert_bytes: int) -> None:
        size = expert_bytes // PAGE_BYTES * PAGE_BYTES
        room = path.stat().st_size // PAGE_BYTES
        count = min(_MOST, room * PAGE_BYTES // size)
        places = random.Random(0)  # noqa: S311 - places, not secrets
        last = room - size // PAGE_BYTES
        segments = [(Segment(0, places.randint(0, last) * PAGE_BYTES, size, 0),) for _ in range(count)]
        source = LayerSource(SlotLayout.of([Part("expert", (size,), "uint8")]), segments)
        self.size, self.count = size, count
        self.rows = [huge_buffer(size)[:size] for _ in range(EVENT_EXPERTS)]
        self._draw = places
        plain = Readers(Catalog((path,), (source,)), self.rows.__getitem__)
        try:
            digests = [self._digest(plain, expert) for expert in range(count)]
        finally:
            plain.close()
        self.readers = Readers(Catalog((path,), (source,), [digests]), self.rows.__getitem__)
        for expert in range(count):  # the first check of an expert takes longer than later ones
            self._bring(self.readers, [expert])

    def event(self) -> None:
        """Read as many experts as an event may miss, and wait for all."""
        self._bring(self.readers, self._draw.sample(range(self.count), self.most))

    def lone(self) -> None:
        """Read one expert."""
        self._bring(self.readers, [self._draw.randrange(self.count)])

    @property
    def most(self) -> int:
        """The experts of an event."""
        return min(EVENT_EXPERTS, self.count)

    def _digest(self, readers: Readers, expert: int) -> bytes:
        self._bring(readers, [expert])
        return digest_of(self.rows[0])

    def _bring(self, readers: Readers, experts: list[int]) -> None:
        transfer, arrived = ReadTransfer(), 0
        readers.start(transfer, [Load(0, expert, row) for row, expert in enumerate(experts)])
        while arrived < len(experts):
            arrived += len(transfer.wait_any())


def measure_disk(path: Path, expert_bytes: int, seconds: float) -> DiskRates:
    """The rates of a file for experts of a size."""
    if path.stat().st_size < 2 * expert_bytes:
        raise HotsetError(f"{path} is too small to measure a disk with")
    reading = _Reading(path, expert_bytes)
    try:
        alone_s, lone_s = usual_s(reading.event, seconds, 0.5), usual_s(reading.lone, seconds / 2, 0.5)
        experts, rows, _ = pool_of(*_BESIDE)
        compute = event_of(experts, rows, _BESIDE[1][0][1])
        compute_s = usual_s(compute, seconds / 2, 0.5)
        beside_s, events_per_s = _beside(compute, reading.event, seconds)
    finally:
        reading.readers.close()
    # The line through both times; a disk that is no faster with several readers has no part that is fixed.
    each_s = max((alone_s - lone_s) / max(reading.most - 1, 1), alone_s / reading.most / 2)
    read_s = max(alone_s - reading.most * each_s, 0.0)
    busy = min(max(events_per_s * alone_s, 0.05), 1.0)
    return DiskRates(read_s, reading.size / each_s, busy, min(max(compute_s / beside_s, 0.05), 1.0))


def _beside(compute: Callable[[], object], read: Callable[[], object], seconds: float) -> tuple[float, float]:
    """The time of a computed event while events are read, and how many of these there are per second."""
    stop, count = threading.Event(), 0

    def go_on() -> None:
        nonlocal count
        while not stop.is_set():
            read()
            count += 1

    thread = threading.Thread(target=go_on, daemon=True)
    began = time.perf_counter()
    thread.start()
    try:
        found = usual_s(compute, seconds, 0.5)
    finally:
        stop.set()
        thread.join()
    return found, count / (time.perf_counter() - began)


@contextmanager
def sample_file(folder: Path) -> Iterator[Path]:
    """A file of noise to measure a disk with, where there is no checkpoint."""
    found = os.statvfs(folder)
    if found.f_bavail * found.f_frsize < _SPARE_BYTES:
        raise HotsetError(f"less than 1 GiB is free under {folder}: name another by --path")
    noise = np.random.default_rng(0).bytes(16 << 20)
    with tempfile.NamedTemporaryFile(prefix=".hotset-measure-", dir=folder, buffering=0) as file:
        for _ in range(SAMPLE_BYTES // len(noise)):
            file.write(noise)
        os.fsync(file.fileno())
        yield Path(file.name)

"""Reader threads: they take loads from one queue and fill slots, demand before prefetch."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from queue import Empty, SimpleQueue

import numpy as np

from hotset.errors import StoreError
from hotset.owner import Owner
from hotset.store import Catalog, LayerSource, Segment
from hotset.store.catalog import Bytes
from hotset.store.digest import digest_of, same_sum
from hotset.store.layout import PAGE_BYTES
from hotset.transfer.file import StoreFile, huge_buffer
from hotset.transfer.reads import Job, Load, ReadTransfer
from hotset.transfer.spans import CHUNK_BYTES, Span, chunks

MAX_STARTED = 64
"""Transfers that are remembered before those that are over are looked for and forgotten."""
_HUNG_TIMEOUT_S = 1.0  # for a thread that has not answered before


class Rank(IntEnum):
    """How urgent a load is."""

    DEMAND = 0  # an event waits for it
    PREFETCH = 1  # an event may ask for it soon
    BACKGROUND = 2  # no event waits for it


class Jobs:
    """What is to be read, the most urgent first.

    A job may stand in more than one queue, or in one although its transfer was cancelled: it is done by the first
    thread that begins it. So an interrupt while jobs are added can leave jobs too many, never a job that is done twice.
    """

    def __init__(self) -> None:
        self._queues: tuple[deque[Job], ...] = tuple(deque() for _ in Rank)
        self._ready: SimpleQueue[None] = SimpleQueue()  # one token for each job, to wake one thread
        self._closing = False
        self._owner = Owner()

    def add(self, jobs: list[Job], rank: Rank) -> None:
        """Queue jobs, in this order."""
        self._queues[rank].extend(jobs)
        for _ in jobs:
            self._ready.put(None)

    def next(self) -> Job | None:
        """Wait for a job and begin it; None tells a thread to end."""
        woken = False
        while (job := self._first()) is None:
            if self._closing:
                return None
            self._ready.get()
            woken = True
        if not woken:
            with suppress(Empty):
                self._ready.get_nowait()  # its token: other threads need not wake for it
        return job

    def _first(self) -> Job | None:
        for queue in self._queues:
            with suppress(IndexError):
                while True:
                    job = queue.popleft()
                    if job.transfer.begin(job):
                        return job
        return None

    def dismiss(self, threads: int) -> None:
        """Let so many threads end, once nothing is left to be read; a child process has no threads to end."""
        if not self._owner.is_here:
            return
        self._closing = True
        for _ in range(threads):
            self._ready.put(None)


class Readers:
    """A few threads that read experts from a store into slots."""

    def __init__(self, catalog: Catalog, memory_of: Callable[[int], Bytes], *, threads: int = 0, direct: bool = True):
        self.catalog = catalog
        self.files = [StoreFile(path, direct=direct) for path in catalog.files]
        self.memory_of = memory_of
        self._verified = [bytearray(len(layer.experts)) for layer in catalog.layers]
        self._jobs = Jobs()
        self._started: dict[ReadTransfer, Rank] = {}  # transfers that may be under way
        self._starting = threading.Lock()
        self._hangs = False  # a thread did not answer the last time
        self.threads = [self._start() for _ in range(threads or default_threads())]
        self._dismiss = weakref.finalize(self, self._jobs.dismiss, len(self.threads))

    def _start(self) -> threading.Thread:
        owner = weakref.proxy(self)  # held weakly, so that forgotten readers end
        thread = threading.Thread(target=_work, args=(owner, self._jobs), name="hotset-reader", daemon=True)
        thread.start()
        return thread

    def start(self, transfer: ReadTransfer, loads: list[Load], rank: Rank = Rank.DEMAND) -> None:
        """Put loads on their way, in this order, once nothing more urgent is to be read."""
        if not self._dismiss.alive:
            raise StoreError("the readers of this store are closed: load the model again")
        jobs: list[Job] = []
        for load in loads:
            source = self.catalog.layers[load.layer]
            jobs += [Job(transfer, load, spans) for spans in _pieces(source, source.experts[load.expert])]
        with self._starting:
            if len(self._started) >= MAX_STARTED:
                self._started = {one: its for one, its in self._started.items() if not one.done}
            self._started[transfer] = rank  # before anything is queued: `cancel_and_wait` knows of all that may be read
            transfer.add(jobs)
        self._jobs.add(jobs, rank)

    def promote(self, transfer: ReadTransfer) -> None:
        """Say that an event waits now for what was only a prediction, or read in the background."""
        self._jobs.add(transfer.waiting, Rank.DEMAND)

    def cancel_and_wait(self) -> None:
        """Cancel all demand and all prefetch, and return once no thread writes to their slots any more."""
        with self._starting:
            transfers = [transfer for transfer, rank in self._started.items() if rank is not Rank.BACKGROUND]
        for transfer in transfers:
            transfer.cancel()
        try:
            for transfer in transfers:
                transfer.cancel_and_wait(_HUNG_TIMEOUT_S if self._hangs else None)
        except StoreError:
            self._hangs = True
            raise
        self._hangs = False

    def close(self) -> None:
        """Let the threads end and the files go."""
        self._dismiss()
        for thread in self.threads:
            thread.join()
        for file in self.files:
            file.close()
        self.files = []

    def bring(self, job: Job, scratch: Scratch) -> None:
        """Read one piece of an expert into its slot."""
        source = self.catalog.layers[job.load.layer]
        slot = self.memory_of(job.load.row)
        if source.decode is None:
            for span in job.spans:
                self._read(span, slot, scratch)
            return
        raw = scratch.raw(source.raw_bytes(job.load.expert))
        for span in job.spans:
            self._read(span, raw, scratch)
        source.decode(job.load.expert, raw, slot)

    def _read(self, span: Span, target: Bytes, scratch: Scratch) -> None:
        file = self.files[span.file]
        if span.straight and file.direct:
            file.fill(target[span.target : span.target + span.size_bytes].data, span.offset, span.size_bytes)
            return
        if not file.direct:
            for run in span.runs:
                file.fill(target[run.target : run.target + run.size_bytes].data, run.offset, run.size_bytes)
            return
        begin = span.offset - span.offset % PAGE_BYTES
        needed = span.offset + span.size_bytes - begin
        window = scratch.window(needed)
        file.fill(window.data, begin, needed)
        for run in span.runs:
            at = run.offset - begin
            np.copyto(target[run.target : run.target + run.size_bytes], window[at : at + run.size_bytes])

    def check(self, load: Load, scratch: Scratch) -> None:
        """Check an expert against its digest, where the store has one; what does not match is read once more."""
        if self.catalog.digests is None or self._matches(load):
            return
        source = self.catalog.layers[load.layer]
        for spans in _pieces(source, source.experts[load.expert]):
            self.bring(Job(ReadTransfer(), load, spans), scratch)
        if not self._matches(load):
            segment = source.experts[load.expert][0]
            raise StoreError(
                f"layer {load.layer}, expert {load.expert} does not match its digest: {self.files[segment.file].path} "
                f"is damaged at byte {segment.offset:,} or after; pack the model again"
            )

    def _matches(self, load: Load) -> bool:
        """Whether the bytes in a slot are those that were packed: in full the first time, then by their sum."""
        source, slot = self.catalog.layers[load.layer], self.memory_of(load.row)
        assert self.catalog.digests is not None  # noqa: S101 - asked before
        block, digest = slot[: source.layout.used_bytes], self.catalog.digests[load.layer][load.expert]
        if self._verified[load.layer][load.expert]:
            return same_sum(block, digest)
        matches = digest_of(block) == digest
        self._verified[load.layer][load.expert] = matches
        return matches


class Scratch:
    """The memory of one thread for what cannot be read straight into a slot; it grows to the largest piece."""

    def __init__(self) -> None:
        self._window = np.empty(0, np.uint8)
        self._raw = np.empty(0, np.uint8)

    def window(self, needed_bytes: int) -> Bytes:
        """Aligned room for a direct read that covers so many bytes."""
        size = -(-needed_bytes // PAGE_BYTES) * PAGE_BYTES
        if len(self._window) < size:
            self._window = huge_buffer(size)
        return self._window[:size]

    def raw(self, needed_bytes: int) -> Bytes:
        """Room for the undecoded bytes of an expert."""
        if len(self._raw) < needed_bytes:
            self._raw = huge_buffer(needed_bytes)
        return self._raw[:needed_bytes]


def _work(owner: Readers, jobs: Jobs) -> None:
    """One thread's loop."""
    scratch = Scratch()
    while (job := jobs.next()) is not None:
        _do(owner, job, scratch)


def _do(owner: Readers, job: Job, scratch: Scratch) -> None:
    transfer, expert = job.transfer, job.load.expert
    try:
        error = _caught(lambda: owner.bring(job, scratch))
        if transfer.piece_done(expert, error):
            transfer.complete(expert, transfer.error_of(expert) or _caught(lambda: owner.check(job.load, scratch)))
    finally:
        transfer.end()


def _caught(work: Callable[[], None]) -> BaseException | None:
    """Do the work and return what it raised: that belongs to the caller that waits for the expert."""
    try:
        work()
    except BaseException as error:
        return error
    return None


def default_threads() -> int:
    """Enough to keep a disk busy; more only get in each other's way, and in that of compute."""
    return min(4, 2 * (os.cpu_count() or 2))


def _pieces(source: LayerSource, segments: tuple[Segment, ...]) -> list[tuple[Span, ...]]:
    """Split an expert among threads, unless it must be decoded as a whole."""
    spans = chunks(segments, CHUNK_BYTES)
    return [tuple(spans)] if source.decode is not None else [(span,) for span in spans] or [()]

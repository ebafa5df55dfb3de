"""Reader threads: what is cancelled is not written to any more, and threads end when they are not needed."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from transfer_samples import catalog_of, load_all, naive, slots_of, write

from hotset.errors import HotsetError, StoreError
from hotset.store import PAGE_BYTES, Segment
from hotset.transfer import Readers, ReadTransfer, file, reads
from hotset.transfer.reads import Load

EXPERTS = [[Segment(0, expert * PAGE_BYTES, PAGE_BYTES, 0)] for expert in range(8)]


class Gate:
    """Holds every read until it is opened, and knows how many wait."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.waiting = threading.Semaphore(0)
        self.reads = 0

    def preadv(self, handle: int, buffers: list[memoryview], offset: int) -> int:
        self.waiting.release()
        assert self.open.wait(30)
        self.reads += 1
        return os.preadv(handle, buffers, offset)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    held = Gate()
    monkeypatch.setattr(file, "_preadv", held.preadv)
    yield held
    held.open.set()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "store.bin", 8 * PAGE_BYTES)


def test_abandon_waits_for_reads_that_have_begun_and_skips_the_rest(path: Path, gate: Gate) -> None:
    slots = slots_of(8, PAGE_BYTES)
    readers = Readers(catalog_of([path], EXPERTS, PAGE_BYTES), slots.__getitem__, threads=2)
    called_off = ReadTransfer()
    readers.start(called_off, [Load(0, expert, expert) for expert in range(8)])
    assert gate.waiting.acquire(timeout=30)
    assert gate.waiting.acquire(timeout=30)  # two threads are in the middle of a read
    returned = threading.Event()
    leaving = threading.Thread(target=lambda: (called_off.cancel_and_wait(), returned.set()))
    leaving.start()
    assert not returned.wait(0.2), "abandon returned while a thread could still write to a slot"
    gate.open.set()
    assert returned.wait(30)
    leaving.join()
    assert gate.reads == 2, "what had not begun was read all the same"
    before = [slot.tobytes() for slot in slots]
    assert [slot.any() for slot in slots].count(True) == 2
    time.sleep(0.05)
    assert [slot.tobytes() for slot in slots] == before
    load_all(readers, 8)  # the same threads serve the next transfer
    assert all(slots[e].tobytes() == naive([path], EXPERTS[e], PAGE_BYTES) for e in range(8))
    readers.close()


def test_abandon_of_a_dead_disk_gives_up(path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "CANCEL_TIMEOUT_S", 0.05)
    readers = Readers(catalog_of([path], EXPERTS, PAGE_BYTES), slots_of(1, PAGE_BYTES).__getitem__, threads=1)
    stuck = ReadTransfer()
    readers.start(stuck, [Load(0, 0, 0)])
    assert gate.waiting.acquire(timeout=30)
    with pytest.raises(HotsetError, match="does not answer"):
        stuck.cancel_and_wait()
    gate.open.set()
    readers.close()


def test_an_expert_in_many_pieces_lands_once_when_the_last_is_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotset.transfer.readers.CHUNK_BYTES", PAGE_BYTES)
    whole = [[Segment(0, 0, 8 * PAGE_BYTES, 0)]]
    slots = slots_of(1, 8 * PAGE_BYTES)
    readers = Readers(catalog_of([path], whole, 8 * PAGE_BYTES), slots.__getitem__, threads=4)
    for _ in range(50):
        slots[0][:] = 0
        one = ReadTransfer()
        readers.start(one, [Load(0, 0, 0)])
        assert one.wait_any() == [0]
        assert slots[0].tobytes() == path.read_bytes()
        assert one.completed.empty()
    readers.close()


def test_close_ends_the_threads_and_later_loads_are_refused(path: Path) -> None:
    readers = Readers(catalog_of([path], EXPERTS, PAGE_BYTES), slots_of(1, PAGE_BYTES).__getitem__, threads=3)
    threads = list(readers.threads)
    readers.close()
    assert not any(thread.is_alive() for thread in threads)
    readers.close()
    with pytest.raises(StoreError, match="closed"):
        readers.start(ReadTransfer(), [Load(0, 0, 0)])


def test_forgotten_readers_end_their_threads_and_give_their_files_back(path: Path) -> None:
    slots = slots_of(8, PAGE_BYTES)
    readers = Readers(catalog_of([path], EXPERTS, PAGE_BYTES), slots.__getitem__, threads=3)
    load_all(readers, 8)
    threads, handle = list(readers.threads), readers.files[0].handle
    del readers
    gc.collect()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)

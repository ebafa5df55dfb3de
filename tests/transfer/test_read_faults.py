"""What disks do on bad days: short reads, passing and lasting errors, files that shrink, and refused direct reads."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transfer_samples import catalog_of, load_all, naive, noise, slots_of, write

from hotset.errors import HotsetError, StoreError
from hotset.store import PAGE_BYTES, Segment
from hotset.store.catalog import Bytes
from hotset.store.digest import digest_of
from hotset.transfer import Readers, ReadTransfer, file
from hotset.transfer.file import StoreFile, aligned_buffer
from hotset.transfer.reads import Load

SIZE = 6 * PAGE_BYTES
Preadv = Callable[[int, list[memoryview], int], int]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "store.bin", SIZE + 100)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "RETRY_PAUSE_S", 0.0)


def filled(path: Path, offset: int = 0, needed: int = SIZE, *, direct: bool = True) -> bytes:
    buffer = aligned_buffer(needed)
    opened = StoreFile(path, direct=direct)
    try:
        opened.fill(memoryview(buffer), offset, needed)
    finally:
        opened.close()
    return bytes(buffer[:needed])


@pytest.mark.parametrize(
    ("direct", "at_most"),
    [(True, n) for n in (PAGE_BYTES, PAGE_BYTES + 512, 3 * PAGE_BYTES + 1)] + [(False, n) for n in (100, 1000, 9999)],
)
def test_short_reads_go_on(path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool, at_most: int) -> None:
    monkeypatch.setattr(file, "_preadv", lambda handle, buffers, offset: short(handle, buffers, offset, at_most))
    assert filled(path, direct=direct) == path.read_bytes()[:SIZE]


def short(handle: int, buffers: list[memoryview], offset: int, at_most: int) -> int:
    """Read only so much, and leave nonsense behind it."""
    got = min(os.preadv(handle, buffers, offset), at_most)
    buffers[0][got:] = bytes(len(buffers[0]) - got)
    return got


def test_one_short_direct_read_within_a_page_is_retried(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def once(handle: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        return short(handle, buffers, offset, 512) if len(calls) == 1 else os.preadv(handle, buffers, offset)

    monkeypatch.setattr(file, "_preadv", once)
    assert filled(path) == path.read_bytes()[:SIZE]
    assert calls == [0, 0]


def failing(times: int, code: int) -> Preadv:
    left = [times]

    def preadv(handle: int, buffers: list[memoryview], offset: int) -> int:
        if left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code))
        return os.preadv(handle, buffers, offset)

    return preadv


@pytest.mark.parametrize("times", [1, file.RETRIES])
def test_a_passing_error_is_retried(path: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    monkeypatch.setattr(file, "_preadv", failing(times, errno.EIO))
    assert filled(path) == path.read_bytes()[:SIZE]


@pytest.mark.parametrize("code", [errno.EIO, errno.EBADF])
def test_a_lasting_error_names_file_and_offset(path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(file, "_preadv", failing(10**9, code))
    with pytest.raises(StoreError, match=r"store\.bin at byte 4,096 failed: .*check the disk"):
        filled(path, PAGE_BYTES, PAGE_BYTES)


def test_refused_direct_reads_become_buffered_ones(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = StoreFile(path)
    if not opened.direct:
        pytest.skip("this file system knows no direct reads")

    def refuse(handle: int, buffers: list[memoryview], offset: int) -> int:
        if os.get_blocking(handle) and opened.direct:
            raise OSError(errno.EINVAL, "no")
        return os.preadv(handle, buffers, offset)

    monkeypatch.setattr(file, "_preadv", refuse)
    buffer = bytearray(777)
    opened.fill(memoryview(buffer), 333, 777)  # not aligned in any way: it can only have been read through the cache
    assert not opened.direct
    assert bytes(buffer) == path.read_bytes()[333 : 333 + 777]
    opened.close()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("left", [0, 100, PAGE_BYTES, 3 * PAGE_BYTES + 5])
def test_a_file_truncated_after_opening_says_where_it_ends(path: Path, direct: bool, left: int) -> None:
    opened = StoreFile(path, direct=direct)
    os.truncate(path, left)
    with pytest.raises(StoreError, match=rf"store\.bin ends at byte {left:,}, .*truncated"):
        opened.fill(memoryview(aligned_buffer(SIZE)), 0, SIZE)
    opened.close()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot open .*gone\.bin: No such file"):
        StoreFile(tmp_path / "gone.bin")


EXPERTS = [
    [Segment(0, 10, 5000, 0), Segment(0, 5010, 200, 8192)],
    [Segment(0, 0, 2 * PAGE_BYTES, 0)],
    [Segment(0, 7777, 1, 3), Segment(0, 2 * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES)],
]
SLOT = 3 * PAGE_BYTES


@pytest.mark.parametrize("direct", [True, False])
def test_direct_and_buffered_readers_agree_with_the_file(path: Path, direct: bool) -> None:
    slots = slots_of(3, SLOT)
    readers = Readers(catalog_of([path], EXPERTS, SLOT), slots.__getitem__, direct=direct)
    load_all(readers, 3)
    readers.close()
    for expert, segments in enumerate(EXPERTS):
        assert slots[expert].tobytes() == naive([path], segments, SLOT)


def test_an_error_reaches_whoever_waits_and_the_readers_live_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = slots_of(3, SLOT)
    readers = Readers(catalog_of([path], EXPERTS, SLOT), slots.__getitem__)
    monkeypatch.setattr(file, "_preadv", failing(10**9, errno.EIO))
    transfer = ReadTransfer()
    readers.start(transfer, [Load(0, expert, expert) for expert in range(3)])
    with pytest.raises(StoreError, match="Input/output error"):
        transfer.wait_any()
    transfer.cancel_and_wait()
    monkeypatch.setattr(file, "_preadv", os.preadv)
    load_all(readers, 3)
    assert slots[1].tobytes() == naive([path], EXPERTS[1], SLOT)
    readers.close()


def test_decoding_gets_the_raw_bytes_and_fills_the_slot(path: Path) -> None:
    def negate(_: int, raw: Bytes, slot: Bytes) -> None:
        np.subtract(255, raw, out=slot[: len(raw)])

    segments = [Segment(0, 4000, 300, 0), Segment(0, 100, 6000, 320)]
    slots = slots_of(1, SLOT)
    readers = Readers(catalog_of([path], [segments], SLOT, negate), slots.__getitem__)
    load_all(readers, 1)
    readers.close()
    raw = np.frombuffer(naive([path], segments, 6320), np.uint8)
    for at, size in ((0, 300), (320, 6000)):
        assert np.array_equal(slots[0][at : at + size], 255 - raw[at : at + size])


def test_a_decoder_that_fails_is_an_error_of_its_expert(path: Path) -> None:
    def broken(_: int, raw: Bytes, slot: Bytes) -> None:
        raise ZeroDivisionError("no")

    readers = Readers(catalog_of([path], [[Segment(0, 0, 100, 0)]], SLOT, broken), slots_of(1, SLOT).__getitem__)
    with pytest.raises(HotsetError, match="loading expert 0 failed: ZeroDivisionError"):
        load_all(readers, 1)
    readers.close()


def test_a_flipped_bit_is_found_the_first_time_the_expert_is_read(tmp_path: Path) -> None:
    content = bytearray(noise(2 * PAGE_BYTES))
    digests = [[digest_of(np.frombuffer(part, np.uint8)) for part in (content[:PAGE_BYTES], content[PAGE_BYTES:])]]
    content[PAGE_BYTES + 17] ^= 4
    path = tmp_path / "experts.hotset"
    path.write_bytes(content)
    experts = [[Segment(0, 0, PAGE_BYTES, 0)], [Segment(0, PAGE_BYTES, PAGE_BYTES, 0)]]
    readers = Readers(catalog_of([path], experts, PAGE_BYTES, None, digests), slots_of(2, PAGE_BYTES).__getitem__)
    load_all(readers, 1)
    transfer = ReadTransfer()
    readers.start(transfer, [Load(0, 1, 1)])
    with pytest.raises(StoreError, match=r"layer 0, expert 1 .*experts\.hotset is damaged at byte 4,096 .*again"):
        transfer.wait_any()
    readers.close()


def flipping(times: int) -> Preadv:
    """Reads in which one bit comes over wrong, so many times."""
    left = [times]

    def preadv(handle: int, buffers: list[memoryview], offset: int) -> int:
        got = os.preadv(handle, buffers, offset)
        if left[0]:
            left[0] -= 1
            buffers[0][got // 2] ^= 16
        return got

    return preadv


@pytest.mark.parametrize("earlier", [0, 1, 3])
def test_a_bit_that_comes_over_wrong_is_read_again_at_every_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: int
) -> None:
    path = write(tmp_path / "experts.hotset", PAGE_BYTES)
    slots = slots_of(1, PAGE_BYTES)
    digests = [[digest_of(np.frombuffer(path.read_bytes(), np.uint8))]]
    experts = [[Segment(0, 0, PAGE_BYTES, 0)]]
    readers = Readers(catalog_of([path], experts, PAGE_BYTES, None, digests), slots.__getitem__)
    for _ in range(earlier):
        load_all(readers, 1)
    monkeypatch.setattr(file, "_preadv", flipping(1))
    load_all(readers, 1)
    assert slots[0].tobytes() == path.read_bytes()
    monkeypatch.setattr(file, "_preadv", flipping(2))
    with pytest.raises(StoreError, match="does not match its digest"):
        load_all(readers, 1)
    monkeypatch.setattr(file, "_preadv", os.preadv)
    load_all(readers, 1)
    readers.close()


def test_an_expert_without_bytes_lands(path: Path) -> None:
    readers = Readers(catalog_of([path], [[Segment(0, 5, 0, 0)]], SLOT), slots_of(1, SLOT).__getitem__)
    load_all(readers, 1)
    readers.close()


def open_handles() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_files_are_given_back(path: Path, tmp_path: Path) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc")
    before = open_handles()
    opened = StoreFile(path)
    opened.close()
    opened.close()  # twice does no harm
    forgotten: Any = StoreFile(path)
    del forgotten
    with pytest.raises(StoreError):
        Readers(catalog_of([path, tmp_path / "gone"], EXPERTS, SLOT), slots_of(1, SLOT).__getitem__)
    assert open_handles() == before

"""Reading a packed store again, every byte, to see whether the disk kept what was written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotset.errors import StoreError
from hotset.store.catalog import Bytes
from hotset.store.digest import digest_of, new_digest
from hotset.store.index import CHUNK_BYTES, REMEDY, FileDigest
from hotset.store.packed import BLOCKS_FILE, open_index
from hotset.store.plan import PackKey, PackPlan

THREADS = 2
NAMED = 3
"""How many damages a message names before it only counts them."""

Progress = Callable[[int, int], None]
"""Called with the bytes done so far and all bytes to be done."""


class Meter:
    """Adds up bytes that are done, and says so."""

    def __init__(self, progress: Progress | None, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._progress, self._done = progress, 0

    def advance(self, size_bytes: int) -> None:
        """Have so many more bytes done."""
        self._done += size_bytes
        if self._progress is not None and size_bytes:
            self._progress(self._done, self.total_bytes)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was read and found to be right."""

    experts: int
    files: int
    size_bytes: int
    small: int = 0  # of the files; none in a pack of an earlier version


def verify_packed(folder: Path, progress: Progress | None = None) -> VerifyReport:
    """Check every block and every other file; StoreError names what is damaged."""
    index = open_index(folder)
    keys, files = list(index.plan.keys()), index.files | index.small
    total = sum(index.plan.used_bytes(key) for key in keys) + sum(size for size, _ in files.values())
    meter, damages = Meter(progress, total), []
    for key, digest in block_digests(folder / BLOCKS_FILE, index.plan, keys):
        if digest != index.digests[key.layer][key.expert]:
            damages.append(f"{index.plan.name(key)} in {folder / BLOCKS_FILE} at byte {index.plan.offset(key):,}")
        meter.advance(index.plan.used_bytes(key))
    for name, expected in files.items():
        if file_digest(folder / name) != expected:
            damages.append(str(folder / name))
        meter.advance(expected[0])
    if damages:
        more = f" and {len(damages) - NAMED:,} more" if damages[NAMED:] else ""
        raise StoreError(f"damaged: {'; '.join(damages[:NAMED])}{more}; {REMEDY}")
    return VerifyReport(len(keys), len(files), total, len(index.small))


def block_digests(path: Path, plan: PackPlan, keys: Iterable[PackKey]) -> Iterator[tuple[PackKey, bytes | None]]:
    """The digests of blocks as the disk has them, in the order asked for; None where the disk has no such bytes."""
    wanted = list(keys)
    with _reading(path) as handle, ThreadPoolExecutor(THREADS, "hotset-verify") as pool:
        found = pool.map(lambda key: _block_digest(handle, plan.offset(key), plan.used_bytes(key)), wanted)
        yield from zip(wanted, found, strict=True)


def file_digest(path: Path) -> FileDigest | None:
    """The size and the digest of a file as the disk has it; None if it cannot be read."""
    found = file_digests(path)
    return None if found is None else found[0]


def file_digests(path: Path) -> tuple[FileDigest, list[bytes]] | None:
    """The size and the digest of a file as the disk has it, and those of its chunks; None if it cannot be read."""
    digest, size, chunks = new_digest(), 0, []
    try:
        with _reading(path) as handle:
            while len(chunk := read_up_to(handle, CHUNK_BYTES, size)):
                digest.update(chunk.data)
                chunks.append(digest_of(chunk))
                size += len(chunk)
    except StoreError:
        return None
    return (size, digest.digest()), chunks


def read_up_to(handle: int, size_bytes: int, offset: int) -> Bytes:
    """So many bytes of a file from an offset on, or all that there are."""
    block, done = np.empty(size_bytes, np.uint8), 0
    while done < size_bytes and (got := os.preadv(handle, [block[done:].data], offset + done)):
        done += got
    return block[:done]


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A file to read from; one that cannot be read raises StoreError."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield handle
        finally:
            os.close(handle)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}; {REMEDY}") from error


@contextmanager
def _reading(path: Path) -> Iterator[int]:
    with opened(path) as handle:
        forget(handle)  # what memory remembers says nothing about the disk
        yield handle
        forget(handle)


def forget(handle: int) -> None:
    """Drop a file from the page cache."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _block_digest(handle: int, offset: int, size_bytes: int) -> bytes | None:
    try:
        block = read_up_to(handle, size_bytes, offset)
    except OSError:
        return None
    return digest_of(block) if len(block) == size_bytes else None

"""One file of a store, read past the page cache where the system allows it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np

from hotset.errors import StoreError
from hotset.store.catalog import Bytes
from hotset.store.layout import PAGE_BYTES, round_up

HUGE_BYTES = 2 << 20
RETRIES = 3
RETRY_PAUSE_S = 0.02
_PASSING = {errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.ENOMEM}
_preadv = os.preadv  # tests replace it to inject faults


def aligned_buffer(size_bytes: int) -> mmap.mmap:
    """Fresh memory that begins on a page, as direct reads demand."""
    return mmap.mmap(-1, round_up(max(size_bytes, 1), PAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def huge_buffer(size_bytes: int) -> Bytes:
    """Fresh memory in huge pages where the system has them: a direct read locks every page, and few are soon locked."""
    size = round_up(max(size_bytes, 1), HUGE_BYTES)
    block = mmap.mmap(-1, size + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError, ValueError):  # a help, not a need
        block.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(block, np.uint8)
    start = -memory.ctypes.data % HUGE_BYTES
    return memory[start : start + size]


class StoreFile:
    """A file of a store; reads either fill the whole buffer or raise StoreError."""

    def __init__(self, path: Path, *, direct: bool = True) -> None:
        self.path = path
        self.direct = direct and hasattr(os, "O_DIRECT")
        try:
            self._open()
        except OSError as error:
            raise StoreError(f"cannot open {path}: {error.strerror or error}") from error

    def _open(self) -> None:
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
        try:
            self.handle = os.open(self.path, flags | (os.O_DIRECT if self.direct else 0))
        except OSError as error:
            if not self.direct or error.errno != errno.EINVAL:
                raise
            self.direct = False  # this file system knows no direct reads
            self.handle = os.open(self.path, flags)
        self._close = weakref.finalize(self, os.close, self.handle)  # forgotten files must not hold handles
        self.size_bytes = os.fstat(self.handle).st_size
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.handle, 0, 0, os.POSIX_FADV_RANDOM)

    def close(self) -> None:
        """Give the file handle back."""
        self._close()

    def fill(self, buffer: memoryview, offset: int, needed_bytes: int) -> None:
        """Read from the offset until the first so many bytes of the buffer are there; direct reads must be aligned."""
        done = stalls = 0
        while done < needed_bytes:
            got = self._read(buffer[done:], offset + done)
            reached = done + got
            if self.direct and reached < needed_bytes:
                reached -= reached % PAGE_BYTES  # an interrupted direct read goes on at the last whole page
            stalls = stalls + 1 if reached == done else 0
            if got == 0 or stalls > RETRIES:  # less than a page again and again is a file that ends within that page
                raise StoreError(
                    f"{self.path} ends at byte {offset + done + got:,}, but {needed_bytes - done - got:,} bytes should "
                    "follow: the file was truncated; copy or download it again"
                )
            done = reached
        self._forget(offset, done)

    def _read(self, buffer: memoryview, offset: int) -> int:
        for attempt in range(RETRIES + 1):
            try:
                return _preadv(self.handle, [buffer], offset)
            except OSError as error:
                if error.errno == errno.EINVAL and self.direct:
                    self._go_buffered()
                    continue
                if error.errno not in _PASSING or attempt == RETRIES:
                    raise StoreError(
                        f"reading {self.path} at byte {offset:,} failed: {error.strerror or error}"
                        f"{f' ({RETRIES + 1} tries)' if attempt else ''}; check the disk, or copy the file elsewhere"
                    ) from error
                time.sleep(RETRY_PAUSE_S * 2**attempt)
        raise AssertionError("unreachable")

    def _go_buffered(self) -> None:
        """Some file systems open for direct reads and then refuse them: read through the page cache from here on."""
        fcntl.fcntl(self.handle, fcntl.F_SETFL, fcntl.fcntl(self.handle, fcntl.F_GETFL) & ~os.O_DIRECT)
        self.direct = False

    def _forget(self, offset: int, size_bytes: int) -> None:
        """Keep the page cache from holding a second copy that no budget counts."""
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.handle, offset, size_bytes, os.POSIX_FADV_DONTNEED)

"""Reading files that are not trusted: regular ones only, and never more memory than a sound file would take.

A pipe would wait for ever, a sparse file has gigabytes that take no disk, and a few bytes of JSON make many of lists.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_CONTAINERS, _SEPARATORS = (b"[", b"{"), (b",", b":")


class TooLargeError(ValueError):
    """A file, a line or a document is larger than any that is meant."""


def open_regular(path: Path) -> IO[bytes]:
    """Open a file for reading; a folder, a pipe or a device is an OSError, and is not waited for."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is a folder, a pipe or a device, not a regular file", str(path))
    return os.fdopen(handle, "rb")


def check_regular(path: Path) -> None:
    """Raise OSError unless a path names a regular file that may be read."""
    open_regular(path).close()


def odd_file(folder: Path) -> Path | None:
    """The first entry of a folder that is neither a file nor a folder, and that a library would wait for."""
    if not folder.is_dir():
        return None
    for entry in sorted(folder.iterdir()):
        try:
            mode = entry.stat().st_mode
        except OSError:  # a link that leads nowhere is found when it is needed
            continue
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            return entry
    return None


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """All of a small file; one that is larger raises TooLargeError before it is read."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise TooLargeError(f"it is larger than {most_bytes:,} bytes")
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise TooLargeError(f"it is larger than {most_bytes:,} bytes")
    return data


def lines_of(file: IO[bytes], most_bytes: int) -> Iterator[bytes]:
    """The lines of a file; one that is longer comes cut to a byte more than allowed, so that it can be named."""
    while line := file.readline(most_bytes + 1):
        yield line


def parse_bounded(data: bytes, *, values: int, containers: int) -> Any:
    """Parse JSON of at most so many values and lists; more raise TooLargeError before any is made.

    What stands in quotes is counted, too: the bounds are far above what a sound document has.
    """
    if sum(map(data.count, _CONTAINERS)) > containers or sum(map(data.count, _SEPARATORS)) > values:
        raise TooLargeError(f"it has more than {values:,} values or {containers:,} lists")
    return json.loads(data)


def header_bytes(path: Path, most_bytes: int) -> bytes:
    """The header of a safetensors file; one that claims more bytes than allowed, or than there are, raises."""
    with open_regular(path) as file:
        start = file.read(8)
        if len(start) < 8:
            raise ValueError("it is too short to have a header")
        (length,) = struct.unpack("<Q", start)
        if length > min(most_bytes, os.fstat(file.fileno()).st_size - 8):
            raise TooLargeError(f"its header claims {length:,} bytes")
        return file.read(length)

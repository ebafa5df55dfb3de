"""Reading arrays out of a zip archive without trusting it: no pickle, nothing allocated on its word alone."""

from __future__ import annotations

import io
import math
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from hotset.errors import TraceError

_HEAD_BYTES = 16384
_BLOCK_BYTES = 1 << 20
_MAX_GROWTH = 64
_SPARE_BYTES = 1 << 20
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
FAULTS = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, KeyError, IndexError,
    NotImplementedError, RuntimeError, OverflowError,
)  # fmt: skip


def read_arrays(path: Path, names: Iterable[str]) -> dict[str, npt.NDArray[Any]]:
    """Read those of the named arrays that the archive holds; whatever is wrong with it raises TraceError."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.NameToInfo.get(f"{name}.npy") for name in names}
            found = {name: member for name, member in members.items() if member is not None}
            refuse_bomb(found.values(), path.stat().st_size)
            return {name: _read_member(archive, member) for name, member in found.items()}
    except FAULTS as error:
        raise TraceError(f"{path} is not a numpy archive, or it is damaged: {str(error)[:200]}") from None


def refuse_bomb(members: Iterable[zipfile.ZipInfo], file_bytes: int) -> None:
    """Raise TraceError for members that are packed beyond reason, or claim more bytes than the file has."""
    total = 0
    for member in members:
        if member.compress_size > file_bytes:  # zipfile allocates what it is told to read
            raise TraceError(f"{member.filename} claims more bytes than the file has: it is damaged or cut off")
        if member.compress_type not in _METHODS:
            raise TraceError(f"{member.filename} is packed in an unusual way: save it again with numpy.savez")
        total += member.file_size
        if total > _MAX_GROWTH * file_bytes + _SPARE_BYTES:
            raise TraceError(
                f"{member.filename} unpacks to more than {_MAX_GROWTH} times the size of the file; "
                "if that is meant, save it again uncompressed with numpy.savez"
            )


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> npt.NDArray[Any]:
    return parse_array(lambda: archive.open(member), member.file_size, member.filename)


def first_member(head: bytes) -> bytes:
    """The name of the first member of a zip archive, by its first bytes; nothing for anything else."""
    if len(head) < 30 or not head.startswith(b"PK\x03\x04"):
        return b""
    (length,) = struct.unpack_from("<H", head, 26)
    return head[30 : 30 + length]


def parse_array(opened: Callable[[], IO[bytes]], length: int, name: str) -> npt.NDArray[Any]:
    """The array of a .npy file of so many bytes, which is opened anew to read its data."""
    with opened() as file:
        shape, fortran, dtype, offset = _parse_head(file.read(_HEAD_BYTES), name)
    if math.prod(shape) * dtype.itemsize != length - offset:
        raise TraceError(f"{name} claims {dtype} {shape}, which is not the size of its data")
    raw = np.empty(length - offset, np.uint8)
    with opened() as file:
        file.read(offset)
        fill(file, raw, name)
    array = raw.view(dtype).reshape(shape, order="F" if fortran else "C")
    return np.ascontiguousarray(array, dtype.newbyteorder("="))


def _parse_head(head: bytes, name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    stream = io.BytesIO(head)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shape, fortran, dtype = readers[npy.read_magic(stream)](stream)
    except Exception:  # the header is a Python literal, and a damaged one can fail in any way
        raise TraceError(f"{name} does not start as a numpy array does") from None
    if dtype.kind not in "iufb" or dtype.itemsize > 8:
        raise TraceError(f"{name} holds {str(dtype)[:40]}, not plain numbers")
    if any(type(length) is not int or length < 0 for length in shape):
        raise TraceError(f"{name} claims an impossible shape")
    return shape, fortran, dtype, stream.tell()


def fill(file: Any, raw: npt.NDArray[np.uint8], name: str) -> None:
    """Read exactly the bytes asked for, to the end, so that the checksum is looked at."""
    at = 0
    while block := file.read(_BLOCK_BYTES):
        raw[at : at + len(block)] = np.frombuffer(block, np.uint8)
        at += len(block)
    if at != len(raw):
        raise TraceError(f"{name} ends early: the archive is cut off")

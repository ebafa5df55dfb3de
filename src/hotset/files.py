"""Writing files so that a crash, a full disk or a kill never leaves half of one in place.

A file is written in a private folder beside its place, which its writer holds a lock on: other users can prepare no
links there, whatever a library leaves there goes with it, and the next writer removes the folders of killed ones.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hotset.errors import HotsetError

_OURS = re.compile(r"\..*\.hotset-[a-z0-9_]{8}\.part")
_EARLIER_STALE_S = 3600
"""Files that earlier versions left beside, without a lock, are taken for left over after so long."""
_NAME_BYTES = 120


@contextmanager
def write_beside(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same file system; rename it over `path` once the block succeeds.

    A file that is there keeps its mode.
    """
    with _private_folder(path) as folder:
        scratch = folder / path.name
        try:
            mode = _mode(path, _create(scratch))
            yield scratch
            _flush(scratch)
            scratch.chmod(mode)
            os.replace(scratch, path)
        except OSError as error:
            raise HotsetError(
                f"cannot write {path}: {error.strerror or error}; free some space or choose another place"
            ) from error


def check_place(path: Path) -> None:
    """Refuse a place where no file can be written, before the work and not after it."""
    if path.is_dir():
        raise HotsetError(f"{path} is a folder: give the name of a file")
    with _private_folder(path) as folder:
        try:
            _create(folder / path.name)
        except OSError as error:
            raise HotsetError(f"cannot write {path}: {error.strerror or error}; choose another place") from error


def remove_left_over(folder: Path, name: str | None = None) -> None:
    """Remove what killed writers left in a folder; what a living one, of any process, is writing is left alone."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in list(entries):
            if _OURS.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                _remove_if_dead(Path(entry.path))
            elif name is not None and _is_earlier(entry, name):
                Path(entry.path).unlink(missing_ok=True)


@contextmanager
def _private_folder(path: Path) -> Iterator[Path]:
    remove_left_over(path.parent, path.name)
    try:
        folder, lock = _locked_folder(path)
    except OSError as error:
        raise HotsetError(
            f"cannot write {path}: {error.strerror or error}; does the folder exist, and may you write there?"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(path: Path) -> tuple[Path, int]:
    """A fresh folder and the handle that locks it; another writer may have cleaned it away before it was locked."""
    name = path.name.encode()[:_NAME_BYTES].decode(errors="ignore")
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f".{name}.hotset-", suffix=".part", dir=path.parent))
        lock = -1
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            _lock(lock)
            if os.path.samestat(os.stat(folder), os.fstat(lock)):
                return folder, lock
        if lock >= 0:
            os.close(lock)


def _lock(handle: int) -> None:
    with suppress(OSError):  # a file system without locks: then nothing is ever taken for left over
        fcntl.flock(handle, fcntl.LOCK_EX)


def _remove_if_dead(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # its writer lives, or the file system cannot tell
    finally:
        os.close(handle)


def _is_earlier(entry: os.DirEntry[str], name: str) -> bool:
    """Whether this is what a killed writer of this file left, as earlier versions called it."""
    if not (entry.name.startswith(f".{name}.") and re.fullmatch(r"[a-z0-9_]{8}\.part", entry.name[len(name) + 2 :])):
        return False
    found = entry.stat(follow_symlinks=False)
    return stat.S_ISREG(found.st_mode) and time.time() - found.st_mtime > _EARLIER_STALE_S


def _create(scratch: Path) -> int:
    """Make an empty file that was not there; returns the mode that the system gives to new files."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(scratch, flags, 0o666)
    try:
        return stat.S_IMODE(os.fstat(handle).st_mode)
    finally:
        os.close(handle)


def _mode(path: Path, fresh: int) -> int:
    """The mode of the file that will be replaced, or that of a new one."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return fresh
    return stat.S_IMODE(found.st_mode) & 0o777 if stat.S_ISREG(found.st_mode) else fresh


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())

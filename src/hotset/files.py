"""Writing files so that a crash, a full disk or a kill never leaves half of one in place."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hotset.errors import HotsetError


@contextmanager
def write_beside(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; rename it over `path` once the block succeeds."""
    scratch = _scratch_beside(path)
    try:
        yield scratch
        _flush(scratch)
        scratch.chmod(0o666 & ~_umask())
        os.replace(scratch, path)
    except OSError as error:
        raise HotsetError(
            f"cannot write {path}: {error.strerror or error}; free some space or choose another place"
        ) from error
    finally:
        scratch.unlink(missing_ok=True)


def _scratch_beside(path: Path) -> Path:
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise HotsetError(
            f"cannot write {path}: {error.strerror or error}; does the folder exist, and may you write there?"
        ) from error
    os.close(handle)
    return Path(name)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())

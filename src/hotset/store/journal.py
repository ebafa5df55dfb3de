"""The journal of an unfinished pack: what is certainly on the disk, one line each, so that a killed pack can go on."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hotset.errors import StoreError
from hotset.reading import lines_of
from hotset.store.index import FileDigest
from hotset.store.plan import PackKey

JOURNAL_FILE = "pack.journal"
MAX_LINE_BYTES = 1 << 16


class Journal:
    """An append-only file of lines: first whose pack this is, then the digest of every finished block and file."""

    def __init__(self, folder: Path, owner: dict[str, str], *, durable: bool = True) -> None:
        self.path, self.durable = folder / JOURNAL_FILE, durable
        self.blocks: dict[PackKey, bytes] = {}
        self.files: dict[str, FileDigest] = {}
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            self._lock(folder)
            self._end = self._replay(folder, owner)
            os.ftruncate(self._handle, self._end)  # a line torn by a crash must not spoil the next one
            if self._end == 0:
                self._append([owner])
        except BaseException:
            self.close()
            raise

    def add_blocks(self, blocks: dict[PackKey, bytes]) -> None:
        """Note blocks that are on the disk."""
        self._append([[*key, digest.hex()] for key, digest in blocks.items()])
        self.blocks |= blocks

    def add_file(self, name: str, file: FileDigest) -> None:
        """Note a file that is on the disk."""
        self._append([[name, file[0], file[1].hex()]])
        self.files[name] = file

    def close(self) -> None:
        """Let another process go on with this pack."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1

    def _lock(self, folder: Path) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(f"another hotset is writing {folder}: let it finish, or end it first") from error

    def _append(self, records: Iterable[Any]) -> None:
        data = "".join(json.dumps(record) + "\n" for record in records).encode()
        done = 0
        while done < len(data):
            done += os.pwrite(self._handle, data[done:], self._end + done)
        if self.durable:
            os.fsync(self._handle)
        self._end += len(data)

    def _replay(self, folder: Path, owner: dict[str, str]) -> int:
        """Read what is there up to the first line that is not whole; returns where that line begins."""
        with self.path.open("rb") as file:
            first = file.readline(MAX_LINE_BYTES)
            found = _record(first)
            if not isinstance(found, dict):
                return 0
            _check_owner(folder, found, owner)
            end = len(first)
            for line in lines_of(file, MAX_LINE_BYTES):
                if not self._take(_record(line)):
                    break
                end += len(line)
        return end

    def _take(self, record: Any) -> bool:
        match record:
            case [int(layer), int(expert), str(digest)]:
                self.blocks[PackKey(layer, expert)] = _digest(digest)
            case [str(name), int(size), str(digest)]:
                self.files[name] = (size, _digest(digest))
            case _:
                return False
        return True


def _record(line: bytes) -> Any:
    try:
        return json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None


def _digest(text: str) -> bytes:
    """A digest that was garbled matches no block, and that is all that is asked of it."""
    return bytes.fromhex(text) if len(text) % 2 == 0 and all(c in "0123456789abcdef" for c in text) else b""


def _check_owner(folder: Path, found: dict[str, Any], owner: dict[str, str]) -> None:
    if found == owner:
        return
    differs = next((key for key in owner if found.get(key) != owner[key]), "format")
    raise StoreError(
        f"{folder} is an unfinished pack with another {differs} ({found.get(differs)!s:.200}, now "
        f"{owner.get(differs)!s:.200}): finish that one with its own command, or remove {folder}"
    )

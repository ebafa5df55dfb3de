"""Writing a pruned checkpoint so that a kill at any time costs little, and nothing half-written gets the final name.

Everything goes into a folder beside the final one. Each file is flushed before the journal names it, and what the
journal says is believed only once it was read again.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from hotset.analysis.prune_plan import ByteRange, CutTensor
from hotset.errors import StoreError
from hotset.files import write_beside
from hotset.store.dense import CHUNK_BYTES, INDEX_NAME, Shard, shard_index
from hotset.store.digest import new_digest
from hotset.store.header import StoredTensor
from hotset.store.index import FileDigest
from hotset.store.inside import refuse_links
from hotset.store.journal import JOURNAL_FILE, Journal
from hotset.store.pack import part_folder
from hotset.store.verify import Meter, Progress, file_digest

SPARE_BYTES = 1 << 20
"""Room for the index, the journal and small files."""
CHOICE = "the experts that are kept"
"""What the journal calls the choice that its files were written by."""
_FULL = {errno.ENOSPC, errno.EDQUOT}
_write = os.write  # tests replace it to inject faults


class PruneFolder(AbstractContextManager["PruneFolder"]):
    """The folder beside the final one; given what an earlier run of the same owner left there, goes on with that."""

    def __init__(self, out: Path, owner: dict[str, str]) -> None:
        self.out, self.folder = out, part_folder(out)
        with self._writing():
            _make_folder(self.folder)
            self.journal = _journal(self.folder, owner)
        for scratch in self.folder.rglob(".*.part"):
            shutil.rmtree(scratch, ignore_errors=True)

    def __exit__(self, *_: object) -> None:
        self.journal.close()
        with suppress(OSError):
            if [entry.name for entry in self.folder.iterdir()] == [JOURNAL_FILE]:  # nothing to go on with
                shutil.rmtree(self.folder)

    def choose(self, kept: bytes) -> None:
        """Note what was chosen; files that were written by another choice are written again."""
        choice = len(kept), new_digest_of(kept)
        if self.journal.files.get(CHOICE) == choice:
            return
        with self._writing():
            for name in self.journal.files.keys() - {CHOICE}:  # the next run would believe what the journal says of it
                (self.folder / Path(name).name).unlink(missing_ok=True)
            self.journal.files.clear()
            self.journal.add_file(CHOICE, choice)

    def write(self, shards: Sequence[Shard], small: Iterable[tuple[str, bytes]], progress: Progress | None) -> int:
        """Write what is not there yet and read all of it back; returns how many files an earlier run had written."""
        meter = Meter(progress, 2 * sum(shard.size_bytes for shard in shards))
        there = {shard.name for shard in shards if self._is_there(shard.name)}
        self._check_room(sum(shard.size_bytes for shard in shards if shard.name not in there))
        for shard in shards:
            if shard.name in there:
                meter.advance(shard.size_bytes)
            else:
                self._add(shard, meter)
        for shard in shards:
            if not self._is_there(shard.name):
                raise StoreError(
                    f"{self.folder / shard.name} does not read back as it was written: the disk is failing; prune to "
                    "another disk"
                )
            meter.advance(shard.size_bytes)
        if len(shards) > 1:
            self._add_small(INDEX_NAME, shard_index(shards))
        for name, content in small:
            self._add_small(name, content)
        return len(there)

    def finish(self, *scratch: str) -> None:
        """Remove what only served the making, and give the folder its name."""
        with self._writing():
            for name in scratch:
                (self.folder / name).unlink(missing_ok=True)
            _flush(self.folder)
            os.rename(self.folder, self.out)
            _flush(self.out.parent)
        tidy(self.out)

    def _is_there(self, name: str) -> bool:
        known = self.journal.files.get(name)
        return known is not None and file_digest(self.folder / name) == known

    def _add(self, shard: Shard, meter: Meter) -> None:
        digest, size = new_digest(), 0
        with (
            self._writing(),
            write_beside(self.folder / shard.name) as scratch,
            scratch.open("wb", buffering=0) as file,
        ):
            for chunk in chunks_of(shard):
                with self._writing():
                    _write_all(file.fileno(), chunk)
                digest.update(chunk)
                size += len(chunk)
                meter.advance(len(chunk))
        known: FileDigest = (size, digest.digest())
        with self._writing():
            _flush(self.folder)
            self.journal.add_file(shard.name, known)

    def _add_small(self, name: str, content: bytes) -> None:
        path = self.folder / name
        with self._writing():
            path.parent.mkdir(exist_ok=True)
        with write_beside(path) as scratch:
            scratch.write_bytes(content)

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if needed + SPARE_BYTES > free:
            raise StoreError(
                f"the disk of {self.out.parent} is too full: the pruned model needs {needed + SPARE_BYTES:,} bytes and "
                f"{free:,} are free; free some space, or write to another disk"
            )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A context in which errors of the system say what to do."""
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                raise StoreError(f"cannot write {self.out}: {error.strerror or error}; choose another place") from error
            raise StoreError(
                f"the disk of {self.out.parent} is full: free some space and give the same command again; it goes on "
                "where it stopped"
            ) from error


def chunks_of(shard: Shard) -> Iterator[bytes]:
    """The bytes of a file of pruned tensors, read as they are asked for."""
    yield shard.header()
    for tensor in shard.tensors.values():
        yield from _read(tensor)


def tidy(out: Path) -> None:
    """Remove the journal, which a kill in the last moment may have left."""
    with suppress(OSError):
        (out / JOURNAL_FILE).unlink(missing_ok=True)


def new_digest_of(data: bytes) -> bytes:
    """The digest of some bytes."""
    digest = new_digest()
    digest.update(data)
    return digest.digest()


def _read(tensor: StoredTensor) -> Iterator[bytes]:
    whole = (ByteRange(tensor.offset, tensor.size_bytes),)
    try:
        with Path(tensor.file).open("rb", buffering=0) as file:
            for offset, size in tensor.ranges if isinstance(tensor, CutTensor) else whole:
                end = offset + size
                while offset < end:
                    chunk = os.pread(file.fileno(), min(end - offset, CHUNK_BYTES), offset)
                    if not chunk:
                        raise StoreError(f"{tensor.file} is truncated: copy or download it again")
                    offset += len(chunk)
                    yield chunk
    except OSError as error:
        raise StoreError(f"reading {tensor.file} failed: {error.strerror or error}; check the disk") from error


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[_write(handle, view) :]


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _journal(folder: Path, owner: dict[str, str]) -> Journal:
    try:
        return Journal(folder, owner)
    except StoreError as error:
        raise StoreError(str(error).replace("an unfinished pack", "an unfinished prune")) from None


def _make_folder(folder: Path) -> None:
    """Make the folder, or take over one that an earlier run has left; any other is not ours to write into."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir()
        return
    refuse_links(folder)
    if not (folder / JOURNAL_FILE).exists() and any(folder.iterdir()):
        raise StoreError(f"{folder} exists and is no unfinished model: remove it, or choose another name")

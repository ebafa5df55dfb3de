"""Writing a packed store so that a kill at any time costs at most the last few seconds of work.

Everything goes into a folder beside the final one. Blocks are flushed before the journal names them, the folder gets
its final name only when it is complete and was read back, and nothing that the journal says is believed unread.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import numpy as np

from hotset.errors import StoreError
from hotset.files import write_beside
from hotset.store.catalog import Bytes
from hotset.store.digest import digest_of, new_digest
from hotset.store.index import FileDigest, PackIndex, plan_document, seal_of
from hotset.store.inside import refuse_links
from hotset.store.journal import JOURNAL_FILE, Journal
from hotset.store.layout import SlotLayout
from hotset.store.packed import BLOCKS_FILE, INDEX_FILE
from hotset.store.plan import PackKey, PackPlan
from hotset.store.verify import Meter, Progress, block_digests, file_digest, file_digests, forget

COMMIT_BYTES = 64 << 20
SPARE_BYTES = 1 << 20
"""Room for the index, the journal and the small files."""
_FULL = {errno.ENOSPC, errno.EDQUOT}
_pwrite = os.pwrite  # tests replace it to inject faults


def part_folder(out: Path) -> Path:
    """Where a pack is written until it is complete."""
    return out.with_name(out.name + ".part")


class PackFolder:
    """The folder of a pack that is being written: what cannot be written ends in a line, and what is flushed stays."""

    def __init__(self, path: Path, end_bytes: int, files_bytes: int, *, durable: bool) -> None:
        self.path, self.durable = path, durable
        self.blocks = -1  # the open file of blocks
        self.files_bytes = files_bytes  # of other files that are still to be written
        self._end_bytes = end_bytes
        self._can_resume = False
        with self.writing():
            _make_folder(path)

    def open_blocks(self) -> None:
        """Open the file of blocks, and remove what a killed run was in the middle of."""
        self._can_resume = True  # the journal is there
        self.blocks = os.open(self.path / BLOCKS_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        for scratch in self.path.rglob(".*.part"):
            shutil.rmtree(scratch) if scratch.is_dir() else scratch.unlink(missing_ok=True)

    def set_aside(self) -> None:
        """Give the file of blocks its full size, if the disk has room for the whole pack."""
        self._check_room()
        os.ftruncate(self.blocks, self._end_bytes)

    def _check_room(self) -> None:
        needed, free = self._needed_bytes(), shutil.disk_usage(self.path).free
        if needed > free:
            raise StoreError(
                f"the disk of {self.path.parent} is too full: the pack needs {needed:,} bytes more and {free:,} are "
                "free; free some space, or pack to another disk"
            )

    def close(self) -> None:
        """Close the file of blocks."""
        if self.blocks >= 0:
            os.close(self.blocks)
            self.blocks = -1

    def flush(self, folder: Path) -> None:
        """Have the names in a folder outlive a crash."""
        if self.durable:
            handle = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A context in which errors of the system say what to do."""
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL or not self._can_resume:
                raise StoreError(
                    f"cannot write {self.path}: {error.strerror or error}; choose another place"
                ) from error
            free = shutil.disk_usage(self.path).free
            raise StoreError(
                f"the disk of {self.path.parent} is full: the pack needs {self._needed_bytes():,} bytes more and "
                f"{free:,} are free; free some space and give the same command again: it goes on where it stopped"
            ) from error

    def _needed_bytes(self) -> int:
        """What is still to be written, as far as the disk has not set it aside already."""
        held = os.fstat(self.blocks).st_blocks * 512 if self.blocks >= 0 else 0
        return max(self._end_bytes - held, 0) + max(self.files_bytes, 0) + SPARE_BYTES


class Packer(AbstractContextManager["Packer"]):
    """Writes one packed store; given the folder that an earlier one left behind, goes on with that.

    A store that need not outlive the process (`durable=False`) is neither flushed nor read back.
    """

    def __init__(
        self,
        out: Path,
        plan: PackPlan,
        *,
        file_bytes: int = 0,
        durable: bool = True,
        progress: Progress | None = None,
    ) -> None:
        self.out, self.folder, self.plan = out, part_folder(out), plan
        blocks = sum(layer.experts * layer.layout.used_bytes for layer in plan.layers)
        self.meter = Meter(progress, (blocks + file_bytes) * (2 if durable else 1))  # what is read back counts again
        self._pending: dict[PackKey, bytes] = {}
        self._pending_bytes = 0
        self._chunks: dict[str, list[bytes]] = {}
        self._small: dict[str, FileDigest] = {}
        self._disk = PackFolder(self.folder, plan.end_bytes, file_bytes, durable=durable)
        with self._disk.writing():
            self.journal = Journal(self.folder, plan.meta | {"layout": seal_of(plan_document(plan))}, durable=durable)
            try:
                self._disk.open_blocks()
                self._check_resumed()
                self._disk.files_bytes -= sum(size for size, _ in self.journal.files.values())
                self._disk.set_aside()
            except BaseException:
                self.close()
                raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def missing(self) -> list[PackKey]:
        """The experts that are still to be added, in the order of the file."""
        done = self.journal.blocks.keys() | self._pending.keys()
        return [key for key in self.plan.keys() if key not in done]  # noqa: SIM118

    def add(self, layer: int, expert: int, block: Bytes) -> None:
        """Write one expert, given as it lies in a slot."""
        key = PackKey(layer, expert)
        layout = self.plan.layers[layer].layout
        clean = without_gaps(layout, block[: layout.used_bytes])
        with self._disk.writing():
            _write_all(self._disk.blocks, memoryview(clean.data), self.plan.offset(key))
        self._pending[key] = digest_of(clean)
        self._pending_bytes += len(clean)
        self.meter.advance(len(clean))
        if self._pending_bytes >= COMMIT_BYTES:
            self.commit()

    def add_all(self, blocks: Iterable[tuple[int, int, Bytes]]) -> None:
        """Write many experts."""
        for layer, expert, block in blocks:
            self.add(layer, expert, block)
        self.commit()

    def add_file(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write another file with weights, unless it is there already."""
        if name in self.journal.files:
            return
        digest, size = new_digest(), 0
        with self._disk.writing(), write_beside(self.folder / name) as scratch, scratch.open("wb", buffering=0) as file:
            for chunk in chunks:
                with self._disk.writing():
                    _write_all(file.fileno(), memoryview(chunk), size)
                digest.update(chunk)
                size += len(chunk)
                self.meter.advance(len(chunk))
        with self._disk.writing():
            self._disk.flush(self.folder)
            self.journal.add_file(name, (size, digest.digest()))
        self._disk.files_bytes -= size

    def add_small(self, name: str, content: bytes) -> None:
        """Write a file without weights; it may lie in a folder of its own, and is written anew by every run."""
        path, digest = self.folder / name, new_digest()
        with self._disk.writing():
            path.parent.mkdir(exist_ok=True)
        with write_beside(path) as scratch:
            scratch.write_bytes(content)
        digest.update(content)
        self._small[name] = len(content), digest.digest()

    def commit(self) -> None:
        """Make sure that what was written so far outlives a crash."""
        with self._disk.writing():
            if self._disk.durable:
                os.fsync(self._disk.blocks)
                forget(self._disk.blocks)
            self.journal.add_blocks(self._pending)
        self._pending, self._pending_bytes = {}, 0

    def finish(self) -> PackIndex:
        """Read everything back, write the index, and give the folder its name."""
        self.commit()
        if absent := self.missing():
            raise StoreError(
                f"{self.plan.name(absent[0])} and {len(absent) - 1:,} more were never written to {self.out}"
            )
        if self._disk.durable:
            self._read_back()
        blocks = self.journal.blocks
        digests = [[blocks[PackKey(n, e)] for e in range(layer.experts)] for n, layer in enumerate(self.plan.layers)]
        index = PackIndex(self.plan, digests, self.journal.files, self._chunks, self._small)
        with self._disk.writing(), write_beside(self.folder / INDEX_FILE) as scratch:
            scratch.write_bytes(index.to_bytes())
        with self._disk.writing():
            self._disk.flush(self.folder)
            os.rename(self.folder, self.out)
            self._disk.flush(self.out.parent)
            tidy(self.out)
        return index

    def close(self) -> None:
        """Leave the folder to the run that goes on."""
        if self._pending:
            with suppress(StoreError):
                self.commit()
        self._disk.close()
        self.journal.close()

    def _check_resumed(self) -> None:
        """Take over from an earlier run only what is still on the disk as the journal has it."""
        journal, known = self.journal, set(self.plan.keys())
        wanted = [key for key in journal.blocks if key in known]
        journal.blocks = {
            key: digest
            for key, digest in block_digests(self.folder / BLOCKS_FILE, self.plan, wanted)
            if digest == journal.blocks[key]
        }
        journal.files = {n: f for n, f in journal.files.items() if file_digest(self.folder / Path(n).name) == f}
        self.meter.advance(sum(self.plan.used_bytes(key) for key in journal.blocks))
        self.meter.advance(sum(size for size, _ in journal.files.values()))

    def _read_back(self) -> None:
        for key, digest in block_digests(self.folder / BLOCKS_FILE, self.plan, list(self.plan.keys())):
            if digest != self.journal.blocks[key]:
                raise StoreError(_not_kept(f"{self.plan.name(key)} in {self.folder / BLOCKS_FILE}"))
            self.meter.advance(self.plan.used_bytes(key))
        for name, file in (self.journal.files | self._small).items():
            found = file_digests(self.folder / name)
            if found is None or found[0] != file:
                raise StoreError(_not_kept(str(self.folder / name)))
            if name in self.journal.files:
                self._chunks[name] = found[1]
                self.meter.advance(file[0])


def tidy(out: Path) -> None:
    """Remove the journal of a finished pack, which a kill in the last moment may have left."""
    with suppress(OSError):
        (out / JOURNAL_FILE).unlink(missing_ok=True)


def without_gaps(layout: SlotLayout, block: Bytes) -> Bytes:
    """The block with zeros between its parts, where a slot holds whatever was there before."""
    if sum(part.size_bytes for part in layout.parts) == len(block):
        return block
    clean = np.zeros_like(block)
    for part in layout.parts:
        clean[part.offset : part.offset + part.size_bytes] = block[part.offset : part.offset + part.size_bytes]
    return clean


def _make_folder(folder: Path) -> None:
    """Make the folder, or take over one that a pack has left; any other is not ours to write into."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir()
        return
    refuse_links(folder)
    if not (folder / JOURNAL_FILE).exists() and any(folder.iterdir()):
        raise StoreError(f"{folder} exists and is no unfinished pack: remove it, or choose another name for the pack")


def _write_all(handle: int, data: memoryview, offset: int) -> None:
    view, done = data.cast("B"), 0
    while done < len(view):
        done += _pwrite(handle, view[done:], offset + done)


def _not_kept(what: str) -> str:
    return f"{what} does not read back as it was written: the disk is failing; pack to another disk"

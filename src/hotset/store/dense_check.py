"""The files of a packed store that transformers reads: checked against their digests before a model is made of them.

The check reads what the loader will read a moment later, and leaves it in the page cache: the disk is read once. Chunks
have digests of their own, of the fast kind, so that several threads share the work.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hotset.errors import StoreError
from hotset.store.digest import digest_of, new_digest
from hotset.store.index import CHUNK_BYTES, REMEDY, FileDigest
from hotset.store.packed import open_index
from hotset.store.verify import opened, read_up_to

THREADS = min(4, os.cpu_count() or 1)


def check_dense(folder: Path) -> None:
    """Raise StoreError if a file with weights beside the blocks of a packed store is not as it was written."""
    index = open_index(folder)
    for name, file in index.files.items():
        path = folder / name
        with opened(path) as handle:
            size_bytes = os.fstat(handle).st_size
            if size_bytes != file[0]:
                raise StoreError(f"{path} is damaged: it has {size_bytes:,} of {file[0]:,} bytes; {REMEDY}")
            chunks = index.chunks.get(name)
            damage = _whole_damage(handle, file) if chunks is None else _first_damage(handle, chunks)
        if damage is not None:
            raise StoreError(f"{path} does not match its digest: it is damaged at byte {damage:,} or after; {REMEDY}")


def _first_damage(handle: int, chunks: list[bytes]) -> int | None:
    """Where the first chunk begins that is not as it was written."""

    def differs(number: int) -> bool:
        return digest_of(read_up_to(handle, CHUNK_BYTES, number * CHUNK_BYTES)) != chunks[number]

    with ThreadPoolExecutor(THREADS, "hotset-check") as pool:
        found = [number for number, wrong in enumerate(pool.map(differs, range(len(chunks)))) if wrong]
    return found[0] * CHUNK_BYTES if found else None


def _whole_damage(handle: int, file: FileDigest) -> int | None:
    """Zero if a file of a pack without digests of chunks is not as it was written."""
    digest = new_digest()
    for offset in range(0, file[0], CHUNK_BYTES):
        digest.update(read_up_to(handle, CHUNK_BYTES, offset).data)
    return None if digest.digest() == file[1] else 0

"""Small stores with known bytes, and a reader so simple that it must be right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hotset.store import Catalog, LayerSource, Part, Segment, SlotLayout
from hotset.store.catalog import Bytes
from hotset.transfer import Readers, ReadTransfer
from hotset.transfer.file import aligned_buffer
from hotset.transfer.reads import Load

Decode = Callable[[Bytes, Bytes], None]


def noise(size_bytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(1, 256, size_bytes, np.uint8).tobytes()


def write(path: Path, size_bytes: int, seed: int = 0) -> Path:
    path.write_bytes(noise(size_bytes, seed))
    return path


def catalog_of(
    files: Sequence[Path],
    experts: Sequence[Sequence[Segment]],
    slot_bytes: int,
    decode: Decode | None = None,
    digests: list[list[bytes]] | None = None,
) -> Catalog:
    layout = SlotLayout.of([Part("weight", (slot_bytes,), "uint8")])
    return Catalog(tuple(files), (LayerSource(layout, [tuple(e) for e in experts], decode),), digests)


def naive(files: Sequence[Path], segments: Sequence[Segment], size_bytes: int) -> bytearray:
    """Each segment by itself, byte by byte where it belongs."""
    memory = bytearray(size_bytes)
    for segment in segments:
        data = files[segment.file].read_bytes()[segment.offset : segment.offset + segment.size_bytes]
        memory[segment.target : segment.target + segment.size_bytes] = data
    return memory


def slots_of(count: int, slot_bytes: int) -> list[Bytes]:
    return [np.frombuffer(aligned_buffer(slot_bytes), np.uint8) for _ in range(count)]


def load_all(readers: Readers, experts: int, layer: int = 0) -> None:
    """Bring every expert into the slot of its number."""
    transfer = ReadTransfer()
    readers.start(transfer, [Load(layer, expert, expert) for expert in range(experts)])
    left = set(range(experts))
    while left:
        left -= set(transfer.wait_any())

"""Safetensors files written from byte ranges of other files, or of memory, a chunk at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hotset.errors import StoreError
from hotset.store.header import DTYPES, StoredTensor

SHARD_BYTES = 4 << 30
CHUNK_BYTES = 8 << 20
INDEX_NAME = "model.safetensors.index.json"
_CODES = {name: code for code, name in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class HeldTensor(StoredTensor):
    """A tensor whose bytes are in memory and not in a file."""

    data: npt.NDArray[np.uint8] = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Shard:
    """One file to be written: its name, and the tensors it takes over."""

    name: str
    tensors: dict[str, StoredTensor]

    @property
    def size_bytes(self) -> int:
        """The size of the file."""
        return len(self.header()) + sum(tensor.size_bytes for tensor in self.tensors.values())

    def header(self) -> bytes:
        """What the file begins with."""
        table: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in self.tensors.items():
            begin, end = end, end + tensor.size_bytes
            table[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the format wants the data 8-aligned
        return len(text).to_bytes(8, "little") + text

    def chunks(self) -> Iterator[bytes]:
        """The bytes of the file, read as they are asked for."""
        yield self.header()
        for tensor in self.tensors.values():
            yield from _read(tensor)


def shards_of(tensors: dict[str, StoredTensor], shard_bytes: int = SHARD_BYTES) -> list[Shard]:
    """Share tensors out among files, in their order; one larger than a file gets one of its own."""
    groups: list[dict[str, StoredTensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if groups[-1] and filled + tensor.size_bytes > shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = tensor
        filled += tensor.size_bytes
    if len(groups) == 1:
        return [Shard("model.safetensors", groups[0])]
    return [Shard(f"model-{i:05d}-of-{len(groups):05d}.safetensors", g) for i, g in enumerate(groups, 1)]


def shard_index(shards: Sequence[Shard]) -> bytes:
    """The index by which a loader finds the files."""
    total = sum(tensor.size_bytes for shard in shards for tensor in shard.tensors.values())
    places = {name: shard.name for shard in shards for name in shard.tensors}
    return (json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n").encode()


def _read(tensor: StoredTensor) -> Iterator[bytes]:
    if isinstance(tensor, HeldTensor):
        yield from (tensor.data[at : at + CHUNK_BYTES].tobytes() for at in range(0, tensor.size_bytes, CHUNK_BYTES))
        return
    try:
        with Path(tensor.file).open("rb", buffering=0) as file:
            file.seek(tensor.offset)
            left = tensor.size_bytes
            while left:
                chunk = file.read(min(left, CHUNK_BYTES))
                if not chunk:
                    raise StoreError(f"{tensor.file} is truncated: copy or download it again")
                left -= len(chunk)
                yield chunk
    except OSError as error:
        raise StoreError(f"reading {tensor.file} failed: {error.strerror or error}; check the disk") from error

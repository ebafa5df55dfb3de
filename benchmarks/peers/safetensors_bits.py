"""The tensors of a bf16 checkpoint as memory-mapped 16-bit patterns, which numpy can hold."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class Checkpoint:
    """All shards of a folder, found by tensor name."""

    def __init__(self, folder: Path) -> None:
        self._found: dict[str, NDArray[np.uint16]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            self._add(path)

    def bits(self, name: str) -> NDArray[np.uint16]:
        """One tensor, not read before it is used."""
        return self._found[name]

    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._found)

    def _add(self, path: Path) -> None:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        data = np.memmap(path, np.uint16, mode="r", offset=8 + size)
        for name, entry in header.items():
            if entry["dtype"] != "BF16":
                raise SystemExit(f"{path}: {name} is {entry['dtype']}, and only BF16 is read here")
            begin, end = (offset // 2 for offset in entry["data_offsets"])
            self._found[name] = data[begin:end].reshape(entry["shape"])

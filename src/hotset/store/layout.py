"""How one expert lies in a slot: its tensors one after another, in an order that suits the file it comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PAGE_BYTES = 4096
"""What direct reads must be aligned to, in the file and in memory."""

PART_ALIGNMENT_BYTES = 64

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e8m0fnu": 1, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2,
    "uint8": 1, "bool": 1, "complex64": 8,
}  # fmt: skip


def round_up(size: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-size // unit) * unit


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of an expert, and where it begins in the slot."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int = 0

    @property
    def size_bytes(self) -> int:
        """The bytes of this tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix that is more than one part of plain numbers: its format in words, and its parts in that order."""

    name: str
    outputs: int
    inputs: int
    format: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """All tensors of an expert of one layer; a part that no matrix names is plain numbers."""

    parts: tuple[Part, ...]
    matrices: tuple[Matrix, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[Part], matrices: Sequence[Matrix] = ()) -> SlotLayout:
        """Lay the parts one after another, adjacent wherever alignment allows it."""
        placed, end = [], 0
        for part in parts:
            offset = round_up(end, PART_ALIGNMENT_BYTES)
            placed.append(Part(part.name, part.shape, part.dtype, offset))
            end = offset + part.size_bytes
        return cls(tuple(placed), tuple(matrices))

    @property
    def used_bytes(self) -> int:
        """From the first byte of the first tensor to the last of the last."""
        return max(part.offset + part.size_bytes for part in self.parts)

    def part(self, name: str) -> Part:
        """The tensor of this name."""
        return next(part for part in self.parts if part.name == name)

    def matrix(self, name: str) -> Matrix | None:
        """The matrix of this name; None where it is a part of plain numbers."""
        return next((matrix for matrix in self.matrices if matrix.name == name), None)

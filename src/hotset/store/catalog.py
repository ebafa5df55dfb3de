"""Which bytes of which file make up each expert, and whether they can be used as they lie there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.store.layout import PAGE_BYTES, SlotLayout, round_up

Bytes = npt.NDArray[np.uint8]


class Segment(NamedTuple):
    """A run of bytes in a file, and where it goes: into the slot, or into scratch memory if it must be decoded."""

    file: int
    offset: int
    size_bytes: int
    target: int


Decode = Callable[[int, Bytes, Bytes], None]
"""Turns the raw bytes of the expert of this number, laid out by its segments' targets, into the bytes of its slot."""


@dataclass(frozen=True, slots=True)
class LayerSource:
    """The experts of one layer: how they lie in a slot, where they come from, and how to decode them, if need be."""

    layout: SlotLayout
    experts: Sequence[tuple[Segment, ...]]
    decode: Decode | None = None

    def read_bytes(self, expert: int) -> int:
        """The bytes that must be read for one expert."""
        return sum(segment.size_bytes for segment in self.experts[expert])

    def raw_bytes(self, expert: int) -> int:
        """The room that the undecoded bytes of one expert need."""
        return max(segment.target + segment.size_bytes for segment in self.experts[expert])


@dataclass(frozen=True, slots=True)
class Catalog:
    """All experts of a model."""

    files: tuple[Path, ...]
    layers: tuple[LayerSource, ...]
    digests: Sequence[Sequence[bytes]] | None = None  # [layers][experts], where the store has them
    meta: dict[str, str] = field(default_factory=dict)

    @property
    def slot_bytes(self) -> int:
        """The bytes of a slot that can take any expert."""
        return round_up(max(layer.layout.used_bytes for layer in self.layers), PAGE_BYTES)

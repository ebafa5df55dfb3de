"""What a packed store will hold and where: one page-aligned block per expert, layer after layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from hotset.store.layout import PAGE_BYTES, SlotLayout, round_up


class PackKey(NamedTuple):
    """One expert of a pack."""

    layer: int
    expert: int


@dataclass(frozen=True, slots=True)
class PackLayer:
    """The experts of one layer, all laid out alike."""

    name: str
    layout: SlotLayout
    experts: int

    @property
    def block_bytes(self) -> int:
        """The room of one expert in the file."""
        return round_up(self.layout.used_bytes, PAGE_BYTES)


@dataclass(frozen=True)
class PackPlan:
    """All layers of a pack, and what is to be known about their source."""

    layers: tuple[PackLayer, ...]
    meta: dict[str, str] = field(default_factory=dict)

    @cached_property
    def starts(self) -> list[int]:
        """Where each layer begins in the file, and last where the file ends."""
        return list(accumulate((layer.experts * layer.block_bytes for layer in self.layers), initial=0))

    @property
    def end_bytes(self) -> int:
        """The size of the file."""
        return self.starts[-1]

    def offset(self, key: PackKey) -> int:
        """Where the block of an expert begins."""
        return self.starts[key.layer] + key.expert * self.layers[key.layer].block_bytes

    def used_bytes(self, key: PackKey) -> int:
        """How much of the block is the expert's."""
        return self.layers[key.layer].layout.used_bytes

    def keys(self) -> Iterator[PackKey]:
        """All experts in the order of the file."""
        return (PackKey(number, e) for number, layer in enumerate(self.layers) for e in range(layer.experts))

    def name(self, key: PackKey) -> str:
        """An expert as messages call it."""
        return f"layer {key.layer} ({self.layers[key.layer].name}), expert {key.expert}"

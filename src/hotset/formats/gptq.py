"""GPTQ: integers in words along the inputs, with zero points along the outputs, and inputs in any order.

In files of the first version a stored zero point is one less than the zero point. The group of an input is what `g_idx`
says, whatever the config says of `desc_act`: files with static groups have inputs in any order as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hotset.errors import FormatError
from hotset.formats._words import Words, options_of
from hotset.formats.base import Encoded, FormatPart, StoredModule
from hotset.store.header import StoredTensor

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor


CHUNK = 1 << 16
"""Groups of inputs that are read at once."""


@dataclass(frozen=True)
class Gptq(Words):
    """Codes int32 (inputs / 8, outputs), zero points int32 (groups, outputs / 8), scales (groups, outputs)."""

    name: ClassVar[str] = "gptq"
    methods: ClassVar[tuple[str, ...]] = ("gptq",)
    second: bool = False  # version: its zero points are stored as they are
    by_index: bool = False  # whether inputs may be in any order, so that the group of each is kept

    @property
    def ordered(self) -> bool:
        """Whether inputs may be in any order."""
        return self.by_index

    def parts(self, outputs: int, inputs: int) -> tuple[FormatPart, ...]:
        """The tensors of a checkpoint."""
        groups = self._groups(outputs, inputs)
        found = (
            FormatPart("qweight", (inputs * self.bits // 32, outputs), "int32"),
            FormatPart("scales", (groups, outputs), self.scales),
            FormatPart("qzeros", (groups, outputs * self.bits // 32), "int32"),
        )
        return (*found, FormatPart("g_idx", (inputs,), "int32")) if self.by_index else found

    def shape(self, parts: Sequence[Tensor]) -> tuple[int, int]:
        """The outputs and inputs of a matrix of these parts."""
        words, outputs = parts[0].shape
        return outputs, words * 32 // self.bits

    def as_integer(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Codes and zero points unpacked, and turned."""
        from hotset.formats._numbers import joined, words

        codes = words(parts[0], self.bits, 0).T.contiguous()
        zeros = words(parts[2], self.bits, 1).T.contiguous()
        if not self.second:
            zeros = (zeros + 1) & ((1 << self.bits) - 1)
        turned = [joined(codes) if self.bits == 4 else codes, parts[1].T.contiguous(), zeros]
        return [*turned, parts[3].view(1, -1)] if self.by_index else turned

    @classmethod
    def detect(cls, module: StoredModule) -> Sequence[Encoded]:
        """The tensors that gptqmodel and AutoGPTQ write."""
        found = options_of(module, "gptq")
        if found is None:
            return ()
        (bits, group), tensors = found, module.tensors
        words, outputs = tensors["qweight"].shape
        inputs = words * 32 // bits
        index = _by_index(module, group, inputs)
        second = module.config.get("checkpoint_format") == "gptq_v2"
        chosen = cls(module.dtype, bits, group, tensors["scales"].dtype, second, index)
        names = ("qweight", "scales", "qzeros")
        beside = ("g_idx",) if "g_idx" in tensors and not index else ()
        return [Encoded("weight", (outputs, inputs), chosen, (*names, "g_idx") if index else names, beside)]


def _by_index(module: StoredModule, group: int, inputs: int) -> bool:
    """Whether the groups of inputs must be kept: they are stored, and do not follow each other.

    A config that says so is believed. Of others each `g_idx` is read, some kilobytes of a matrix, since inputs in order
    have faster products.
    """
    index, moved = module.tensors.get("g_idx"), module.config.get("desc_act") is True
    if index is None:
        if moved and group:
            raise FormatError(f"{module.tensors['qweight'].name}: config.json says desc_act, and there is no g_idx")
        return False
    return moved or not _follow(index, group or inputs, inputs)


def _follow(index: StoredTensor, group: int, inputs: int) -> bool:
    """Whether the groups of inputs follow each other, as far as a tensor can be such groups at all."""
    if (index.dtype, index.shape) != ("int32", (inputs,)):
        return False
    try:
        with open(index.file, "rb") as file:
            file.seek(index.offset)
            for first in range(0, inputs, CHUNK):
                count = min(CHUNK, inputs - first)
                found = np.frombuffer(file.read(4 * count), "<i4")
                if not np.array_equal(found, np.arange(first, first + count) // group):
                    return False
    except OSError as error:
        raise FormatError(f"{index.name}: cannot read {index.file}: {error.strerror or error}") from error
    return True


FORMAT = Gptq

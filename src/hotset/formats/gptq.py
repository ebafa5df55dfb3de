"""GPTQ: integers in words along the inputs, with zero points along the outputs, and inputs in any order.

In files of the first version a stored zero point is one less than the zero point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hotset.formats._words import Words, options_of
from hotset.formats.base import Encoded, FormatPart, StoredModule

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor


@dataclass(frozen=True)
class Gptq(Words):
    """Codes int32 (inputs / 8, outputs), zero points int32 (groups, outputs / 8), scales (groups, outputs)."""

    name: ClassVar[str] = "gptq"
    methods: ClassVar[tuple[str, ...]] = ("gptq",)
    second: bool = False  # version: its zero points are stored as they are
    by_index: bool = False  # whether the group of each input is stored

    @property
    def ordered(self) -> bool:
        """Whether the group of each input is stored."""
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
        index = bool(module.config.get("desc_act")) and "g_idx" in tensors
        second = module.config.get("checkpoint_format") == "gptq_v2"
        chosen = cls(module.dtype, bits, group, tensors["scales"].dtype, second, index)
        names = ("qweight", "scales", "qzeros")
        beside = ("g_idx",) if "g_idx" in tensors and not index else ()
        shape = (outputs, words * 32 // bits)
        return [Encoded("weight", shape, chosen, (*names, "g_idx") if index else names, beside)]


FORMAT = Gptq

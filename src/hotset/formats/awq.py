"""AWQ: 4-bit integers in words along the outputs, which lie in the order 0 2 4 6 1 3 5 7 in a word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hotset.checks import shown
from hotset.errors import FormatError
from hotset.formats._words import Words, options_of
from hotset.formats.base import Encoded, FormatPart, StoredModule

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each of eight outputs in a word, counted in codes from its lowest bits."""


@dataclass(frozen=True)
class Awq(Words):
    """Codes int32 (inputs, outputs / 8), zero points int32 (groups, outputs / 8), scales (groups, outputs)."""

    name: ClassVar[str] = "awq"
    methods: ClassVar[tuple[str, ...]] = ("awq",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits != 4:
            raise FormatError(f"awq: hotset reads 4 bits, not {shown(self.bits)}")

    def parts(self, outputs: int, inputs: int) -> tuple[FormatPart, ...]:
        """The tensors of a checkpoint."""
        groups = self._groups(outputs, inputs)
        return (
            FormatPart("qweight", (inputs, outputs // 8), "int32"),
            FormatPart("scales", (groups, outputs), self.scales),
            FormatPart("qzeros", (groups, outputs // 8), "int32"),
        )

    def shape(self, parts: Sequence[Tensor]) -> tuple[int, int]:
        """The outputs and inputs of a matrix of these parts."""
        inputs, words = parts[0].shape
        return words * 8, inputs

    def as_integer(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Codes and zero points unpacked, put in order, and turned."""
        from hotset.formats._numbers import joined

        codes, zeros = (_in_order(parts[number]) for number in (0, 2))
        return [joined(codes.T.contiguous()), parts[1].T.contiguous(), zeros.T.contiguous()]

    @classmethod
    def detect(cls, module: StoredModule) -> Sequence[Encoded]:
        """The tensors that autoawq and llm-awq write for the kernel called gemm."""
        found = options_of(module, "awq")
        if found is None:
            return ()
        version = str(module.config.get("version", "gemm")).lower()
        if version != "gemm":
            raise FormatError(f"{module.tensors['qweight'].name} is of AWQ's version {shown(version)}, not gemm")
        inputs, words = module.tensors["qweight"].shape
        chosen = cls(module.dtype, *found, module.tensors["scales"].dtype)
        return [Encoded("weight", (words * 8, inputs), chosen, ("qweight", "scales", "qzeros"))]


def _in_order(packed: Tensor) -> Tensor:
    """The codes of words along the last dimension, each eight of them in the order of their outputs."""
    from hotset.formats._numbers import grouped, words

    found: Tensor = grouped(words(packed, 4, 1), packed.shape[1])[..., list(ORDER)].flatten(-2)
    return found


FORMAT = Awq

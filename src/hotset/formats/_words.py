"""What GPTQ and AWQ share: codes of inputs by outputs in words of 32 bits, which become integers on arrival."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hotset.checks import shown
from hotset.errors import FormatError
from hotset.formats.base import StoredModule, WeightFormat
from hotset.formats.integer import BITS, SCALES, Integer

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor


@dataclass(frozen=True)
class Words(WeightFormat):
    """Codes, zero points and scales, all with the outputs last."""

    bits: int = 4
    group: int = 128  # inputs; 0 is all of them
    scales: str = "float16"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in BITS or self.scales not in SCALES:
            raise FormatError(f"{self.name}: hotset reads {' and '.join(map(str, BITS))} bits, not {shown(self.bits)}")

    @abstractmethod
    def as_integer(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """The parts of the same matrix in the format of integers."""

    @property
    def ordered(self) -> bool:
        """Whether the group of each input is stored."""
        return False

    def on(self, kind: str, outputs: Sequence[int]) -> WeightFormat:
        """Integers with the outputs first."""
        return self._integer().on(kind, outputs)

    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """As integers are decoded."""
        self._integer().decode(self.as_integer(parts), out)

    def _integer(self) -> Integer:
        return Integer(self.dtype, self.bits, self.group, self.scales, "bytes", int(self.ordered))

    def _groups(self, outputs: int, inputs: int) -> int:
        per_word = 32 // self.bits
        if inputs % (self.group or 1) or inputs % per_word or outputs % per_word:
            raise FormatError(f"{self.spec}: {outputs} x {inputs} is not of whole groups and words")
        return inputs // self.group if self.group else 1


def options_of(module: StoredModule, method: str) -> tuple[int, int] | None:
    """The bits and the group of a module that holds words, if the checkpoint is of this method."""
    config: Any = module.config
    if config.get("quant_method") != method or not {"qweight", "qzeros", "scales"} <= module.tensors.keys():
        return None
    bits, size = config.get("bits"), config.get("group_size")
    qweight, scales = module.tensors["qweight"], module.tensors["scales"]
    if type(bits) is not int or bits not in BITS or type(size) is not int or len(qweight.shape) != 2:
        raise FormatError(f"{qweight.name}: hotset reads {method} of 4 and 8 bits, not of {shown(bits)}")
    if scales.dtype not in SCALES:
        raise FormatError(f"{scales.name} is {scales.dtype}, which scales cannot be")
    return bits, max(size, 0)

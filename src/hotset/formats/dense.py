"""Plain numbers of one type, as checkpoints that are not quantised have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from hotset.formats.base import FormatPart, TileLoader, WeightFormat
from hotset.store.layout import ITEM_BYTES

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor


@dataclass(frozen=True)
class Dense(WeightFormat):
    """One tensor, used where it lies."""

    name: ClassVar[str] = "dense"
    transposed: bool = False  # whether it lies as (inputs, outputs)

    def parts(self, outputs: int, inputs: int) -> tuple[FormatPart, ...]:
        """The matrix itself."""
        return (FormatPart("", (inputs, outputs) if self.transposed else (outputs, inputs), self.dtype),)

    def shape(self, parts: Sequence[Tensor]) -> tuple[int, int]:
        """The outputs and inputs of a matrix of these parts."""
        inputs, outputs = self.matrix(parts).shape
        return outputs, inputs

    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Copy the numbers."""
        out.copy_(self.matrix(parts).T)

    def matrix(self, parts: Sequence[Tensor]) -> Tensor:
        """The matrix as (inputs, outputs), where it lies."""
        return parts[0] if self.transposed else parts[0].T

    def operand(self, parts: Sequence[Tensor]) -> Tensor:
        """The matrix as (inputs, outputs)."""
        return self.matrix(parts)

    def product(self, x: Tensor, operand: Any, out: Tensor) -> None:
        """One product by torch."""
        _mm()(x, operand, out=out)

    def stacked(self, views: Sequence[Tensor]) -> Tensor | None:
        """The matrices of all rows as (rows, inputs, outputs)."""
        return views[0] if self.transposed else views[0].transpose(-2, -1)

    def tile(self) -> TileLoader | None:
        """Loads of 16 bytes to a thread, along the inputs unless the matrix is transposed."""
        from hotset.formats._dense_tiles import load_tile

        lane = 1 if self.transposed else 16 // ITEM_BYTES[self.dtype]
        return TileLoader(load_tile, (self.transposed,), lane, self.transposed)

    @property
    def tuned_as(self) -> str:
        """Its type; which way round it lies is a matter of the tiles."""
        return self.dtype


@cache
def _mm() -> Callable[..., Tensor]:
    """Torch's product; an import statement in the hot path would cost more than finding it here."""
    import torch

    return torch.mm


FORMAT = Dense

"""One linear map of all rows of an arena: a product for every expert, on its matrix where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hotset.engine.arena import Arena
from hotset.formats import element_type, weight_of
from hotset.store import SlotLayout

Tensor = torch.Tensor


class RowLinear:
    """One linear map of all rows; the matrices are used where they lie, in their format."""

    def __init__(self, arena: Arena, layout: SlotLayout, weight: str, bias: str | None, transposed: bool) -> None:
        self.format, self.width, self.depth, parts = weight_of(layout, weight, transposed=transposed)
        self.dtype = element_type(self.format.dtype)
        self.views = tuple(arena.view(part) for part in parts)
        self.biases = None if bias is None else arena.view(layout.part(bias))
        self._operands: dict[int, Any] = {}

    def matrix(self, row: int) -> Tensor:
        """The matrix of one row, of shape (in, out), in the type computed in."""
        return self.format.matrix([view[row] for view in self.views])

    def __call__(self, inputs: Tensor, rows: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Map the inputs up to each end by the matrix of each row; a single input is mapped by all of them."""
        inputs = inputs.to(self.dtype)
        out = inputs.new_empty((ends[-1], self.width))
        sizes = [end - start for start, end in zip((0, *ends), ends, strict=False)]
        parts = [inputs] * len(sizes) if inputs.shape[0] == 1 else inputs.split_with_sizes(sizes)
        product, operands = self.format.product, self._operands
        for row, given, result in zip(rows, parts, out.split_with_sizes(sizes), strict=True):
            operand = operands.get(row)
            product(given, self._operand(row) if operand is None else operand, result)
            if self.biases is not None:
                result += self.biases[row]
        return out

    def _operand(self, row: int) -> Any:
        made = self._operands[row] = self.format.operand([view[row] for view in self.views])
        return made

    def differentiable(self, given: Tensor, row: int) -> Tensor:
        """The same of one row, by operations that have gradients."""
        out = given.to(self.dtype) @ self.matrix(row)
        return out if self.biases is None else out + self.biases[row]

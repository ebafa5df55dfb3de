"""Packed experts on a CPU: few tokens by kernels that decode in registers, more by a matrix that is decoded once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hotset.engine.arena import Arena
from hotset.engine.kernels import threads
from hotset.engine.kernels.linear import RowLinear
from hotset.formats.base import MAX_PARTS, scratch
from hotset.store import SlotLayout

if TYPE_CHECKING:
    from hotset.formats._rows import RowKernels

Tensor = torch.Tensor

FEW_TOKENS = 8
"""Up to so many tokens of an expert are multiplied with its packed matrices; a matrix is decoded for more."""
TILE_BYTES = 64 << 10
"""Codes of the rows that a thread takes at a time."""
AHEAD_BYTES = 8 << 10
"""How far ahead codes are brought near."""


class PackedLinear(RowLinear):
    """One linear map of all rows in ordinary memory, in a format that has kernels for it or in any other."""

    def __init__(self, arena: Arena, layout: SlotLayout, weight: str, bias: str | None, transposed: bool) -> None:
        super().__init__(arena, layout, weight, bias, transposed)
        self.kernels: RowKernels | None = self.format.row_kernels(self.width, self.depth)
        self._addresses: dict[int, list[int]] = {}
        if self.kernels is not None:
            self._head = self._shape(self.kernels)

    def _shape(self, kernels: RowKernels) -> list[int]:
        """The numbers at the head of a kernel's arguments, of which the first two change from call to call."""
        from hotset.formats._rows import TYPES

        row_bytes = self.views[0].stride(1) * self.views[0].element_size()
        rows = max(TILE_BYTES // row_bytes // 4, 1) * 4
        ahead = max(AHEAD_BYTES // row_bytes // 4, 1) * 4 * row_bytes
        blocks = kernels.blocks(self.depth)
        sums_at = blocks * kernels.block * (2 if kernels.pairs else 4)
        x_bytes = sums_at + (64 * blocks if kernels.sums else 0)
        tiles = -(-self.width // rows)
        kind = TYPES[self.format.dtype]
        return [0, 0, tiles, rows, self.width, self.depth, blocks, row_bytes, ahead, x_bytes, sums_at, kind]

    def __call__(self, inputs: Tensor, rows: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Map the inputs up to each end by the matrix of each row; a single input is mapped by all of them.

        Which of the two ways an expert goes depends on nothing but the number of its tokens.
        """
        if self.kernels is None:
            return super().__call__(inputs, rows, ends)
        inputs = inputs.to(self.dtype).contiguous()
        out = inputs.new_empty((ends[-1], self.width))
        starts = (0, *ends[:-1])
        sizes = [end - start for start, end in zip(starts, ends, strict=True)]
        few = [place for place, size in enumerate(sizes) if size <= FEW_TOKENS]
        if few:
            self._multiply(self.kernels, inputs, out, [(rows[i], starts[i], sizes[i]) for i in few])
        if len(few) < len(sizes):
            for row, start, end in zip(rows, starts, ends, strict=True):
                if end - start > FEW_TOKENS:
                    given = inputs if len(inputs) == 1 else inputs[start:end]
                    torch.mm(given, self._expanded(self.kernels, row).T, out=out[start:end])
        if self.biases is not None:
            for row, result in zip(rows, out.split_with_sizes(sizes), strict=True):
                result += self.biases[row]
        return out

    def _multiply(self, kernels: RowKernels, inputs: Tensor, out: Tensor, jobs: list[tuple[int, int, int]]) -> None:
        """The products of some rows with the tokens from a start on, in one parallel region."""
        head, item, shared = self._head, self.dtype.itemsize, inputs.shape[0] == 1
        x_bytes, per_job = head[9], head[2]
        room = scratch((1 if shared else len(inputs), x_bytes), "uint8", inputs.device).data_ptr()
        raw, result = inputs.data_ptr(), out.data_ptr()
        numbers = [*head]
        for row, start, tokens in jobs:
            at = 0 if shared else start
            numbers += self._addresses.get(row) or self._located(row)
            numbers += (
                room + at * x_bytes, result + start * self.width * item, tokens, raw + at * self.depth * item,
            )  # fmt: skip
        arguments = array("q", numbers)
        address, _ = arguments.buffer_info()
        arguments[1] = 1 if shared else len(jobs)
        threads.run(kernels.arrange, address, arguments[1])
        arguments[0], arguments[1] = 0, per_job * len(jobs)
        threads.run(kernels.product, address, arguments[1])

    def _expanded(self, kernels: RowKernels, row: int) -> Tensor:
        """The numbers of a matrix, until this thread asks for some again."""
        numbers = scratch((self.width, self.depth), self.format.dtype, torch.device("cpu"))
        parts = self._addresses.get(row) or self._located(row)
        arguments = array("q", [*self._head, *parts, 0, numbers.data_ptr(), 0, 0])
        arguments[1] = self._head[2]
        threads.run(kernels.expand, arguments.buffer_info()[0], arguments[1])
        return numbers

    def _located(self, row: int) -> list[int]:
        """Where the parts of a row's matrix are."""
        found = [view[row].data_ptr() for view in self.views]
        made = self._addresses[row] = [*found, *[0] * (MAX_PARTS - len(found))]
        return made

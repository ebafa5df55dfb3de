"""Experts on a GPU for many tokens: the rows of all experts in one grouped multiplication."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hotset.engine.arena import Arena
from hotset.engine.batch import ExpertBatch, IntArray
from hotset.engine.kernels.base import ExpertKernels
from hotset.engine.kernels.cpu import RowExperts, RowLinear
from hotset.engine.kernels.spec import ExpertSpec
from hotset.store import SlotLayout

Tensor = torch.Tensor

FEW_GROUPS = 2
"""Up to so many experts are multiplied one by one on a GPU; more go into one grouped multiplication."""
WORK_BYTES = 256 << 20
"""What the activations of experts that are computed together may take; more inputs go one part after another."""


class GroupedKernels(ExpertKernels):
    """All experts of one layer in the memory of a GPU, for any number of tokens."""

    def __init__(self, arena: Arena, layout: SlotLayout, spec: ExpertSpec) -> None:
        self.spec = spec
        self.device = arena.memory.device
        self.experts = RowExperts(arena, layout, spec, WORK_BYTES, GroupedLinear)

    def run(self, batch: ExpertBatch, experts: IntArray, rows: IntArray) -> None:
        """Compute some of the batch's experts, in the order of their rows."""
        order = rows.argsort()
        pairs, ends = batch.places(batch.positions(experts[order]))
        ordered = rows[order].tolist()
        for first, last, begin, end in self.experts.parts(ends):
            places = torch.from_numpy(pairs[begin:end]).to(self.device, non_blocking=True)
            stops = [min(stop, end) - begin for stop in ends[first:last]]
            batch.scatter(places, self.experts(batch.rows(places), ordered[first:last], stops))

    def differentiable(self, given: Tensor, row: int) -> Tensor:
        """What the expert in one row makes of its input, by operations that have gradients."""
        return self.experts.differentiable(given, row)


class GroupedLinear(RowLinear):
    """One linear map of all rows of a GPU's arena."""

    def __init__(self, arena: Arena, layout: SlotLayout, weight: str, bias: str | None, transposed: bool) -> None:
        super().__init__(arena, layout, weight, bias, transposed)
        stacked = self.format.stacked(self.views)
        self._stacked = stacked if stacked is not None and _can_be_grouped(stacked) else None

    def __call__(self, inputs: Tensor, rows: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Map the inputs up to each end by the matrix of each row; a single input is mapped by all of them."""
        if self._stacked is not None and len(rows) > FEW_GROUPS and inputs.shape[0] > 1:
            return self._grouped(inputs.to(self.dtype), self._stacked, rows, ends)
        return super().__call__(inputs, rows, ends)

    def _grouped(self, inputs: Tensor, stacked: Tensor, rows: Sequence[int], ends: Sequence[int]) -> Tensor:
        """One grouped multiplication over the range of rows; the rows must rise."""
        first, last = rows[0], rows[-1]
        sizes = np.zeros(last - first + 1, np.int32)
        sizes[np.array(rows) - first] = np.diff(ends, prepend=0)
        offsets = torch.from_numpy(np.cumsum(sizes, dtype=np.int32)).to(inputs.device, non_blocking=True)
        out = torch.nn.functional.grouped_mm(inputs, stacked[first : last + 1], offs=offsets)
        if self.biases is not None:
            which = np.repeat(np.array(rows), np.diff(ends, prepend=0))
            out += self.biases[torch.from_numpy(which).to(inputs.device, non_blocking=True)]
        return out


def _can_be_grouped(stacked: Tensor) -> bool:
    """Whether torch multiplies these by groups: on a GPU, in bfloat16, with rows of whole 16 bytes."""
    aligned = all(size * stacked.itemsize % 16 == 0 for size in stacked.shape[1:])
    return stacked.is_cuda and stacked.dtype == torch.bfloat16 and aligned

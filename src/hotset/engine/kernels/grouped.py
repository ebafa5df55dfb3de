"""Experts on a GPU for many tokens: the rows of all experts in one grouped multiplication."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from hotset.engine.arena import Arena
from hotset.engine.batch import ExpertBatch, IntArray
from hotset.engine.kernels.base import ExpertKernels
from hotset.engine.kernels.cpu import RowExperts
from hotset.engine.kernels.linear import RowLinear
from hotset.engine.kernels.spec import ExpertSpec
from hotset.store import SlotLayout

Tensor = torch.Tensor
Decode = Callable[[Tensor], Tensor | None]
"""Writes out the matrices of some rows (int32) as [rows, outputs, inputs]."""

FEW_GROUPS = 2
"""Up to so many experts are multiplied one by one on a GPU; more go into one grouped multiplication."""
WORK_BYTES = 256 << 20
"""What the activations of experts that are computed together may take; more inputs go one part after another."""
DECODED_BYTES = 256 << 20
"""What packed matrices may take that are written out at once; more of them go one part after another."""


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
            batch.output.scatter(places, self.experts(batch.rows(places), ordered[first:last], stops))

    def differentiable(self, given: Tensor, row: int) -> Tensor:
        """What the expert in one row makes of its input, by operations that have gradients."""
        return self.experts.differentiable(given, row)


class GroupedLinear(RowLinear):
    """One linear map of all rows of a GPU's arena."""

    def __init__(self, arena: Arena, layout: SlotLayout, weight: str, bias: str | None, transposed: bool) -> None:
        super().__init__(arena, layout, weight, bias, transposed)
        stacked = self.format.stacked(self.views)
        self._stacked = stacked if stacked is not None and _can_be_grouped(stacked) else None
        self._decoder = _decoder_of(self) if stacked is None and arena.memory.is_cuda else None

    def __call__(self, inputs: Tensor, rows: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Map the inputs up to each end by the matrix of each row; a single input is mapped by all of them."""
        if self._decoder is not None:
            found = self._decoded(self._decoder, inputs.to(self.dtype).expand(ends[-1], -1), rows, ends)
            if found is not None:
                return found
            self._decoder = None  # there is no such kernel for this device: one matrix after another, by torch
        if self._stacked is not None and len(rows) > FEW_GROUPS and inputs.shape[0] > 1:
            return self._grouped(inputs.to(self.dtype), self._stacked, rows, ends)
        return super().__call__(inputs, rows, ends)

    def _grouped(self, inputs: Tensor, stacked: Tensor, rows: Sequence[int], ends: Sequence[int]) -> Tensor:
        """One grouped multiplication over the range of rows; the rows must rise."""
        first, last = rows[0], rows[-1]
        sizes = np.zeros(last - first + 1, np.int32)
        sizes[np.array(rows) - first] = np.diff(ends, prepend=0)
        out = _grouped_product(inputs, stacked[first : last + 1], np.cumsum(sizes, dtype=np.int32))
        return self._biased(out, rows, ends)

    def _decoded(self, decode: Decode, inputs: Tensor, rows: Sequence[int], ends: Sequence[int]) -> Tensor | None:
        """Packed matrices are written out, as many at once as there is room for, and multiplied.

        None if they cannot be. How they are multiplied does not depend on how many there are: neither do the bits.
        """
        found: list[Tensor] = []
        step, begin = max(DECODED_BYTES // (self.width * self.depth * self.dtype.itemsize), 1), 0
        offsets = np.array([end - (ends[i - i % step - 1] if i >= step else 0) for i, end in enumerate(ends)])
        which, groups = torch.from_numpy(np.stack([rows, offsets]).astype(np.int32)).to(
            inputs.device, non_blocking=True
        )
        for first in range(0, len(rows), step):
            stops, decoded = ends[first : first + step], decode(which[first : first + step])
            if decoded is None:
                return None
            numbers, given = decoded.transpose(1, 2), inputs[begin : stops[-1]]
            if _can_be_grouped(numbers):
                own = groups[first : first + step]
                found.append(torch.nn.functional.grouped_mm(given.contiguous(), numbers, offs=own))
            else:
                each = given.split_with_sizes(np.diff(stops, prepend=begin).tolist())
                found += [torch.mm(own, matrix) for own, matrix in zip(each, numbers, strict=True)]
            begin = stops[-1]
        return self._biased(found[0] if len(found) == 1 else torch.cat(found), rows, ends)

    def _biased(self, out: Tensor, rows: Sequence[int], ends: Sequence[int]) -> Tensor:
        """The results of each row's matrix with the bias of the row."""
        if self.biases is not None:
            which = np.repeat(np.array(rows), np.diff(ends, prepend=0))
            out += self.biases[torch.from_numpy(which).to(out.device, non_blocking=True)]
        return out


def _grouped_product(inputs: Tensor, matrices: Tensor, ends: npt.NDArray[np.int32]) -> Tensor:
    """The inputs up to each end times the matrix (inputs, outputs) of each group."""
    offsets = torch.from_numpy(ends).to(inputs.device, non_blocking=True)
    return torch.nn.functional.grouped_mm(inputs, matrices, offs=offsets)


def _decoder_of(linear: RowLinear) -> Decode | None:
    """What writes out packed matrices in one launch, where there is Triton for the system."""
    try:
        from hotset.engine.kernels.decoding import MatrixDecoder
    except ImportError:
        return None
    return MatrixDecoder.of(linear)


def _can_be_grouped(stacked: Tensor) -> bool:
    """Whether torch multiplies these by groups: on a GPU, in bfloat16, with rows of whole 16 bytes."""
    aligned = all(size * stacked.itemsize % 16 == 0 for size in stacked.shape[1:])
    return stacked.is_cuda and stacked.dtype == torch.bfloat16 and aligned

"""What one expert computes, and how it is computed on weights that lie in slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hotset.engine.kernels.spec import ExpertSpec
from hotset.runtime.arena import Arena
from hotset.store import SlotLayout

Tensor = torch.Tensor

LEAST_ROWS = 64
FEW_GROUPS = 2
"""Up to so many experts are multiplied one by one on a GPU; more go into one grouped multiplication."""

BLOCK = 64
"""Two of torch's widest vectors, in elements of two bytes: what it computes at once without a remainder."""

SERIAL = 1 << 15
"""Up to so many elements torch computes in one thread; more are cut at places that depend on how many there are."""


WORK_BYTES, GPU_WORK_BYTES = 32 << 20, 256 << 20
"""What the activations of experts that are computed together may take; more rows go one part after another."""


class SlotLinear:
    """One linear map of all slots; the matrices are used where they lie."""

    def __init__(self, arena: Arena, layout: SlotLayout, weight: str, bias: str | None, transposed: bool) -> None:
        self.weights = arena.view(layout.part(weight))
        self.biases = None if bias is None else arena.view(layout.part(bias))
        self.transposed = transposed
        self.depth, self.width = self.weights.shape[1:] if transposed else self.weights.shape[:0:-1]
        self._can_be_grouped = all(size * self.weights.itemsize % 16 == 0 for size in self.weights.shape[1:])
        self._matrices: dict[int, Tensor] = {}

    def matrix(self, slot: int) -> Tensor:
        """The matrix of one slot, of shape (in, out)."""
        found = self._matrices.get(slot)
        if found is None:
            found = self.weights[slot] if self.transposed else self.weights[slot].T
            self._matrices[slot] = found
        return found

    def __call__(self, rows: Tensor, slots: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Map the rows up to each end by the matrix of each slot; a single row is mapped by all of them."""
        rows = rows.to(self.weights.dtype)
        many = rows.is_cuda and len(slots) > FEW_GROUPS and rows.shape[0] > 1
        if many and rows.dtype == torch.bfloat16 and self._can_be_grouped:
            return self._grouped(rows, slots, ends)
        out = rows.new_empty((ends[-1], self.width))
        sizes = [end - start for start, end in zip((0, *ends), ends, strict=False)]
        inputs = [rows] * len(sizes) if rows.shape[0] == 1 else rows.split_with_sizes(sizes)
        for slot, given, result in zip(slots, inputs, out.split_with_sizes(sizes), strict=True):
            torch.mm(given, self.matrix(slot), out=result)
            if self.biases is not None:
                result += self.biases[slot]
        return out

    def _grouped(self, rows: Tensor, slots: Sequence[int], ends: Sequence[int]) -> Tensor:
        """One grouped multiplication over the range of slots; the slots must rise."""
        first, last = slots[0], slots[-1]
        sizes = np.zeros(last - first + 1, np.int32)
        sizes[np.array(slots) - first] = np.diff(ends, prepend=0)
        offsets = torch.from_numpy(np.cumsum(sizes, dtype=np.int32)).to(rows.device, non_blocking=True)
        matrices = self.weights[first : last + 1]
        out = torch.nn.functional.grouped_mm(
            rows, matrices if self.transposed else matrices.transpose(-2, -1), offs=offsets
        )
        if self.biases is not None:
            which = np.repeat(np.array(slots), np.diff(ends, prepend=0))
            out += self.biases[torch.from_numpy(which).to(rows.device, non_blocking=True)]
        return out


def by_expert(function: Callable[[Tensor], Tensor], rows: Tensor, ends: Sequence[int], width: int) -> Tensor:
    """Apply an activation or a norm to the rows up to each end, to the bits that each expert's rows have alone.

    On a CPU the remainder of a vectorised loop, at the end of a tensor or of a thread's share of it, is computed by
    other code, whose sigmoid rounds differently. Where rows can fall into a remainder, each expert is computed alone:
    what arrives together with it would decide over its bits otherwise.
    """
    aligned = width % BLOCK == 0 and (rows.numel() <= SERIAL or torch.get_num_threads() == 1)
    if len(ends) == 1 or aligned or rows.is_cuda:
        return function(rows)
    sizes = [end - start for start, end in zip((0, *ends), ends, strict=False)]
    return torch.cat([function(given) for given in rows.split_with_sizes(sizes)])


class RowPart(NamedTuple):
    """Some experts of an event, by their places in it, and the rows of theirs that are computed together."""

    first: int
    last: int
    begin: int
    end: int


class SlotExperts:
    """All experts of one layer, whichever slots they lie in."""

    def __init__(self, arena: Arena, layout: SlotLayout, math: ExpertSpec) -> None:
        self.up = SlotLinear(arena, layout, math.up, math.up_bias, math.up_transposed)
        self.down = SlotLinear(arena, layout, math.down, math.down_bias, math.down_transposed)
        self.math = math
        states = 2 * self.up.width + 3 * self.down.width  # before and after the activation; in, out and weighted
        bound = GPU_WORK_BYTES if arena.memory.is_cuda else WORK_BYTES
        self.most_rows = max(bound // (states * max(self.up.weights.itemsize, 4)), LEAST_ROWS)

    def parts(self, ends: Sequence[int]) -> Iterator[RowPart]:
        """Rows up to each expert's end, in parts that keep activations below the bound.

        Experts stay whole where they can, since the rows of one expert multiplied together give the same bits whoever
        else is computed; and where one has too many rows, its parts depend on nothing but their number.
        """
        first = begin = 0
        for place, end in enumerate(ends):
            if end - begin > self.most_rows and first < place:
                yield RowPart(first, place, begin, ends[place - 1])
                first, begin = place, ends[place - 1]
            while end - begin > self.most_rows:
                yield RowPart(place, place + 1, begin, begin + self.most_rows)
                first, begin = place, begin + self.most_rows
        if ends:
            yield RowPart(first, len(ends), begin, ends[-1])

    def __call__(self, rows: Tensor, slots: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Compute the rows up to each end by the expert of each slot."""
        hidden = by_expert(self.math.activation, self.up(rows, slots, ends), ends, self.down.depth)
        out = self.down(hidden, slots, ends)
        return out if self.math.norm is None else by_expert(self.math.norm, out, ends, self.down.width)

"""Experts on a CPU: one product after another, on weights where they lie in their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from hotset.engine.arena import Arena
from hotset.engine.batch import ExpertBatch, IntArray
from hotset.engine.kernels.base import ExpertKernels
from hotset.engine.kernels.linear import RowLinear
from hotset.engine.kernels.packed import PackedLinear
from hotset.engine.kernels.spec import ExpertSpec
from hotset.store import SlotLayout

Tensor = torch.Tensor

MIN_INPUTS = 64

BLOCK = 64
"""Two of torch's widest vectors, in elements of two bytes: what it computes at once without a remainder."""

SERIAL = 1 << 15
"""Up to so many elements torch computes in one thread; more are cut into equal shares, as many as there are threads."""

WORK_BYTES = 32 << 20
"""What the activations of experts that are computed together may take; more inputs go one part after another."""


class PerExpertKernels(ExpertKernels):
    """All experts of one layer in ordinary memory."""

    def __init__(self, arena: Arena, layout: SlotLayout, spec: ExpertSpec) -> None:
        self.spec = spec
        self.experts = RowExperts(arena, layout, spec, linear=PackedLinear)

    def run(self, batch: ExpertBatch, experts: IntArray, rows: IntArray) -> None:
        """Compute some of the batch's experts."""
        everything = len(experts) == len(batch.experts)
        if everything and batch.single:
            # One token whose experts are all here: computed in the router's order, nothing has to be put in its place.
            ordered = batch.by_pair(rows).tolist()
            batch.output.set_all(self.experts(batch.hidden, ordered, range(1, len(ordered) + 1)))
            return
        pairs, ends = batch.places(None if everything else batch.positions(experts))
        listed = rows.tolist()
        for first, last, begin, end in self.experts.parts(ends):
            places = torch.from_numpy(pairs[begin:end])
            stops = [min(stop, end) - begin for stop in ends[first:last]]
            batch.output.scatter(places, self.experts(batch.rows(places), listed[first:last], stops))

    def differentiable(self, given: Tensor, row: int) -> Tensor:
        """What the expert in one row makes of its input, by operations that have gradients."""
        return self.experts.differentiable(given, row)


def by_expert(function: Callable[[Tensor], Tensor], inputs: Tensor, ends: Sequence[int], width: int) -> Tensor:
    """Apply an activation or a norm to the inputs up to each end, to the bits that each expert's inputs have alone.

    On a CPU the remainder of a vectorised loop, at the end of a tensor or of a thread's share of it, is computed by
    other code, whose sigmoid rounds differently. Where inputs can fall into a remainder, each expert is computed alone:
    what arrives together with it would decide over its bits otherwise.
    """
    if len(ends) == 1 or inputs.is_cuda:
        return function(inputs)
    sizes = [end - start for start, end in zip((0, *ends), ends, strict=False)]
    if width % BLOCK == 0 and _in_whole_blocks(inputs, width, sizes):
        return function(inputs)
    return torch.cat([function(given) for given in inputs.split_with_sizes(sizes)])


def _in_whole_blocks(inputs: Tensor, width: int, sizes: Sequence[int]) -> bool:
    """Whether no thread's share has a remainder: of all inputs or outputs together, nor of an expert's alone."""
    threads = torch.get_num_threads()
    if threads == 1 or inputs.numel() <= SERIAL:
        return True
    counts = {rows * columns for rows in (len(inputs), *sizes) for columns in (width, inputs.shape[1])}
    return all(-(-count // min(threads, -(-count // SERIAL))) % BLOCK == 0 for count in counts if count)


class InputPart(NamedTuple):
    """Some experts of an event, by their places in it, and the inputs of theirs that are computed together."""

    first: int
    last: int
    begin: int
    end: int


class RowExperts:
    """All experts of one layer, whichever rows they lie in: what kernels that go expert by expert are made of."""

    def __init__(
        self,
        arena: Arena,
        layout: SlotLayout,
        spec: ExpertSpec,
        work_bytes: int = WORK_BYTES,
        linear: type[RowLinear] = RowLinear,
    ) -> None:
        self.up = linear(arena, layout, spec.up, spec.up_bias, spec.up_transposed)
        self.down = linear(arena, layout, spec.down, spec.down_bias, spec.down_transposed)
        self.spec = spec
        states = 2 * self.up.width + 3 * self.down.width  # before and after the activation; in, out and weighted
        self.max_inputs = max(work_bytes // (states * max(self.up.dtype.itemsize, 4)), MIN_INPUTS)

    def parts(self, ends: Sequence[int]) -> Iterator[InputPart]:
        """Inputs up to each expert's end, in parts that keep activations below the bound.

        Experts stay whole where they can, since the inputs of one expert multiplied together give the same bits
        whichever others are computed; where one has too many, its parts depend on nothing but their number.
        """
        first = begin = 0
        for place, end in enumerate(ends):
            if end - begin > self.max_inputs and first < place:
                yield InputPart(first, place, begin, ends[place - 1])
                first, begin = place, ends[place - 1]
            while end - begin > self.max_inputs:
                yield InputPart(place, place + 1, begin, begin + self.max_inputs)
                first, begin = place, begin + self.max_inputs
        if ends:
            yield InputPart(first, len(ends), begin, ends[-1])

    def __call__(self, inputs: Tensor, rows: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Compute the inputs up to each end by the expert of each row."""
        return self.projected(self.activated(inputs, rows, ends), rows, ends)

    def activated(self, inputs: Tensor, rows: Sequence[int], ends: Sequence[int]) -> Tensor:
        """The first product and the activation: what the second product is given."""
        return by_expert(self.spec.activation, self.up(inputs, rows, ends), ends, self.down.depth)

    def projected(self, hidden: Tensor, rows: Sequence[int], ends: Sequence[int]) -> Tensor:
        """The second product, and the norm where there is one."""
        out = self.down(hidden, rows, ends)
        return out if self.spec.norm is None else by_expert(self.spec.norm, out, ends, self.down.width)

    def differentiable(self, given: Tensor, row: int) -> Tensor:
        """What the expert in one row makes of its input, by operations that have gradients."""
        out = self.down.differentiable(self.spec.activation(self.up.differentiable(given, row)), row)
        return out if self.spec.norm is None else self.spec.norm(out)

"""Experts computed one by one on any device, with a look at what goes into their two products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hotset.engine.arena import Arena
from hotset.engine.batch import ExpertBatch, IntArray
from hotset.engine.kernels.base import ExpertKernels
from hotset.engine.kernels.cpu import RowExperts
from hotset.engine.kernels.spec import ExpertSpec
from hotset.store import SlotLayout

Tensor = torch.Tensor
Observe = Callable[[IntArray, Sequence[int], Tensor, Tensor], None]
"""Given some experts, where the rows of each end, and the rows that went into their first and second product."""


class ObservedKernels(ExpertKernels):
    """All experts of one layer; `observe` is given the inputs of their products."""

    def __init__(self, arena: Arena, layout: SlotLayout, spec: ExpertSpec, observe: Observe) -> None:
        self.spec, self.device, self._observe = spec, arena.memory.device, observe
        self.experts = RowExperts(arena, layout, spec)

    def run(self, batch: ExpertBatch, experts: IntArray, rows: IntArray) -> None:
        """Compute some of the batch's experts, in the order of their rows."""
        order = rows.argsort()
        ordered, listed = experts[order], rows[order].tolist()
        pairs, ends = batch.places(batch.positions(ordered))
        for first, last, begin, end in self.experts.parts(ends):
            places = torch.from_numpy(pairs[begin:end]).to(self.device)
            stops = [min(stop, end) - begin for stop in ends[first:last]]
            given = batch.rows(places).expand(end - begin, -1)
            activated = self.experts.activated(given, listed[first:last], stops)
            self._observe(ordered[first:last], stops, given, activated)
            batch.output.scatter(places, self.experts.projected(activated, listed[first:last], stops))

    def differentiable(self, given: Tensor, row: int) -> Tensor:
        """What the expert in one row makes of its input, by operations that have gradients."""
        return self.experts.differentiable(given, row)

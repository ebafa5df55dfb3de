"""The face of all expert kernels: compute some experts of an event whose weights lie in rows of memory."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from hotset.engine.batch import ExpertBatch, IntArray
from hotset.engine.kernels.spec import ExpertSpec


class ExpertKernels(ABC):
    """The experts of one layer. Knows rows and parts of an arena, and no cache."""

    spec: ExpertSpec

    @abstractmethod
    def run(self, batch: ExpertBatch, experts: IntArray, rows: IntArray) -> None:
        """Compute some of the batch's experts, in rising order, from these rows, and put the results into the batch."""

    @abstractmethod
    def differentiable(self, given: torch.Tensor, row: int) -> torch.Tensor:
        """What the expert in one row makes of its input, by operations that have gradients."""

    def prefers_one_run(self, batch: ExpertBatch) -> bool:  # noqa: ARG002 - it never is where a run costs no launch
        """Whether to compute all experts of a batch in one run costs less than residents first and arrivals later."""
        return False

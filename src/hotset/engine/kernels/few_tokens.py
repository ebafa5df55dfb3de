"""Few tokens on a GPU that the host drives: the experts of a batch in two Triton launches, in any number of parts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from hotset.engine.arena import Arena
from hotset.engine.batch import ExpertBatch, IntArray
from hotset.engine.kernels.base import ExpertKernels
from hotset.engine.kernels.spec import ExpertSpec
from hotset.engine.kernels.triton_experts import ROUTER_DTYPES, Phase, TritonExperts
from hotset.store import SlotLayout

Tensor = torch.Tensor

FEW_PAIRS = 64
"""Up to so many pairs of token and expert are multiplied row by row where their experts lie."""


class FewTokenKernels(ExpertKernels):
    """All experts of one layer: few tokens in two launches, more by the kernels given."""

    def __init__(self, arena: Arena, layout: SlotLayout, spec: ExpertSpec, top_k: int, many: ExpertKernels) -> None:
        self.spec, self.many = spec, many
        self.kernels = TritonExperts(arena, layout, spec, top_k=top_k, max_tokens=0)
        self._uploads = PairUploads(arena.memory.device)

    def prefers_one_run(self, batch: ExpertBatch) -> bool:
        """Whether a batch goes into two launches: few pairs, as many of a token as usual, and weights of a known type.

        Experts that a model's own code calls one by one come as tokens of one expert each.
        """
        few = batch.tokens * batch.top_k <= FEW_PAIRS and batch.top_k == self.kernels.top_k
        return few and batch.weights.dtype in ROUTER_DTYPES

    def run(self, batch: ExpertBatch, experts: IntArray, rows: IntArray) -> None:
        """Compute some of the batch's experts; with the last of them the output is summed.

        One binary serves all parts, so that the output does not depend on how many there are.
        """
        if not self.prefers_one_run(batch):
            self.many.run(batch, experts, rows)
            return
        whole, last = len(experts) == len(batch.experts), batch.note_computed(len(experts))
        phase = Phase.ALL if whole else Phase.LAST if last else Phase.KEEP
        # What was kept is found in its place, whichever row it is said to lie in.
        table = np.full(batch.num_experts + 1, 0 if phase is Phase.LAST else -1, np.int32)
        table[experts], table[-1] = rows, -1  # the last is for experts that are not of this layer
        found = table[np.minimum(batch.flat, batch.num_experts)]
        late = np.isin(batch.flat, experts) if phase is Phase.LAST else np.zeros(len(found), bool)
        pair_row, pair_late = self._uploads.send(found, late)
        out = torch.empty_like(batch.hidden, memory_format=torch.contiguous_format)
        self._launch(batch, pair_row, pair_late, out, phase)
        if phase is not Phase.KEEP:
            batch.output.finish(out)

    def _launch(self, batch: ExpertBatch, pair_row: Tensor, pair_late: Tensor, out: Tensor, phase: Phase) -> None:
        kernels = self.kernels
        raw = out if phase is Phase.ALL else batch.output.unweighted(kernels.width, kernels.dtype)
        scratch = kernels.products.room(len(pair_row), raw, pair_late)
        kernels(batch.hidden.contiguous(), pair_row, pair_late, batch.weights.contiguous(), out, phase, scratch=scratch)

    def differentiable(self, given: Tensor, row: int) -> Tensor:
        """What the expert in one row makes of its input, by operations that have gradients."""
        return self.many.differentiable(given, row)


class PairUploads:
    """Sends the rows of a few pairs to the device without waiting.

    Every event of a layer begins with a wait for its routing, and has at most as many parts as pairs: when a place is
    used again, what it held has long arrived.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places = torch.empty((FEW_PAIRS + 1, 5 * FEW_PAIRS), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._next = 0

    def send(self, rows: npt.NDArray[np.int32], late: npt.NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
        """The row of each pair as int32, and whether it is late as int8, on the device."""
        self._next = (self._next + 1) % len(self._places)
        count, place = len(rows), self._places[self._next, : 5 * len(rows)]
        place.numpy()[:] = np.concatenate([rows.view(np.uint8), late.view(np.uint8)])
        sent = place.to(self._device, non_blocking=True, copy=True)
        return sent[: 4 * count].view(torch.int32), sent[4 * count :].view(torch.int8)

"""One event on its way through the engine: which rows of the input belong to which expert."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Tensor = torch.Tensor


class LiveEvent:
    """The input of one layer, its pairs of token and expert sorted by expert, and the output as far as it is known.

    Every pair has a place of its own in the output, and the places of a token are summed at the end, in the router's
    order: whichever expert arrives last, the sum is the same to the last bit.
    """

    def __init__(self, hidden: Tensor, index: Tensor, weights: Tensor, experts: int) -> None:
        self.hidden = hidden
        self.weights = weights.reshape(-1)
        self.tokens, self.top_k = index.shape
        flat = index.reshape(-1).cpu().numpy()
        counts = np.bincount(flat, minlength=experts)
        asked = counts[:experts].nonzero()[0]  # an index past the last expert means nobody
        self.experts: npt.NDArray[np.int32] = asked.astype(np.int32)
        self.counts: npt.NDArray[np.int32] = counts[asked].astype(np.int32)
        self._order = flat.argsort(kind="stable")
        self._ends = np.cumsum(self.counts)
        self._complete = int(self._ends[-1]) == len(flat) if len(asked) else False
        self._out: Tensor | None = None

    def places(self, which: npt.NDArray[np.bool_] | None) -> tuple[npt.NDArray[np.int64], list[int]]:
        """The pairs of some of the experts, or of all, in the order of the experts, and where each expert's end."""
        if which is None:
            return self._order[: self._ends[-1]], self._ends.tolist()
        rows = np.repeat(which, self.counts)
        return self._order[: len(rows)][rows], np.cumsum(self.counts[which]).tolist()

    def rows(self, places: Tensor) -> Tensor:
        """The input rows of some pairs; one token alone is every pair's input."""
        return self.hidden if self.tokens == 1 else self.hidden[places // self.top_k]

    def put(self, places: Tensor, results: Tensor) -> None:
        """Take in what some experts computed, weighted by the router."""
        weighted = results * self.weights[places].unsqueeze(-1)
        if self._out is None:
            self._out = self._fresh(weighted)
        self._out[places] = weighted

    def total(self) -> Tensor:
        """The output of the layer."""
        if self._out is None:
            return torch.zeros_like(self.hidden)
        return self._out.view(self.tokens, self.top_k, -1).sum(dim=1).to(self.hidden.dtype)

    def _fresh(self, like: Tensor) -> Tensor:
        shape = (self.tokens * self.top_k, like.shape[1])
        return like.new_empty(shape) if self._complete else like.new_zeros(shape)

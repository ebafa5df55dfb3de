"""One event in the engine: which rows of the input belong to which expert, and the output as far as it is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Tensor = torch.Tensor
Which = npt.NDArray[np.int64] | None
"""Some experts of an event by their places in it, or all of them."""


IntArray = npt.NDArray[np.integer[Any]]

_ONES = np.ones(1 << 15, np.int32)


class ExpertBatch:
    """The input of one layer, its pairs of token and expert sorted by expert, and the output as far as it is known.

    Every pair has a place of its own in the output, and the places of a token are summed at the end, in the router's
    order: whichever expert arrives last, the sum is the same to the last bit.
    """

    def __init__(
        self, hidden: Tensor, index: Tensor, weights: Tensor, experts: int, predicted_ids: Tensor | None = None
    ) -> None:
        self.hidden = hidden
        self.weights = weights.reshape(-1)
        self.tokens, self.top_k = index.shape
        # What a forecast wants from the device comes along with the routing: a second transfer is a second wait.
        pairs = index.reshape(-1)
        if predicted_ids is not None:
            pairs = torch.cat([pairs, predicted_ids.reshape(-1)])
        numbers: npt.NDArray[np.int64] = pairs.cpu().numpy()
        self.flat = numbers[: index.numel()]
        self.predicted_ids = None if predicted_ids is None else numbers[index.numel() :]
        self._num_experts = experts
        self._order = self.flat.argsort(kind="stable")
        ranked = self.flat[self._order]
        self.single = self.tokens == 1 and ranked[-1] < experts and bool((ranked[1:] != ranked[:-1]).all())
        if self.single:
            self.experts, self.counts = ranked.astype(np.int32), _ONES[: len(ranked)]
        else:
            self.experts, self.counts = _count(ranked[: np.searchsorted(ranked, experts)])
        self._ends = np.cumsum(self.counts) if not self.single else None
        self._complete = self.single or int(self.counts.sum()) == len(ranked)
        self._out: Tensor | None = None
        self._unweighted: Tensor | None = None
        self._total: Tensor | None = None
        self._computed = 0

    def places(self, which: Which) -> tuple[npt.NDArray[np.int64], list[int]]:
        """The pairs of some experts, in the order in which these are given, and where each expert's pairs end."""
        if self._ends is None:  # a single token: every expert has one pair
            order = self._order if which is None else self._order[which]
            return order, list(range(1, len(order) + 1))
        if which is None:
            return self._order[: self._ends[-1]], self._ends.tolist()
        counts = self.counts[which]
        ends = self._ends[which]
        pieces = [self._order[end - count : end] for end, count in zip(ends.tolist(), counts.tolist(), strict=True)]
        return np.concatenate(pieces), np.cumsum(counts).tolist()

    def positions(self, experts: Sequence[int] | IntArray) -> npt.NDArray[np.int64]:
        """Where some experts stand among the event's."""
        return np.searchsorted(self.experts, experts)

    def others(self, experts: Sequence[int] | IntArray) -> npt.NDArray[np.int64]:
        """Where all the event's experts but these stand; these are given in rising order."""
        rest = np.ones(len(self.experts), bool)
        rest[np.searchsorted(self.experts, experts)] = False
        return np.flatnonzero(rest)

    def by_pair(self, rows: IntArray) -> IntArray:
        """The rows of all experts in the router's order, for a single token."""
        found = np.empty(len(rows), np.int64)
        found[self._order] = rows
        return found

    def row_per_pair(self, experts: IntArray, rows: IntArray, others: int = -1) -> npt.NDArray[np.int32]:
        """The row of every pair whose expert is among those given, -1 where it is not of this layer, else `others`."""
        table = np.full(self._num_experts + 1, others, np.int32)
        table[experts], table[-1] = rows, -1
        found: npt.NDArray[np.int32] = table[np.minimum(self.flat, self._num_experts)]
        return found

    def note_computed(self, experts: int) -> bool:
        """Note that so many more experts are computed; returns whether these were the last."""
        self._computed += experts
        return self._computed >= len(self.experts)

    def rows(self, places: Tensor) -> Tensor:
        """The input rows of some pairs; one token alone is every pair's input."""
        return self.hidden if self.tokens == 1 else self.hidden[places // self.top_k]

    def scatter(self, places: Tensor, results: Tensor) -> None:
        """Take in what some experts computed, weighted by the router."""
        weighted = results * self.weights[places].unsqueeze(-1)
        if self._out is None:
            self._out = self._fresh(weighted)
        self._out[places] = weighted

    def set_all(self, results: Tensor) -> None:
        """Take in what all experts computed, in the order of the pairs, not yet weighted."""
        self._unweighted = results

    def unweighted(self, width: int, dtype: torch.dtype) -> Tensor:
        """One row for every pair, to be filled in place with what the experts compute, not yet weighted."""
        if self._unweighted is None:
            make = torch.empty if self._complete else torch.zeros
            self._unweighted = make((self.tokens * self.top_k, width), dtype=dtype, device=self.hidden.device)
        return self._unweighted

    def finish(self, total: Tensor) -> None:
        """Take in the output of the layer, weighted and summed already."""
        self._total = total

    def combine(self) -> Tensor:
        """The output of the layer."""
        if self._total is not None:
            return self._total
        if self._unweighted is not None:
            self._out = self._unweighted * self.weights.unsqueeze(-1)
        if self._out is None:
            return torch.zeros_like(self.hidden)
        return self._out.view(self.tokens, self.top_k, -1).sum(dim=1).to(self.hidden.dtype)

    def _fresh(self, like: Tensor) -> Tensor:
        shape = (self.tokens * self.top_k, like.shape[1])
        return like.new_empty(shape) if self._complete else like.new_zeros(shape)


def _count(ranked: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The different numbers in a sorted row, and how often each is there."""
    first = np.flatnonzero(np.diff(ranked, prepend=-1))
    return ranked[first].astype(np.int32), np.diff(first, append=len(ranked)).astype(np.int32)

"""One event in the engine: which rows of the input belong to which expert, and the output as far as it is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotset.engine.step import Asking, Step, asking

Tensor = torch.Tensor
Which = npt.NDArray[np.int64] | None
"""Some experts of an event by their places in it, or all of them."""


IntArray = npt.NDArray[np.integer[Any]]

_ONES = np.ones(1 << 15, np.int32)


class ExpertBatch:
    """The input of one layer, its pairs of token and expert sorted by expert, and the output as far as it is known."""

    def __init__(
        self, hidden: Tensor, index: Tensor, weights: Tensor, experts: int, predicted_ids: Tensor | None = None
    ) -> None:
        self.hidden, self.weights, self.num_experts = hidden, weights, experts
        self.tokens, self.top_k = index.shape
        pairs = index.reshape(-1)
        if predicted_ids is None:
            self.flat: npt.NDArray[np.int64] = pairs.cpu().numpy()
            self.predicted_ids = None
        else:  # what a forecast wants from the device comes along with the routing: a second transfer is a second wait
            numbers = torch.cat([pairs, predicted_ids.reshape(-1)]).cpu().numpy()
            self.flat, self.predicted_ids = numbers[: len(pairs)], numbers[len(pairs) :]
        self._order = self.flat.argsort(kind="stable")
        ranked = self.flat[self._order]
        self.single = self.tokens == 1 and ranked[-1] < experts and len(set(ranked.tolist())) == len(ranked)
        if self.single:
            self.experts, self.counts = ranked.astype(np.int32), _ONES[: len(ranked)]
        else:
            self.experts, self.counts = _count(ranked[: np.searchsorted(ranked, experts)])
        self._computed = 0
        self._is_complete = self.single or int(self.counts.sum()) == len(self.flat)
        self.output = BatchOutput(hidden, weights, self.tokens, self.top_k, self._is_complete)

    def places(self, which: Which) -> tuple[npt.NDArray[np.int64], list[int]]:
        """The pairs of some experts, in the order in which these are given, and where each expert's pairs end."""
        if self.single:
            order = self._order if which is None else self._order[which]
            return order, list(range(1, len(order) + 1))
        ends = np.cumsum(self.counts)
        if which is None:
            return self._order[: ends[-1]], ends.tolist()
        counts, ends = self.counts[which], ends[which]
        pieces = [self._order[end - count : end] for end, count in zip(ends.tolist(), counts.tolist(), strict=True)]
        return np.concatenate(pieces), np.cumsum(counts).tolist()

    def routes(self, tokens: int) -> npt.NDArray[np.int32]:
        """What each of so many tokens chose; -1 for what is no expert of this layer."""
        chosen = self.flat.reshape(tokens, -1).astype(np.int32)
        chosen[chosen >= self.num_experts] = -1
        return chosen

    def asking(self, step: Step, tokens: int, *, routed: bool) -> Asking:
        """Who asks for the experts, of so many tokens; `routed` for a policy that looks at what each of them chose."""
        if self._is_complete and not routed:
            return Asking(tokens, step.phase, step.first_request)
        return asking(step, self.routes(tokens), routed=routed)

    def positions(self, experts: Sequence[int] | IntArray) -> npt.NDArray[np.int64]:
        """Where some experts stand among the event's."""
        return np.searchsorted(self.experts, experts)

    def by_pair(self, rows: IntArray) -> IntArray:
        """The rows of all experts in the router's order, for a single token."""
        found = np.empty(len(rows), np.int64)
        found[self._order] = rows
        return found

    def note_computed(self, experts: int) -> bool:
        """Note that so many more experts are computed; returns whether these were the last."""
        self._computed += experts
        return self._computed >= len(self.experts)

    def rows(self, places: Tensor) -> Tensor:
        """The input rows of some pairs; one token alone is every pair's input."""
        return self.hidden if self.tokens == 1 else self.hidden[places // self.top_k]

    def combine(self) -> Tensor:
        """The output of the layer."""
        return self.output.combine()


class BatchOutput:
    """What the experts of an event computed, as far as it is known.

    Every pair has a place of its own, and the places of a token are summed at the end, in the router's order: whichever
    expert arrives last, the sum is the same to the last bit.
    """

    __slots__ = ("_hidden", "_is_complete", "_out", "_tokens", "_top_k", "_total", "_unweighted", "_weights")

    def __init__(self, hidden: Tensor, weights: Tensor, tokens: int, top_k: int, is_complete: bool) -> None:
        self._hidden, self._weights, self._tokens, self._top_k = hidden, weights, tokens, top_k
        self._is_complete = is_complete  # the experts of all pairs are of this layer
        self._out: Tensor | None = None  # of pairs, weighted
        self._unweighted: Tensor | None = None
        self._total: Tensor | None = None

    def scatter(self, places: Tensor, results: Tensor) -> None:
        """Take in what some experts computed, weighted by the router."""
        weighted = results * self._weights.reshape(-1)[places].unsqueeze(-1)
        if self._out is None:
            self._out = self._per_pair(weighted.shape[1], weighted.dtype)
        self._out[places] = weighted

    def set_all(self, results: Tensor) -> None:
        """Take in what all experts computed, in the order of the pairs, not yet weighted."""
        self._unweighted = results

    def unweighted(self, width: int, dtype: torch.dtype) -> Tensor:
        """One row for every pair, to be filled in place with what the experts compute, not yet weighted."""
        if self._unweighted is None:
            self._unweighted = self._per_pair(width, dtype)
        return self._unweighted

    def finish(self, total: Tensor) -> None:
        """Take in the output of the layer, weighted and summed already."""
        self._total = total

    def combine(self) -> Tensor:
        """The sum of each token."""
        if self._total is not None:
            return self._total
        if self._unweighted is not None:
            pairs = self._unweighted.view(self._tokens, self._top_k, -1) * self._weights.unsqueeze(-1)
        elif self._out is not None:
            pairs = self._out.view(self._tokens, self._top_k, -1)
        else:
            return torch.zeros_like(self._hidden)
        summed = pairs.sum(dim=1)
        return summed if summed.dtype is self._hidden.dtype else summed.to(self._hidden.dtype)

    def _per_pair(self, width: int, dtype: torch.dtype) -> Tensor:
        """A row for every pair; zeros if the experts of some are not of this layer."""
        make = torch.empty if self._is_complete else torch.zeros
        return make((self._tokens * self._top_k, width), dtype=dtype, device=self._hidden.device)


def _count(ranked: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The different numbers in a sorted row, and how often each is there."""
    first = np.flatnonzero(np.diff(ranked, prepend=-1))
    return ranked[first].astype(np.int32), np.diff(first, append=len(ranked)).astype(np.int32)

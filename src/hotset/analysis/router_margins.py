"""How clear routers' choices were as a model ran: the lowest score that was chosen minus the highest that was not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import numpy.typing as npt

from hotset.analysis.margins import QUANTILES
from hotset.analysis.tallies import Floats, Ints
from hotset.compiling import keep_compiled
from hotset.engine.batch import ExpertBatch, IntArray
from hotset.models.layers import MoeLayer
from hotset.models.routers import Routers

Scores = npt.NDArray[np.float32]
_LEAST, _PER_OCTAVE, _BINS = -16, 20, 520
"""Margins are counted in bins of a twentieth of an octave, from 2^-16 on, since runs have no bound on their tokens."""
_MAX_WRONG = 0.02
"""The share of tokens that choose otherwise than these scores; above it the router is not understood."""


@dataclass(frozen=True, eq=False)
class RouterMargins:
    """Tokens of each layer by the margin of their choice, in the numbers by which the router chooses."""

    bins: Ints  # [layers, bins]
    wrong: Ints  # [layers], tokens whose experts are not those with the highest scores

    @classmethod
    def empty(cls, layers: int) -> RouterMargins:
        """Of a model that has chosen nothing yet."""
        return cls(np.zeros((layers, _BINS), np.int64), np.zeros(layers, np.int64))

    def add(self, layer: int, scores: Scores, chosen: IntArray, top_k: int) -> None:
        """Take in tokens by their scores [tokens, experts], and what they chose, one token after the other."""
        self.wrong[layer] += count_margins(scores, chosen, top_k, self.bins[layer])

    def quantiles(self) -> Floats:
        """The margins below which a tenth, a half and nine tenths of the tokens lie; [layers, quantiles].

        Not numbers where a layer's router is not understood.
        """
        found = np.full((len(self.bins), len(QUANTILES)), np.nan)
        centre = 2.0 ** ((np.arange(_BINS) + 0.5) / _PER_OCTAVE + _LEAST)
        for layer, counts in enumerate(self.bins):
            if (total := counts.sum()) and self.wrong[layer] <= _MAX_WRONG * total:
                found[layer] = centre[np.searchsorted(np.cumsum(counts), np.array(QUANTILES) * total)]
        return found


class MarginRecorder:
    """Asks each layer's router anew, on what its experts are given."""

    def __init__(self, model: Any, moe_layers: Sequence[MoeLayer]) -> None:
        self.margins = RouterMargins.empty(len(moe_layers))
        self._routers = Routers.of(model, moe_layers)
        self._last: ReferenceType[ExpertBatch] | None = None

    def see(self, layer: int, batch: ExpertBatch) -> None:
        """Take in an event, once, though its experts may be computed in several parts."""
        if self._routers is None or (self._last is not None and self._last() is batch):
            return
        self._last = ref(batch)
        router, scale = self._routers.routers[layer], self._routers.scales[layer]
        if router is not None:
            hidden = batch.hidden.detach()
            scores = router.scores(hidden if scale is None else hidden * scale)
            self.margins.add(layer, scores.float().numpy(), batch.flat, batch.top_k)


@keep_compiled(nogil=True, error_model="numpy")
def count_margins(scores: Scores, chosen: IntArray, top_k: int, bins: Ints) -> int:
    """Count each token that chose all its experts by the margin of its choice; return how many chose otherwise.

    Compiled, since for one token a call of torch costs more than the work.
    """
    wrong = 0
    left = np.ones(scores.shape[1], np.bool_)
    for token in range(scores.shape[0]):
        own = chosen[token * top_k : (token + 1) * top_k]
        if own.max() >= scores.shape[1]:
            continue
        last, first_left = np.inf, -np.inf
        for expert in own:
            left[expert] = False
            last = min(last, np.float64(scores[token, expert]))
        for expert in range(scores.shape[1]):
            if left[expert]:
                first_left = max(first_left, np.float64(scores[token, expert]))
        left[own] = True
        margin = last - first_left
        wrong += margin < 0
        octaves = np.log2(max(margin, 2.0**_LEAST)) - _LEAST
        bins[int(min(octaves * _PER_OCTAVE, _BINS - 1.0))] += 1
    return wrong

"""The predictions of several tokens as one list: those that most tokens rank first, as many as one token ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.policies.base import compiled, compiled_entry

Ranked = npt.NDArray[np.int16]


@compiled
def rank_votes(predicted: Any, votes: Any, ranked: Any) -> None:
    """Rank by votes what tokens predict: the better an expert's rank, the larger a vote; of equals the lower number.

    `predicted` is [tokens, width], best first and -1 where there is none; `votes` is room for one number per expert.
    """
    width = predicted.shape[1]
    limit = min(width, len(ranked))
    for expert in range(len(votes)):
        votes[expert] = 0.0
    for token in range(predicted.shape[0]):
        for rank in range(width):
            expert = predicted[token, rank]
            if expert >= 0:
                votes[expert] += width - rank
    for place in range(len(ranked)):
        ranked[place] = -1
    size = 0
    for expert in range(len(votes)):
        if votes[expert] <= 0.0 or (size == limit and (limit == 0 or votes[ranked[size - 1]] >= votes[expert])):
            continue
        at = min(size, limit - 1)
        while at > 0 and votes[ranked[at - 1]] < votes[expert]:
            ranked[at] = ranked[at - 1]
            at -= 1
        ranked[at] = expert
        size = min(size + 1, limit)


@compiled_entry
def _rank_all(predicted: Any, votes: Any, ranked: Any) -> None:
    for distance in range(predicted.shape[1]):
        rank_votes(predicted[:, distance], votes, ranked[distance])


def rank_by_votes(predicted: Ranked, experts: int) -> Ranked:
    """One list per distance, [distances, width], from those of several tokens, [tokens, distances, width]."""
    ranked = np.empty(predicted.shape[1:], np.int16)
    _rank_all(np.ascontiguousarray(predicted), np.empty(experts), ranked)
    return ranked

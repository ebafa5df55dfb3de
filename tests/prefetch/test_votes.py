"""Votes of several tokens, held against the rule in words; the device's kernel is held to it in tests/engine/device."""

from __future__ import annotations

import numpy as np
import pytest

from hotset.prefetch.votes import rank_by_votes


def slow(predicted: np.ndarray) -> list[int]:
    """All that is named, those with most votes first; a first place counts as many votes as there are places."""
    width = predicted.shape[1]
    votes: dict[int, int] = {}
    for row in predicted.tolist():
        for place, expert in enumerate(row):
            if expert >= 0:
                votes[expert] = votes.get(expert, 0) + width - place
    best = sorted(votes, key=lambda expert: (-votes[expert], expert))[:width]
    return best + [-1] * (width - len(best))


@pytest.mark.parametrize("seed", range(40))
def test_votes_are_counted_as_in_words(seed: int) -> None:
    rng = np.random.default_rng(seed)
    experts = int(rng.integers(2, 20))
    tokens, distances, width = int(rng.integers(1, 6)), int(rng.integers(1, 4)), int(rng.integers(1, experts + 1))
    predicted = np.stack([[rng.permutation(experts)[:width] for _ in range(distances)] for _ in range(tokens)]).astype(
        np.int16
    )
    predicted[rng.random(predicted.shape) < 0.2] = -1
    found = rank_by_votes(predicted, experts)
    assert found.tolist() == [slow(predicted[:, distance]) for distance in range(distances)]


def test_two_tokens_by_hand() -> None:
    predicted = np.array([[[4, 1, 2]], [[1, 3, -1]]], np.int16)  # 1: 2 + 3 votes, 4: 3, 3: 2, 2: 1
    assert rank_by_votes(predicted, 6).tolist() == [[1, 4, 3]]


def test_a_first_place_counts_most() -> None:
    said = np.array([[[3, 1, 2]], [[1, 3, 5]], [[1, -1, -1]]], np.int16)  # 1: 2 + 3 + 3; 3: 3 + 2; 2 and 5: 1 each
    assert rank_by_votes(said, 6).tolist() == [[1, 3, 2]]
    few = np.array([[[4, -1, -1]], [[4, -1, -1]]], np.int16)
    assert rank_by_votes(few, 6).tolist() == [[4, -1, -1]]

"""Pairs: counted by hand and by loops, and their chance by random choices."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
from routed_samples import by_hand, drawn

from hotset.analysis.coactivation import (
    alike_order,
    between_layers,
    chance_within,
    count_pairs,
    within_layers,
)
from hotset.trace import Trace


def random_choices(tokens: int) -> Trace:
    random = np.random.default_rng(5)
    return by_hand([[random.permutation(8)[:3].tolist() for _ in range(2)] for _ in range(tokens)], 8)


@pytest.mark.parametrize("seed", range(3))
def test_counts_as_slowly(seed: int) -> None:
    trace = drawn(seed)
    for layer, other in ((1, 1), (0, 1)):
        counts = count_pairs(trace, layer, other, np.arange(trace.tokens))
        together = np.zeros((12, 12), int)
        ran = 0
        for token in range(trace.tokens):
            a, b = ([e for e in trace.experts[token, each].tolist() if e >= 0] for each in (layer, other))
            ran += bool(a and b)
            for pair in permutations(a, 2) if layer == other else [(x, y) for x in a for y in b]:
                together[pair] += 1
        assert counts.tokens == ran
        shown = counts.together.copy()
        if layer == other:
            assert (np.diag(shown) == counts.first).all()
            np.fill_diagonal(shown, 0)
        assert (shown == together).all()


def test_lift_by_hand() -> None:
    # 40 tokens choose 0 and 1, 40 choose 2 and 3: each pair half of the time, as each of its experts.
    trace = by_hand([[[0, 1]]] * 40 + [[[2, 3]]] * 40, 5)
    counts = count_pairs(trace, 0, 0, np.arange(80))
    assert counts.lift[0, 1] == 2.0
    assert counts.lift[0, 2] == 0.0
    assert math.isnan(counts.lift[0, 0])
    assert math.isnan(counts.lift[0, 4])  # never used: too few to tell
    best = counts.strongest(3)
    assert [(row["expert"], row["other_expert"], row["tokens"]) for row in best] == [(0, 1, 40), (2, 3, 40)]
    assert best[0]["expected"] == 20.0


def test_too_few_tokens_are_not_compared() -> None:
    found = within_layers(by_hand([[[0, 1]]] * 10 + [[[2, 3]]] * 10, 4))
    assert found is not None
    assert found.strongest == []
    assert math.isnan(found.spread[0])


def test_chance_is_that_of_random_choices() -> None:
    trace = random_choices(6000)
    inside = count_pairs(trace, 0, 0, np.arange(6000)).lift
    assert np.nanmean(inside) == pytest.approx(chance_within(trace.shape), rel=0.01)
    assert chance_within(trace.shape) == pytest.approx(8 * 2 / (3 * 7))
    across = count_pairs(trace, 0, 1, np.arange(6000)).lift
    assert np.mean(across) == pytest.approx(1.0, rel=0.01)
    within, between = within_layers(trace), between_layers(trace)
    assert within is not None
    assert between is not None
    assert max(within.spread.max(), between.spread.max()) < 0.15


def test_between_finds_what_follows() -> None:
    trace = by_hand([[[0], [3]]] * 50 + [[[1], [2]]] * 50, 4)
    found = between_layers(trace)
    assert found is not None
    assert [(row["expert"], row["other_expert"], row["lift"]) for row in found.strongest] == [(0, 3, 2.0), (1, 2, 2.0)]
    assert found.shown is not None
    assert (found.shown.layer, found.shown.other) == (0, 1)
    assert within_layers(trace) is None  # one expert per token


def test_one_layer_has_no_next() -> None:
    assert between_layers(by_hand([[[0, 1]]], 4)) is None


def test_the_order_puts_partners_together() -> None:
    """Two groups, dealt alternately, are apart again."""
    group = np.arange(10) % 2
    lift = np.where(group[:, None] == group[None], 4.0, 0.25)
    np.fill_diagonal(lift, np.nan)
    rows, _ = alike_order(lift, 1.0)
    assert len(set(group[rows[:5]])) == len(set(group[rows[5:]])) == 1

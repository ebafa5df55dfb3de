"""Evenness of use: hand-computed cases, and slow computations beside them."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from routed_samples import by_hand, drawn, uses

from hotset.analysis.usage import measure_usage
from hotset.trace import Phase

# Four tokens, two layers of four experts, two each. Layer 0: uses 4, 2, 2, 0. Layer 1: 1, 0, 1, 0 and tokens without.
HAND = [[[0, 1], [0, 2]], [[0, 1], [-1, -1]], [[0, 2], [-1, -1]], [[2, 0], [-1, -1]]]


def test_by_hand() -> None:
    found = measure_usage(by_hand(HAND, 4))
    assert found.uses.tolist() == [[4, 2, 2, 0], [1, 0, 1, 0]]
    assert found.tokens.tolist() == [4, 1]
    assert found.share.tolist() == [[0.5, 0.25, 0.25, 0], [0.5, 0, 0.5, 0]]
    assert found.entropy_bits.tolist() == pytest.approx([1.5, 1.0])
    assert found.effective.tolist() == pytest.approx([2**1.5, 2.0])
    # (-3 x 0 - 1 x 1/4 + 1 x 1/4 + 3 x 1/2) / 4, and (1/2 + 3/2) / 4
    assert found.gini.tolist() == pytest.approx([0.375, 0.5])
    assert found.covering(0.5).tolist() == [1, 1]
    assert found.covering(0.75).tolist() == [2, 2]
    assert found.covering(0.9).tolist() == [3, 2]
    assert found.dead.tolist() == [1, 2]
    assert found.dead_by_chance.tolist() == pytest.approx([4 / 16, 2.0])


@pytest.mark.parametrize("seed", range(3))
def test_as_slowly(seed: int) -> None:
    trace = drawn(seed)
    found = measure_usage(trace)
    counted = Counter((int(trace.phase[t]), layer, expert) for t, layer, expert in uses(trace))
    for phase in Phase:
        for layer in range(trace.shape.layers):
            for expert in range(trace.shape.experts):
                assert found.by_phase[phase, layer, expert] == counted[int(phase), layer, expert]
    for layer in range(trace.shape.layers):
        own = sorted((counted[0, layer, e] + counted[1, layer, e] for e in range(trace.shape.experts)), reverse=True)
        total = sum(own)
        shares = [count / total for count in own if count]
        natural = -sum(p * math.log(p) for p in shares)
        assert found.effective[layer] == pytest.approx(math.exp(natural))
        pairs = sum(abs(a - b) for a in own for b in own)  # Gini is half the mean difference over the mean
        assert found.gini[layer] == pytest.approx(pairs / (2 * len(own) * total))
        for part in (0.5, 0.9):
            number = next(n for n in range(1, len(own) + 1) if sum(own[:n]) >= part * total)
            assert found.covering(part)[layer] == number


def test_a_layer_that_never_ran_has_no_figures() -> None:
    found = measure_usage(by_hand([[[0, 1], [-1, -1]]], 4))
    assert found.tokens.tolist() == [1, 0]
    assert np.isnan(found.dead_by_chance[1])
    assert np.isnan(found.effective[1])
    assert np.isnan(found.gini[1])
    assert found.covering(0.5).tolist() == [1, 0]
    assert found.by_layer()[1]["dead"] == 4


def test_one_expert() -> None:
    found = measure_usage(by_hand([[[0]], [[0]]], 1))
    assert found.effective.tolist() == [1.0]
    assert found.gini.tolist() == [0.0]
    assert found.dead_by_chance.tolist() == [0.0]


def test_dead_by_chance_is_what_random_choices_leave() -> None:
    random = np.random.default_rng(3)
    unused = []
    for _ in range(400):
        rows = [[random.permutation(20)[:2].tolist()] for _ in range(12)]
        unused.append(measure_usage(by_hand(rows, 20)).dead[0])
    assert np.mean(unused) == pytest.approx(20 * 0.9**12, rel=0.03)

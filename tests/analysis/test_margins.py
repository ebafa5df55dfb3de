"""Weights of the chosen experts: hand-computed, slow, and where there are none."""

from __future__ import annotations

import numpy as np
import pytest
from routed_samples import by_hand, drawn, without

from hotset.analysis.margins import QUANTILES, measure_margins


def test_by_hand() -> None:
    weights = np.array([[[0.25, 0.75]], [[0.5, 0.5]], [[0.5, 0.0]]], np.float16)
    trace = by_hand([[[0, 1]], [[2, 3]], [[1, -1]]], 4, weights=weights)
    found = measure_margins(trace)
    assert found is not None
    # The third token has one expert only and is left out: shares are 3/4, 1/4 and 1/2, 1/2.
    assert found.share.tolist() == [[0.625, 0.375]]
    assert found.weight_sum.tolist() == [1.0]
    assert found.first_gap[0, 1] == pytest.approx(0.25)
    assert found.last_share[0, 1] == pytest.approx(0.375)


def test_as_slowly() -> None:
    trace = drawn(1)
    found = measure_margins(trace)
    assert found is not None
    assert trace.weights is not None
    for layer in range(trace.shape.layers):
        shares = []
        for token in range(trace.tokens):
            if min(trace.experts[token, layer]) >= 0:
                own = sorted((float(w) for w in trace.weights[token, layer]), reverse=True)
                shares.append([weight / sum(own) for weight in own])
        gaps, lasts = [own[0] - own[1] for own in shares], [own[-1] for own in shares]
        assert found.share[layer].tolist() == pytest.approx(np.mean(shares, axis=0).tolist(), rel=1e-4)
        assert found.first_gap[layer].tolist() == pytest.approx(np.quantile(gaps, QUANTILES).tolist(), rel=1e-3)
        assert found.last_share[layer].tolist() == pytest.approx(np.quantile(lasts, QUANTILES).tolist(), rel=1e-3)


def test_no_weights_say_nothing() -> None:
    assert measure_margins(without(drawn(), weights=None)) is None


def test_one_expert_per_token_has_no_gap() -> None:
    trace = by_hand([[[0]], [[1]]], 2, weights=np.array([[[0.5]], [[0.25]]], np.float16))
    found = measure_margins(trace)
    assert found is not None
    assert found.share.tolist() == [[1.0]]
    assert found.weight_sum.tolist() == [0.375]
    assert np.isnan(found.first_gap).all()


def test_a_layer_without_weights_has_no_figures() -> None:
    found = measure_margins(by_hand([[[0, 1], [-1, -1]]], 4, weights=np.array([[[1, 1], [0, 0]]], np.float16)))
    assert found is not None
    assert np.isnan(found.share[1]).all()
    assert found.by_layer()[0]["gap_first_second"]["p50"] == 0

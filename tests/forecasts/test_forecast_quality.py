"""What forecasts are worth on the recorded traces: the routers as documented, and `best` above each of its members."""

from __future__ import annotations

import numpy as np
import pytest

from hotset import reference
from hotset.forecasts import names
from hotset.sim.forecasting import Evaluation, evaluate
from hotset.trace.combine import interleave


@pytest.fixture(scope="module")
def judged() -> dict[str, Evaluation]:
    return {name: evaluate(reference.trace(name)) for name in ("it", "python", "switch")}


@pytest.mark.parametrize("name", ["it", "python", "switch"])
def test_best_is_at_least_as_good_as_each_single_one(judged: dict[str, Evaluation], name: str) -> None:
    for distance in (1, 2, 3):
        scores = {score.forecast: score for score in judged[name].scores if score.distance == distance}
        assert scores.keys() == set(names())
        for score in scores.values():
            assert scores["best"].recall >= score.recall
            assert scores["best"].recall_2k >= score.recall_2k
            assert scores["best"].log_loss <= score.log_loss


def test_the_probabilities_of_best_mean_what_they_say(judged: dict[str, Evaluation]) -> None:
    for result in judged.values():
        for score in result.scores:
            if score.forecast == "best":
                assert score.calibration_error < 0.01
                full = [(said, true) for said, true, number in score.bins if number >= 300]
                assert max(abs(said - true) for said, true in full) < 0.08


@pytest.mark.parametrize("name", ["it", "users"])
def test_best_is_calibrated_for_batches_too(name: str) -> None:
    scores = evaluate(interleave(reference.trace(name), 4, "batch"), ["best", "gate"]).scores
    best, gate = ([score for score in scores if score.forecast == which] for which in ("best", "gate"))
    for one, other in zip(best, gate, strict=True):
        assert one.calibration_error < 0.015
        assert one.recall >= other.recall
        assert one.log_loss <= other.log_loss


def test_the_routers_are_as_good_as_documented(judged: dict[str, Evaluation]) -> None:
    for distance, documented in ((1, 0.78), (2, 0.69), (3, 0.62)):
        for name, result in judged.items():
            (recall,) = (s.recall for s in result.scores if s.forecast == "gate" and s.distance == distance)
            assert abs(recall - documented) < 0.03, name


def test_recall_of_the_routers_is_that_of_the_recorded_predictions() -> None:
    """Of a prediction as wide as top_k the most likely k are the prediction itself, once ranks have been learnt."""
    trace = reference.trace("it")
    assert trace.predictions is not None
    rows = (trace.phase == 1) & (trace.request >= 13)
    for score in evaluate(trace, ["gate"]).scores:
        d = score.distance
        predictions, experts = trace.predictions[rows, d:, d - 1], trace.experts[rows, d:]
        right = (predictions[..., :, None] == experts[..., None, :]).any(-1).mean()
        assert score.recall == pytest.approx(np.float64(right), abs=0.015)

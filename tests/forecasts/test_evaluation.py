"""The compiled evaluation against counting by hand, event by event; and what must hold of every forecast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from forecast_samples import SHAPE, Live, events_of, random_trace

from hotset.errors import HotsetError
from hotset.forecasts import Forecast, names, parse
from hotset.shape import ModelShape
from hotset.sim.forecasting import BINS, Score, evaluate
from hotset.testing.forecast_contract import CHECKS
from hotset.trace import Trace

ALL = ("best", "gate", "previous", "token", "transition")


def counted(trace: Trace, spec: str, distance: int, fit: float) -> dict[str, Any]:
    """What `evaluate` should say, from probabilities asked for one event at a time."""
    shape, live, events = trace.shape, Live(parse(spec), trace.shape), events_of(trace)
    first = int(np.ceil(fit * trace.requests))
    within: list[tuple[Any, Any, int]] = []
    across: list[tuple[Any, Any, int]] = []
    for i, event in enumerate(events):
        live.observe(event)
        probabilities = live.probabilities(event, distance)
        if i + distance < len(events):
            target = events[i + distance]
            if target.phase == 1 and target.request >= first:
                used = np.isin(np.arange(shape.experts), target.experts)
                part = within if target.layer >= distance else across
                part.append((probabilities, used, min(shape.top_k * target.tokens, shape.experts)))
    said = np.concatenate([probabilities for probabilities, _, _ in within + across])
    true = np.concatenate([used for _, used, _ in within + across])
    place = np.minimum((said * BINS).astype(int), BINS - 1)
    error = sum(abs(said[place == b].sum() - true[place == b].sum()) for b in range(BINS)) / len(said)
    only, came = (np.concatenate([row[i] for row in within]) for i in (0, 1))
    return {
        "events": len(within),
        "recall": hits(within, 1) / sum(used.sum() for _, used, _ in within),
        "precision": hits(within, 1) / sum(k for _, _, k in within),
        "recall_2k": hits(within, 2) / sum(used.sum() for _, used, _ in within),
        "next_pass_recall": hits(across, 1) / sum(used.sum() for _, used, _ in across),
        "calibration_error": error,
        "brier": ((only - came) ** 2).mean(),
        "log_loss": -np.log(np.maximum(np.where(came, only, 1 - only), 1e-6)).mean(),
    }


def hits(rows: list[tuple[Any, Any, int]], times: int) -> int:
    """Ties go to the lower number."""
    return sum(
        int(used[np.argsort(-probabilities, kind="stable")[: times * k]].sum()) for probabilities, used, k in rows
    )


@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize(("batch", "fit"), [(1, 0.5), (3, 0.25)])
def test_scores_are_what_counting_event_by_event_gives(spec: str, batch: int, fit: float) -> None:
    trace = random_trace(batch=batch, seed=batch)
    for score in evaluate(trace, [spec], fit=fit).scores:
        expected = counted(trace, spec, score.distance, fit)
        assert {key: getattr(score, key) for key in expected} == pytest.approx(expected, abs=1e-9)


def test_bins_and_layers_add_up() -> None:
    trace = random_trace()
    for score in evaluate(trace, ["previous"]).scores:
        asked = sum(number for _, _, number in score.bins)
        assert asked == trace.shape.experts * 4 * 12 * trace.shape.layers  # 4 requests of 12 new tokens are judged
        assert len(score.recall_by_layer) == trace.shape.layers
        assert np.mean(score.recall_by_layer[score.distance :]) == pytest.approx(score.recall)
        for low, (said, true, number) in zip(np.arange(BINS) / BINS, score.bins, strict=True):
            assert number == 0 or (low <= said + 1e-9 and said <= low + 0.1 + 1e-9 and 0 <= true <= 1)


def without_time(scores: list[Score]) -> list[dict[str, Any]]:
    return [{k: v for k, v in vars(score).items() if k != "us_per_event"} for score in scores]


def test_the_same_trace_gives_the_same_scores() -> None:
    trace = random_trace()
    assert without_time(evaluate(trace).scores) == without_time(evaluate(trace).scores)


def test_what_a_trace_lacks_leaves_forecasts_out() -> None:
    whole = random_trace()
    bare = Trace(whole.shape, whole.experts, whole.request, whole.step, whole.phase)
    result = evaluate(bare)
    found = {score.forecast for score in result.scores}
    assert found == set(names()) - {"gate", "token"}
    assert any("gate is left out" in text for text in result.notes)
    assert any("no token ids" in text for text in result.notes)


def test_one_request_is_cut_by_passes_and_the_result_says_so() -> None:
    result = evaluate(random_trace(requests=1, new=20), ["previous"])
    assert "passes 12 to 21" in result.judged
    assert result.scores[0].events == 10 * 3
    assert "requests 5 to 8" in evaluate(random_trace(), ["previous"]).judged


def test_distances_that_a_shallow_model_does_not_have_are_not_judged() -> None:
    trace = random_trace(ModelShape(layers=1, experts=6, top_k=2))
    (score,) = evaluate(trace, ["best"]).scores
    assert (score.distance, score.recall, score.events) == (1, None, 0)
    assert score.next_pass_recall is not None


@pytest.mark.parametrize(("distances", "fit"), [((), 0.5), ((4,), 0.5), ((0,), 0.5), ((1,), 1.0), ((1,), -0.1)])
def test_senseless_questions_are_refused(distances: tuple[int, ...], fit: float) -> None:
    with pytest.raises(HotsetError):
        evaluate(random_trace(), ["previous"], distances, fit)


@pytest.mark.parametrize("name", names())
def test_constant_input_for_long_keeps_probabilities_finite(name: str) -> None:
    shape, tokens = ModelShape(layers=4, experts=8, top_k=2), 25_000
    one = np.tile(np.array([1, 4], np.int16), (tokens, 4, 1))
    predictions = np.tile(np.array([4, 1], np.int16), (tokens, 4, 3, 1))
    step = np.arange(tokens, dtype=np.int32)
    trace = Trace(
        shape, one, np.zeros(tokens, np.int32), step, np.ones(tokens, np.uint8),
        token_ids=np.full(tokens, 5, np.int32), predictions=predictions,
    )  # fmt: skip
    for score in evaluate(trace, [name]).scores:
        assert score.recall == 1.0
        assert np.isfinite([score.log_loss, score.brier, score.calibration_error]).all()
        assert score.log_loss < 0.05
        assert sum(number for _, _, number in score.bins) == shape.experts * 4 * (tokens // 2)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_forecast_keeps_the_contract(name: str, check: Callable[[Forecast], None]) -> None:
    check(parse(name))


@pytest.mark.parametrize("name", ["best", "gate"])
@pytest.mark.parametrize("places", [0, 2, 10])
def test_picked_are_the_likeliest_that_have_no_slot(name: str, places: int) -> None:
    live, random = Live(parse(name), SHAPE), np.random.default_rng(places)
    out, picked = np.empty(SHAPE.experts), np.empty(places, np.int64)
    for event in events_of(random_trace(requests=3)):
        live.observe(event)
        slot_of = random.integers(-1, 2, SHAPE.experts).astype(np.int32)
        target = (event.layer + 1) % SHAPE.layers
        count = live.steps.pick(live.state, *event, target, 1, slot_of, 0.2, out, picked)
        probabilities = live.probabilities(event, 1)
        wanted = [
            e for e in np.argsort(-probabilities, kind="stable").tolist() if probabilities[e] >= 0.2 and slot_of[e] < 0
        ]
        assert picked[:count].tolist() == wanted[:places]

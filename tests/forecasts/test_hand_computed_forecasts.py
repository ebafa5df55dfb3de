"""Small examples with the numbers reasoned beside them, and the same against a slow model."""

from __future__ import annotations

import math

import numpy as np
import pytest
from forecast_samples import SHAPE, Live, events_of, random_trace, seen
from slow_forecasts import SLOW

from hotset.errors import PolicyError
from hotset.forecasts import Forecast, names, parse
from hotset.shape import ModelShape

TWO = ModelShape(layers=2, experts=2, top_k=1)
# A rate starts even, worth 8 tokens: after one token of expert 1 it is (8 / 2 + 1) / 9.
USED, UNUSED = 5 / 9, 4 / 9


def test_files_are_the_registry() -> None:
    assert {"best", "gate", "previous", "token", "transition"} <= set(names())
    assert not any(name == "base" or name.startswith("_") for name in names())
    for name in names():
        assert isinstance(parse(name), Forecast)
        assert parse(name).spec == name
    assert parse("token:slots=16").spec == "token:slots=16"


@pytest.mark.parametrize("spec", ["nonsense", "gate:x=1", "token:x=1", "token:slots=many", "token:slots=0", "base"])
def test_what_cannot_be_read_is_refused(spec: str) -> None:
    with pytest.raises(PolicyError):
        parse(spec)


def test_previous() -> None:
    live = Live(parse("previous"), ModelShape(layers=1, experts=4, top_k=1))
    for _ in range(2):
        live.observe(seen(0, [0]))
    # First event: four experts never used, one hit: 1 of 4. Second: expert 0 is of age 1 and hit, three others are not:
    # age 1 has 1 of 1, never has 1 of 7, and each began as 2 of 8. The rates, 0.4 and 0.2, break ties.
    probabilities = live.probabilities(seen(0, [0]), 1)
    assert probabilities == pytest.approx([3 / 9 + 0.4e-4] + [3 / 15 + 0.2e-4] * 3)


def test_transition() -> None:
    live = Live(parse("transition"), TWO)
    for event in (seen(0, [0]), seen(1, [1]), seen(0, [0])):
        live.observe(event)
    # Expert 1 of layer 1 followed expert 0 once in one case, smoothed by four tokens of its rate.
    assert live.probabilities(seen(0, [0]), 1) == pytest.approx([4 * UNUSED / 5, (1 + 4 * USED) / 5])
    # Nothing is known of what follows expert 1, so its row is the rate.
    assert live.probabilities(seen(0, [1]), 1) == pytest.approx([UNUSED, USED])


def test_token() -> None:
    live = Live(parse("token:slots=4"), TWO)
    for event in (seen(0, [0], token=7), seen(1, [1], token=7), seen(0, [0], token=7)):
        live.observe(event)
    # One occurrence, one vote: 0.7 before any evidence; without a vote 0.7 of the rate.
    assert live.probabilities(seen(0, [0], token=7), 1) == pytest.approx([0.7 * UNUSED, 0.7])
    assert live.probabilities(seen(0, [0], token=6), 1) == pytest.approx([UNUSED, USED])  # never seen
    live.observe(seen(1, [1], token=7))
    # The vote was right once: (1 + 8 * 0.7) / 9; a second occurrence is held, with a prior of its own.
    live.observe(seen(0, [0], token=3))  # takes the place of 7 in a table of four
    assert live.probabilities(seen(0, [0], token=7), 1) == pytest.approx([4 / 10, 6 / 10])


def test_token_knows_nothing_of_the_next_pass() -> None:
    live = Live(parse("token"), TWO)
    for event in (seen(0, [0], token=7), seen(1, [1], token=7)):
        live.observe(event)
    assert live.probabilities(seen(1, [1], token=7), 1) == pytest.approx([USED, UNUSED])  # layer 0 used expert 0


def test_gate() -> None:
    live = Live(parse("gate"), TWO)
    first = seen(0, [0], predictions=[[1]])
    live.observe(first)
    assert live.probabilities(first, 1) == pytest.approx([0.4 * 0.5, 0.5])  # before any evidence
    live.observe(seen(1, [1]))
    live.observe(first)
    # The prediction was right once: (1 + 8 * 0.5) / 9 in all layers, and the layer's own leans on that with weight 24.
    # The expert not predicted was not used, where its rate of 0.5 was expected.
    right, rest = (1 + 24 * 5 / 9) / 25, (24 * (8 * 0.4 / 8.5)) / 24.5
    assert live.probabilities(first, 1) == pytest.approx([rest * UNUSED, right])


def test_best_starts_as_the_sum_of_its_members_log_odds() -> None:
    def odds(probabilities: np.ndarray) -> np.ndarray:
        return np.log(probabilities / (1 - probabilities))

    events = [seen(0, [0], phase=0, token=7), seen(1, [1], phase=0, token=7), seen(0, [0], token=7, predictions=[[1]])]
    said = {}
    for name in ("best", "previous", "transition", "token", "gate"):
        live = Live(parse(name), TWO)
        for event in events:
            live.observe(event)
        said[name] = live.probabilities(events[-1], 1)
    rate = odds(np.array([UNUSED, USED]))
    value = rate + (odds(said["gate"]) - rate)
    for name in ("previous", "transition", "token"):
        value = value + 0.3 * (odds(said[name]) - rate)
    assert said["best"] == pytest.approx(1 / (1 + np.exp(-value)), abs=0.003)


def test_probabilities_of_several_tokens_are_of_any_of_them() -> None:
    live = Live(parse("transition"), TWO)
    event = seen(0, [0, 1], counts=[2, 1], tokens=3)
    live.observe(event)
    assert live.probabilities(event, 1) == pytest.approx([1 - 0.5**3] * 2)
    assert live.probabilities(event._replace(phase=0), 2) == pytest.approx(
        [(4 + 2) / 11, (4 + 1) / 11]
    )  # then one token


@pytest.mark.parametrize("name", sorted(SLOW))
@pytest.mark.parametrize("batch", [1, 3])
def test_against_the_slow_model(name: str, batch: int) -> None:
    live, slow = Live(parse(name), SHAPE), SLOW[name](SHAPE)
    for event in events_of(random_trace(batch=batch, requests=5)):
        live.observe(event)
        slow.observe(event)
        for distance in (1, 2, 3):
            assert live.probabilities(event, distance) == pytest.approx(slow.probabilities(event, distance), abs=1e-12)


def test_small_tables_of_the_token_forecast_forget_like_the_slow_model() -> None:
    live, slow = Live(parse("token:slots=7"), SHAPE), SLOW["token"](SHAPE)
    slow.slots = 7
    for event in events_of(random_trace(requests=5)):
        live.observe(event)
        slow.observe(event)
        assert live.probabilities(event, 1) == pytest.approx(slow.probabilities(event, 1), abs=1e-12)


def test_a_transition_table_above_64_mib_stays_off() -> None:
    large = ModelShape(layers=3, experts=2600, top_k=1)
    forecast = parse("transition")
    assert forecast.start(large).follows.size == 0
    live = Live(forecast, large)
    live.observe(seen(0, [5]))
    assert math.isclose(live.probabilities(seen(0, [5]), 1).sum(), 1.0)

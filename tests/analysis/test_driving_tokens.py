"""Tokens that drive experts: the log-likelihood ratio by hand and by loops, and what it finds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from routed_samples import by_hand, drawn, without

from hotset.analysis.driving_tokens import LEAST_SURPRISE, find_drivers, log_likelihood, most_driven


def slow_ratio(uses: int, occurrences: int, total: int, tokens: int) -> float:
    """Twice the difference of the log-likelihoods of two models: one rate for all tokens, or one for this token."""

    def likelihood(hits: int, tries: int, rate: float) -> float:
        return (hits * math.log(rate) if hits else 0) + ((tries - hits) * math.log(1 - rate) if tries > hits else 0)

    rest, rest_uses = tokens - occurrences, total - uses
    apart = likelihood(uses, occurrences, uses / occurrences)
    apart += likelihood(rest_uses, rest, rest_uses / rest) if rest else 0
    return 2 * (apart - likelihood(uses, occurrences, total / tokens) - likelihood(rest_uses, rest, total / tokens))


@pytest.mark.parametrize(
    ("uses", "occurrences", "total", "tokens"), [(5, 5, 5, 100), (8, 10, 30, 100), (40, 50, 60, 100), (3, 20, 4, 4000)]
)
def test_the_ratio_as_slowly(uses: int, occurrences: int, total: int, tokens: int) -> None:
    found = log_likelihood(np.array([uses]), np.array([occurrences]), np.array([total]), tokens)
    assert found[0] == pytest.approx(slow_ratio(uses, occurrences, total, tokens))


def test_below_average_drives_nothing() -> None:
    assert log_likelihood(np.array([1]), np.array([50]), np.array([60]), 100)[0] == 0
    assert log_likelihood(np.array([30]), np.array([50]), np.array([60]), 100)[0] == 0  # just as the others


def test_by_hand() -> None:
    """Token 7 always chooses expert 0, the other tokens never do."""
    trace = by_hand([[[0, 1]]] * 20 + [[[2, 1]]] * 60, 4, token_ids=np.array([7] * 20 + [8] * 30 + [9] * 30, np.int32))
    found = find_drivers(trace)
    assert found is not None
    by_expert = {each.expert: each for each in found}
    assert set(by_expert) == {0, 2}  # expert 1 is used by all alike
    (driver,) = by_expert[0].drivers
    assert (driver.token, driver.occurrences, driver.uses) == (7, 20, 20)
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert driver.surprise == pytest.approx(2 * 80 * entropy)
    assert {each.token for each in by_expert[2].drivers} == {8, 9}
    assert by_expert[0].as_dict(lambda token: f"<{token}>")["drivers"] == [{**driver._asdict(), "text": "<7>"}]
    assert by_expert[0].as_dict()["drivers"][0]["text"] is None


def test_as_slowly() -> None:
    trace = drawn(2, requests=20)
    rare = trace.token_ids
    assert rare is not None
    driven = rare % 3 == 0
    chosen = trace.experts.copy()
    for token in np.flatnonzero(driven).tolist():  # such tokens choose expert 5 of layer 1
        if 5 not in chosen[token, 1] and chosen[token, 1, 0] >= 0:
            chosen[token, 1, 0] = 5
    trace = without(trace, experts=chosen)
    found = find_drivers(trace)
    assert found is not None
    (own,) = (each for each in found if (each.layer, each.expert) == (1, 5))
    assert {driver.token for driver in own.drivers} <= {0, 3, 6}
    for driver in own.drivers:
        here = [t for t in range(trace.tokens) if trace.experts[t, 1].max() >= 0]
        occurrences = [t for t in here if rare[t] == driver.token]
        uses = [t for t in occurrences if 5 in trace.experts[t, 1].tolist()]
        total = sum(5 in trace.experts[t, 1].tolist() for t in here)
        assert (driver.occurrences, driver.uses) == (len(occurrences), len(uses))
        assert driver.surprise == pytest.approx(slow_ratio(len(uses), len(occurrences), total, len(here)))
        assert driver.surprise >= LEAST_SURPRISE


def test_no_token_ids() -> None:
    assert find_drivers(without(drawn(), token_ids=None)) is None


def test_few_are_shown_of_every_layer() -> None:
    random = np.random.default_rng(0)
    ids = random.integers(0, 6, 400)
    experts = np.stack([(ids + layer) % 6 for layer in range(10)], axis=1)[:, :, None]
    found = find_drivers(by_hand(experts.tolist(), 6, token_ids=ids.astype(np.int32)))
    assert found is not None
    assert len(found) == 60
    shown = most_driven(found, per_layer=4, most=20)
    assert len(shown) == 20
    assert {each.layer for each in shown} == set(range(10))
    few = most_driven(found, per_layer=4, most=5)
    assert len(few) == 5
    assert len({each.layer for each in few}) == 5

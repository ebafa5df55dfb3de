"""Repeats and reuse: by hand, by loops, and what chance would give."""

from __future__ import annotations

import math

import numpy as np
import pytest
from routed_samples import by_hand, drawn, without

from hotset.analysis.locality import measure_repeats, measure_reuse
from hotset.trace import Phase
from hotset.trace.summary import repeat_rate


def test_repeats_by_hand() -> None:
    found = measure_repeats(by_hand([[[0, 1]], [[1, 2]], [[0, 1]], [[3, 1]]], 4))
    assert found.lags == (1, 2, 3)
    assert found.overall.tolist() == pytest.approx([3 / 6, 3 / 4, 1 / 2])
    assert found.even == 0.5
    # uses 2, 4, 1, 1 of 4 tokens, and two tokens drawn without putting back
    assert found.popularity == pytest.approx((2 * 1 + 4 * 3) / 3 / 8)
    assert found.request == pytest.approx((2 * 1 + 4 * 3) / 3 / 8)


@pytest.mark.parametrize("seed", range(3))
def test_repeats_as_slowly(seed: int) -> None:
    trace = drawn(seed)
    found = measure_repeats(trace)
    assert found.phase == Phase.DECODE
    for i, lag in enumerate(found.lags):
        assert found.overall[i] == pytest.approx(repeat_rate(trace, lag))
        for layer in range(trace.shape.layers):
            repeated = asked = 0
            for request in range(trace.requests):
                own = np.flatnonzero(trace.request == request)
                for now, before in zip(own[lag:].tolist(), own[:-lag].tolist(), strict=True):
                    past = {e for e in trace.experts[before, layer].tolist() if e >= 0}
                    if trace.phase[now] == Phase.DECODE and past:
                        for expert in trace.experts[now, layer].tolist():
                            asked += expert >= 0
                            repeated += expert in past
            assert found.rate[i, layer] == pytest.approx(repeated / asked)


def test_chance_within_a_request_is_that_of_tokens_in_random_order() -> None:
    trace = drawn(4)
    answers = trace.take(trace.phase == Phase.DECODE)
    expected = measure_repeats(answers).request
    random = np.random.default_rng(0)
    seen = []
    for _ in range(60):
        order = np.concatenate(
            [random.permutation(np.flatnonzero(answers.request == r)) for r in range(answers.requests)]
        )
        mixed = without(answers, experts=answers.experts[order])
        seen.append(measure_repeats(mixed).overall[0])
    assert np.mean(seen) == pytest.approx(expected, rel=0.03)


def test_prompts_alone_are_compared_too() -> None:
    trace = drawn()
    prompts = trace.take(trace.phase == Phase.PREFILL)
    found = measure_repeats(prompts)
    assert found.phase == Phase.PREFILL
    assert 0 < found.overall[0] < 1
    assert measure_reuse(prompts).depth.sum() > 0


def test_chance_of_one_request_is_that_of_all() -> None:
    found = measure_repeats(by_hand([[[0, 1]], [[0, 2]], [[3, 1]]], 4))
    assert found.popularity == pytest.approx(found.request)
    assert found.popularity == pytest.approx((2 + 2) / 2 / 6)  # experts 0 and 1 twice each: by another token of two


def test_one_token_repeats_nothing() -> None:
    found = measure_repeats(by_hand([[[0, 1]]], 4))
    assert found.lags == ()
    assert math.isnan(found.request)
    assert math.isnan(found.popularity)  # not certain, because a token is like itself
    assert measure_reuse(by_hand([[[0, 1]]], 4)).first == 2


def test_reuse_by_hand() -> None:
    found = measure_reuse(by_hand([[[0]], [[0]], [[1]], [[2]], [[0]], [[1]]], 4))
    # Steps since the last use: 1 (expert 0), 3 (expert 0), 3 (expert 1). Bins end at 1, 2, 4, ...
    assert found.steps[:4].tolist() == [1, 0, 2, 0]
    # Others used since: none, 1 and 2, 2 and 0.
    assert found.depth.tolist() == [1, 0, 2, 0]
    assert found.first == 3
    # By chance: expert 0 twice with rate 1/2, expert 1 once with rate 1/3, each with the next step.
    assert found.steps_by_chance[0] == pytest.approx(2 / 2 + 1 / 3)
    assert found.steps_by_chance[1] == pytest.approx(2 / 4 + 2 / 9)
    assert found.steps_by_chance.sum() == pytest.approx(3)


@pytest.mark.parametrize("seed", range(2))
def test_reuse_as_slowly(seed: int) -> None:
    trace = drawn(seed)
    found = measure_reuse(trace)
    bins, depths, first = [0] * len(found.steps), [0] * trace.shape.experts, 0
    for layer in range(trace.shape.layers):
        stack: list[int] = []
        last: dict[int, int] = {}
        step = -1
        for event in trace:
            if event.layer != layer or event.phase != Phase.DECODE:
                continue
            step += 1
            for expert in event.experts:
                if expert in last:
                    bins[math.ceil(math.log2(step - last[expert]))] += 1
                    depths[stack.index(expert)] += 1
                else:
                    first += 1
            for expert in event.experts:  # of one event the highest number is the most recent
                last[expert] = step
                stack = [expert, *(other for other in stack if other != expert)]
    assert found.steps.tolist() == bins
    assert found.depth.tolist() == depths
    assert found.first == first

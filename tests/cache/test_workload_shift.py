"""A change of workload is noticed soon, and hardly ever where there is none."""

from functools import cache

import numpy as np
import pytest

from hotset import reference
from hotset.cache.workload_shift import WorkloadShiftDetector
from hotset.trace import Phase

SPAN = 32


@cache
def token_uses(name):
    """Which experts each decode token of a reference workload used: [tokens, layers, experts]."""
    trace = reference.trace(name)
    chosen = trace.experts[trace.phase == Phase.DECODE]
    uses = np.zeros((len(chosen), trace.shape.layers, trace.shape.experts))
    np.put_along_axis(uses, chosen.astype(np.int64), 1.0, axis=2)
    return uses


def alarms(uses):
    """The tokens after which a shift was noticed, by spans of 32."""
    watch = WorkloadShiftDetector()
    spans = [uses[at : at + SPAN].sum(axis=0) for at in range(0, len(uses) - SPAN + 1, SPAN)]
    return [SPAN * (number + 1) for number, span in enumerate(spans) if watch.take(span)]


def test_it_python_de_gives_two_alarms_and_no_other():
    parts = [token_uses(name)[:512] for name in ("it", "python", "de")]
    found = alarms(np.concatenate(parts))
    assert len(found) == 2
    assert 512 < found[0] <= 512 + 64
    assert 1024 < found[1] <= 1024 + 64


@pytest.mark.parametrize(("before", "after"), [("it", "python"), ("it", "de"), ("de", "python")])
def test_a_shift_is_noticed_within_64_tokens_wherever_in_a_span_it_comes(before, after):
    for extra in range(SPAN):
        at = 384 + extra
        found = alarms(np.concatenate([token_uses(before)[:at], token_uses(after)[:384]]))
        assert any(at < token <= at + 64 for token in found), extra


def test_within_one_workload_there_is_hardly_an_alarm():
    found = {name: alarms(token_uses(name)) for name in reference.DOMAINS}
    assert found["it"] == found["de"] == []
    spans = sum(len(token_uses(name)) // SPAN for name in found)
    assert sum(map(len, found.values())) <= 0.02 * spans


def feed(watch, *spans):
    return [watch.take(np.array([span], float)) for span in spans]


def test_a_constant_workload_never_shifts():
    assert not any(feed(WorkloadShiftDetector(), *[[4, 0, 2, 1]] * 100))


def test_nothing_at_all_never_shifts():
    assert not any(feed(WorkloadShiftDetector(), *[[0, 0, 0, 0]] * 100))


def test_more_of_the_same_is_no_shift():
    assert not any(feed(WorkloadShiftDetector(), *[[4 * n, 0, 2 * n, n] for n in range(1, 50)]))


def test_other_experts_are_a_shift_at_once_and_then_the_baseline():
    watch = WorkloadShiftDetector()
    assert not any(feed(watch, *[[5, 5, 0, 0]] * 8))
    assert feed(watch, *[[0, 0, 5, 5]] * 20) == [True] + [False] * 19
    assert feed(watch, [5, 5, 0, 0]) == [True]


def test_before_there_is_a_baseline_nothing_breaks_with_it():
    watch = WorkloadShiftDetector()
    assert not any(feed(watch, *[[5, 5, 0, 0]] * 4))
    assert feed(watch, [0, 0, 5, 5]) == [False]


def test_a_workload_that_varies_by_nature_needs_more_to_alarm():
    steady, restless = WorkloadShiftDetector(), WorkloadShiftDetector()
    feed(steady, *[[8, 8, 0, 0]] * 16)
    feed(restless, *[[8, 8, 0, 0], [8, 0, 8, 0]] * 8)
    assert feed(steady, [9, 0, 7, 0]) == [True]
    assert feed(restless, [9, 0, 7, 0]) == [False]


def test_the_watch_keeps_no_hold_of_what_it_was_given():
    span = np.array([[5.0, 5.0, 0.0, 0.0]])
    watch, other = WorkloadShiftDetector(), WorkloadShiftDetector()
    for _ in range(8):
        given = span.copy()
        assert watch.take(given) == other.take(span)
        given[...] = 99.0
    assert watch.take(span[:, ::-1]) is other.take(span[:, ::-1]) is True


def test_a_shift_within_a_span_does_not_hide_itself():
    for extra in range(SPAN):
        at = 384 + extra
        found = alarms(np.concatenate([token_uses("python")[:at], token_uses("de")[:384]]))
        assert any(at < token <= at + 64 for token in found), extra

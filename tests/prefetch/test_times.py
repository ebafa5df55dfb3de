"""Times with the misses taken out: the proportion is found, and a small gain is seen that misses would hide."""

from __future__ import annotations

import numpy as np
import pytest

from hotset.prefetch import PrefetchTrial
from hotset.prefetch.times import MissAdjustedTimes, seconds_per_miss

STEP_S, MISS_S = 5e-3, 0.9e-3


def passes(rng: np.random.Generator, count: int) -> list[tuple[float, int]]:
    missed = rng.negative_binomial(4, 0.15, count)
    return [(STEP_S + MISS_S * int(each) + 2e-5 * rng.standard_normal(), int(each)) for each in missed]


def test_what_is_left_does_not_depend_on_the_misses() -> None:
    even, rng = MissAdjustedTimes(), np.random.default_rng(0)
    found = [(even(seconds, missed) or 0.0, seconds) for seconds, missed in passes(rng, 400)][100:]
    left, plain = np.array(found).T
    assert seconds_per_miss(even.state) == pytest.approx(MISS_S, rel=0.05)
    assert left.std() < 0.1 * plain.std()
    assert left.mean() == pytest.approx(plain.mean(), rel=0.1)


def test_nothing_is_taken_out_where_misses_do_not_matter_or_little_is_known() -> None:
    even = MissAdjustedTimes()
    assert [even(1.0, missed) for missed in (3, 9, 4)] == [None, None, None]
    found = [even(1.0, 5) for _ in range(50)]
    assert found[:5] == [None] * 5
    assert found[5:] == [pytest.approx(1.0)] * 45
    alike = MissAdjustedTimes()
    assert [alike(2.0, 0) for _ in range(20)][-1] == 2.0


@pytest.mark.parametrize(("gain", "decision"), [(0.05, "on"), (-0.05, "off")])
def test_a_small_gain_is_seen_in_a_trial(gain: float, decision: str) -> None:
    """Misses move these times by half; without taking them out, 5 % would drown."""
    decided = {True: 0, False: 0}
    for seed in range(12):
        drawn = passes(np.random.default_rng(seed), 90)
        for evened in (True, False):
            payoff, even = PrefetchTrial(2, auto=True), MissAdjustedTimes()
            for number, (seconds, missed) in enumerate(drawn, 1):
                if not payoff.is_control_step(number):
                    seconds *= 1 - gain
                noted = even(seconds, missed) if evened else seconds
                if noted is not None:
                    payoff.note_step(number, noted)
            decided[evened] += payoff.decision == decision
    assert decided[True] >= 11
    assert decided[True] > decided[False] or gain < 0  # whatever is unclear at the end goes off

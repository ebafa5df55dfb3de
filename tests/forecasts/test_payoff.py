"""Whether guesses pay, held against lists of all measurements, and against layers where the answer is known."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from hotset.forecasts._payoff import (
    CONTROL,
    FEW,
    FIRST,
    FRESH,
    PAUSE,
    WITH,
    WITHOUT,
    goes_without,
    most_guesses,
    note_event,
    start_payoff,
)
from hotset.runtime.payoff import Payoff


class SlowPayoff:
    """The same from the words: every measurement is kept, and weighed anew each time."""

    def __init__(self, layers: int, *, auto: bool = True, most: int = 64) -> None:
        self.auto, self.limit = auto, most
        self.most = [min(4, most)] * (layers + 1)  # the last is of whole passes
        self.off_until = [0] * (layers + 1)
        self.stalls: list[tuple[list[float], list[float]]] = [([], []) for _ in range(layers + 1)]

    def goes_without(self, layer: int, number: int) -> bool:
        return self.auto and (number % 16 == 0 or number < self.off_until[layer] or number < self.off_until[-1])

    def guesses(self, layer: int, number: int) -> int:
        return 0 if self.goes_without(layer, number) else self.most[layer]

    def note(self, layer: int, number: int, stall_s: float, in_time: int, late: int) -> None:
        self.stalls[layer][self.goes_without(layer, number)].append(stall_s)
        if late > in_time:
            self.most[layer] = max(1, self.most[layer] - 1)
        elif in_time > 0 and late == 0:
            self.most[layer] = min(self.limit, self.most[layer] + 1)
        if self.auto and number >= self.off_until[layer] and self.loses(layer):
            self.off_until[layer] = number + 256
            self.stalls[layer] = ([], [])

    def note_pass(self, number: int, seconds: float) -> None:
        self.note(-1, number, seconds, 0, 0)

    def loses(self, layer: int) -> bool:
        """Events with guesses stall longer, by more than a standard error of the difference."""
        if min(len(side) for side in self.stalls[layer]) < 6:
            return False
        (with_mean, with_doubt), (without_mean, without_doubt) = map(mean_and_doubt, self.stalls[layer])
        return with_mean > without_mean and (with_mean - without_mean) ** 2 > with_doubt + without_doubt


def mean_and_doubt(values: list[float]) -> tuple[float, float]:
    """The plain mean of up to ten values; of more, each new one weighs a tenth. And the squared error of that mean."""
    weights, rest = [], 1.0
    for count in range(len(values), 0, -1):
        weights.append(rest * max(0.1, 1 / count))
        rest -= weights[-1]
    newest_first = values[::-1]
    mean = sum(w * v for w, v in zip(weights, newest_first, strict=True))
    spread = sum(w * (v - mean) ** 2 for w, v in zip(weights, newest_first, strict=True))
    return mean, spread * max(0.1, 1 / len(values))


class Layer:
    """A layer whose stalls are drawn at random, shorter or longer by `gain` where guesses were sent."""

    def __init__(self, gain_s: float, noise_s: float, seed: int, *, auto: bool = True) -> None:
        self.payoff = Payoff(1, auto=auto, most=8)
        self.random = np.random.default_rng(seed)
        self.gain_s, self.noise_s = gain_s, noise_s
        self.passes_with: list[int] = []

    def run(self, passes: int) -> Layer:
        for number in range(1, passes + 1):
            guessed = self.payoff.most(0, number) > 0
            stall = max(0.0, 1e-3 + self.random.normal(0, self.noise_s) - self.gain_s * guessed)
            if guessed:
                self.passes_with.append(number)
            self.payoff.note(0, number, stall, int(guessed), 0)
        return self


def test_the_constants_are_those_of_the_slow_model():
    assert (CONTROL, FRESH, FEW, PAUSE, FIRST) == (16, 0.1, 6, 256, 4)


@pytest.mark.parametrize("auto", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_it_decides_as_the_slow_model_does(seed: int, auto: bool):
    random = np.random.default_rng(seed)
    layers, most = 3, int(random.integers(1, 12))
    fast, slow = Payoff(layers, auto=auto, most=most), SlowPayoff(layers, auto=auto, most=most)
    for number in range(1, 900):
        seconds = 1e-3 * random.random() + (5e-4 if seed % 2 else -1e-3) * (not slow.goes_without(-1, number))
        for layer in range(layers):
            guesses = slow.guesses(layer, number)
            assert fast.most(layer, number) == guesses
            in_time, late = random.integers(0, 3, 2).tolist() if guesses else (0, 0)
            stall = float(random.gamma(2.0, 1e-3)) + 5e-4 * (layer - 1) * (guesses > 0)
            fast.note(layer, number, stall, in_time, late)
            slow.note(layer, number, stall, in_time, late)
            assert fast.state.off_until.tolist() == slow.off_until
            for kind in (WITH, WITHOUT):
                if slow.stalls[layer][kind]:
                    expected = mean_and_doubt(slow.stalls[layer][kind])[0]
                    assert fast.state.stall_s[kind, layer] == pytest.approx(expected)
        fast.note_pass(number, seconds)
        slow.note_pass(number, seconds)
    assert any(slow.off_until[:-1]) == auto  # or nothing of the decision was tested
    assert (slow.off_until[-1] > 0) == (auto and seed % 2 == 1) == fast.as_dict()["switched_off"]


def test_all_ways_in_agree():
    random = np.random.default_rng(0)
    states = [start_payoff(2, most=6) for _ in range(2)]
    live = Payoff(2, most=6)
    python: Any = note_event.py_func  # type: ignore[attr-defined]
    for number in range(1, 400):
        for layer in range(2):
            asked = [most_guesses(states[0], layer, number), live.most(layer, number)]
            asked.append(most_guesses.py_func(states[1], layer, number))  # type: ignore[attr-defined]
            assert len(set(asked)) == 1
            event = (layer, number, float(random.gamma(2.0, 1e-3)), *random.integers(0, 3, 2).tolist())
            note_event(states[0], *event)
            python(states[1], *event)
            live.note(*event)
    for left, middle, right in zip(states[0], states[1], live.state, strict=True):
        assert np.array_equal(left, right)
        assert np.allclose(left, middle, rtol=1e-12)


def test_one_pass_in_sixteen_goes_without_and_no_other():
    payoff = Payoff(2)
    without = [number for number in range(1, 161) if payoff.most(1, number) == 0]
    assert without == list(range(16, 161, 16))
    assert [number for number in range(1, 161) if goes_without(payoff.state, 0, number)] == without


def test_a_named_forecast_has_no_control_passes():
    payoff = Payoff(1, auto=False)
    assert all(payoff.most(0, number) == 4 for number in range(64))


def test_guesses_grow_while_they_come_in_time_up_to_the_slots():
    payoff, seen = Payoff(1, most=7), []
    for number in range(1, 8):
        seen.append(payoff.most(0, number))
        payoff.note(0, number, 0.0, 2, 0)
    assert seen == [4, 5, 6, 7, 7, 7, 7]


def test_guesses_shrink_while_they_come_late_down_to_one():
    payoff, seen = Payoff(1), []
    for number in range(1, 8):
        seen.append(payoff.most(0, number))
        payoff.note(0, number, 0.0, 1, 2)
    assert seen == [4, 3, 2, 1, 1, 1, 1]


@pytest.mark.parametrize(("in_time", "late"), [(0, 0), (1, 1), (3, 1)])
def test_guesses_stay_as_many_where_the_signs_are_mixed(in_time: int, late: int):
    payoff = Payoff(1)
    payoff.note(0, 1, 0.0, in_time, late)
    assert payoff.most(0, 2) == 4


def test_fewer_slots_than_the_first_guesses_are_all_that_is_sent():
    assert Payoff(1, most=2).most(0, 1) == 2
    assert Payoff(1, most=0).most(0, 1) == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_layer_where_guesses_lose_is_switched_off_and_tried_again(seed: int):
    layer = Layer(gain_s=-0.5e-3, noise_s=0.2e-3, seed=seed).run(1000)
    gaps = [later - earlier for earlier, later in zip(layer.passes_with, layer.passes_with[1:], strict=False)]
    assert PAUSE <= max(gaps) <= PAUSE + 2  # the pass before the pause, and that after it, may be a control pass
    assert sum(gap >= PAUSE for gap in gaps) >= 2
    few = FEW * CONTROL  # as many passes as the first decision takes
    assert len(layer.passes_with) < 4 * few
    assert layer.payoff.as_dict()["layers_switched_off"] == [0]


@pytest.mark.parametrize("seed", range(5))
def test_a_layer_where_guesses_win_stays_on(seed: int):
    layer = Layer(gain_s=0.5e-3, noise_s=0.2e-3, seed=seed).run(3000)
    assert layer.passes_with == [number for number in range(1, 3001) if number % CONTROL]
    found = layer.payoff.as_dict()
    assert found["layers_switched_off"] == []
    assert found["stall_ms_with"][0] < found["stall_ms_without"][0]


def test_nothing_is_switched_off_before_six_control_passes():
    layer = Layer(gain_s=-5e-3, noise_s=1e-6, seed=0).run(FEW * CONTROL + 8)
    assert layer.passes_with == [number for number in range(1, FEW * CONTROL) if number % CONTROL]
    assert layer.payoff.state.off_until[0] == FEW * CONTROL + PAUSE


def test_equal_stalls_are_no_loss():
    layer = Layer(gain_s=0.0, noise_s=0.0, seed=0).run(600)
    assert layer.payoff.as_dict()["layers_switched_off"] == []


@pytest.mark.parametrize("seed", range(3))
def test_without_auto_nothing_is_ever_switched_off(seed: int):
    layer = Layer(gain_s=-2e-3, noise_s=0.2e-3, seed=seed, auto=False).run(600)
    assert layer.passes_with == list(range(1, 601))
    assert layer.payoff.as_dict()["layers_switched_off"] == []
    assert layer.payoff.as_dict()["auto"] is False


def test_whole_passes_that_take_longer_switch_all_layers_off_and_are_tried_again():
    payoff, guessed = Payoff(2), []
    for number in range(1, 800):
        if payoff.most(0, number):
            guessed.append(number)
        assert (payoff.most(0, number) > 0) == (payoff.most(1, number) > 0)
        payoff.note_pass(number, 1e-3 + 1e-5 * (number in guessed) + 1e-7 * (number % 3))
    decided = FEW * CONTROL
    tried = decided + PAUSE + 1  # the first pass after the pause is a control pass
    assert [number for number in guessed if number < 2 * PAUSE][-1] < tried + decided
    assert [number for number in guessed if decided <= number <= tried] == [tried]
    assert payoff.as_dict()["switched_off"]
    assert payoff.as_dict()["layers_switched_off"] == []
    assert payoff.idle == (payoff.state.off_until[-1] > 799)


def test_whole_passes_that_take_no_longer_leave_guesses_on():
    payoff, random = Payoff(1), np.random.default_rng(0)
    for number in range(1, 600):
        payoff.note_pass(number, 1e-3 * random.random() - 1e-3 * (payoff.most(0, number) > 0))
        assert not payoff.idle
    assert not payoff.as_dict()["switched_off"]


def test_layers_are_judged_apart():
    payoff, random = Payoff(3), np.random.default_rng(0)
    for number in range(1, 400):
        for layer, loss in enumerate([0.0, 1e-3, 0.0]):
            guessed = payoff.most(layer, number) > 0
            payoff.note(layer, number, 1e-3 + loss * guessed + 1e-5 * random.random() * (not guessed), 0, 0)
    assert payoff.as_dict()["layers_switched_off"] == [1]


def test_asking_changes_nothing():
    payoff = Payoff(2)
    payoff.note(0, 1, 1e-3, 1, 0)
    before = copy.deepcopy(payoff.state)
    for number in range(40):
        payoff.most(1, number)
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(before, payoff.state, strict=True))

"""Whether predictions pay, held against lists of all measurements, and against passes where the answer is known."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from hotset.prefetch import PrefetchTrial
from hotset.prefetch.trial import (
    CONTROL_EVERY,
    FIRST_BUDGET,
    GAIN,
    LIKELY,
    LOSS,
    MAX_COMPARISONS,
    MAX_PAUSE_STEPS,
    MIN_COMPARISONS,
    MIN_WEIGHT,
    PAUSE_STEPS,
    WITH,
    WITHOUT,
    budget_of,
    hashed,
    is_control_step,
    note_event,
    note_step,
    start_trial,
)


class SlowTrial:
    """The same from the words: every measurement and comparison is kept, and weighed anew each time."""

    def __init__(self, layers: int, *, auto: bool = True, most: int = 64) -> None:
        rows = layers + 1  # the last is of whole passes
        self.auto, self.limit, self.on_trial = auto, most, True
        self.most = [min(4, most)] * rows
        self.off_until, self.pauses = [0] * rows, [256] * rows
        self.measured: list[tuple[list[float], list[float]]] = [([], []) for _ in range(rows)]
        self.block: list[tuple[int, list[float], list[float]]] = [(-1, [], []) for _ in range(rows)]
        self.savings: list[list[float]] = [[] for _ in range(rows)]
        self.margin = np.inf  # of the closest decision: at a tie the last digit decides

    def is_off(self, row: int, number: int) -> bool:
        return number < self.off_until[row] or number < self.off_until[-1]

    def is_control_step(self, row: int, number: int) -> bool:
        control = number % self.length == hashed(number // self.length) % self.length
        return self.auto and (control or self.is_off(row, number))

    @property
    def length(self) -> int:
        return 2 if self.on_trial else 16

    def predictions(self, layer: int, number: int) -> int:
        return 0 if self.is_control_step(layer, number) else self.most[layer]

    def note_event(self, layer: int, number: int, stall_s: float, in_time: int, late: int) -> None:
        if late > in_time:
            self.most[layer] = max(1, self.most[layer] - 1)
        elif in_time > 0 and late == 0:
            self.most[layer] = min(self.limit, self.most[layer] + 1)
        self.measure(layer, number, stall_s)
        if self.auto and self.evidence(layer) < -2:
            self.switch_off(layer, number)

    def note_step(self, number: int, seconds: float) -> None:
        self.measure(-1, number, seconds)
        evidence, long_enough = self.evidence(-1), len(self.savings[-1]) >= 32
        if not self.auto:
            return
        if evidence < -2 or (self.on_trial and long_enough and evidence < 1):
            self.switch_off(-1, number)
            self.on_trial = True
            self.block = [(-1, [], [])] * len(self.block)
        elif self.on_trial and (evidence > 2.5 or long_enough):
            self.on_trial, self.pauses[-1] = False, 256
            self.block = [(-1, [], [])] * len(self.block)

    def measure(self, row: int, number: int, seconds: float) -> None:
        if self.is_off(row, number):
            return
        without = self.is_control_step(row, number)
        self.measured[row][without].append(seconds)
        if number // self.length != self.block[row][0]:
            _, with_s, without_s = self.block[row]
            if with_s and without_s:
                self.savings[row].append(float(np.mean(without_s) - np.mean(with_s)))
            self.block[row] = (number // self.length, [], [])
        self.block[row][1 + without].append(seconds)

    def evidence(self, row: int) -> float:
        if len(self.savings[row]) < 8:
            return 0.0
        mean, doubt = mean_and_doubt(self.savings[row])
        evidence = mean / max(doubt, 1e-12)
        self.margin = min(self.margin, *(abs(evidence - limit) for limit in (-LOSS, LIKELY, GAIN)))
        return evidence

    def switch_off(self, row: int, number: int) -> None:
        self.off_until[row] = number + 1 + self.pauses[row]
        self.pauses[row] = min(2 * self.pauses[row], 4096)
        self.measured[row], self.block[row], self.savings[row] = ([], []), (-1, [], []), []


def mean_and_doubt(values: list[float]) -> tuple[float, float]:
    """The plain mean of up to 16 values; of more, each new one weighs a 16th. And the standard error of that mean."""
    weights, rest = [], 1.0
    for count in range(len(values), 0, -1):
        weights.append(rest * max(1 / 16, 1 / count))
        rest -= weights[-1]
    weighed, newest_first = np.array(weights), np.array(values[::-1])
    mean = float(weighed @ newest_first)
    spread = float(weighed @ (newest_first - mean) ** 2)
    return mean, float(np.sqrt(spread * max(1 / 16, 1 / len(values))))


class Run:
    """Passes of a millisecond that `gain` shortens where predictions were sent, measured with noise."""

    def __init__(self, gain: float, noise: float, seed: int, *, auto: bool = True, growth: float = 0.0) -> None:
        self.payoff = PrefetchTrial(1, auto=auto, most=8)
        self.random = np.random.default_rng(seed)
        self.gain, self.noise, self.growth = gain, noise, growth
        self.passes_with: list[int] = []
        self.first_on: int | None = None
        self.taken_s = self.plain_s = 0.0

    def run(self, passes: int) -> Run:
        for number in range(1, passes + 1):
            predicted = self.payoff.most(0, number) > 0
            if predicted:
                self.passes_with.append(number)
            plain_s = 1e-3 * (1 + self.growth) ** number
            self.plain_s += plain_s
            self.taken_s += plain_s * (1 - self.gain * predicted)
            self.payoff.note_step(number, plain_s * (1 - self.gain * predicted + self.noise * self.random.normal()))
            if self.first_on is None and self.payoff.decision == "on":
                self.first_on = number
        return self

    @property
    def cost(self) -> float:
        """How much longer all passes took than without any prediction."""
        return self.taken_s / self.plain_s - 1

    def pauses(self) -> list[int]:
        """Stretches without predictions that are longer than between control passes."""
        gaps = np.diff(self.passes_with) - 1
        return [int(gap) for gap in gaps if gap > 32]


def test_the_constants_are_those_of_the_slow_model() -> None:
    assert (CONTROL_EVERY, MIN_COMPARISONS, MAX_COMPARISONS, MIN_WEIGHT) == (16, 8, 32, 1 / 16)
    assert (GAIN, LOSS, LIKELY) == (2.5, 2.0, 1.0)
    assert (PAUSE_STEPS, MAX_PAUSE_STEPS, FIRST_BUDGET) == (256, 4096, 4)


@pytest.mark.parametrize("auto", [True, False])
@pytest.mark.parametrize(("seed", "gain_s"), [(0, -3e-4), (1, -5e-5), (2, 0.0), (3, 3e-4), (4, 1e-4)])
def test_it_decides_as_the_slow_model_does(seed: int, gain_s: float, auto: bool) -> None:
    random = np.random.default_rng(seed)
    layers, most = 3, int(random.integers(1, 12))
    fast, slow = PrefetchTrial(layers, auto=auto, most=most), SlowTrial(layers, auto=auto, most=most)
    was_on = was_off = 0
    for number in range(1, 900):
        seconds = 1e-3 * (1 + random.random()) - gain_s * (not slow.is_control_step(-1, number))
        for layer in range(layers):
            predictions = slow.predictions(layer, number)
            assert fast.most(layer, number) == predictions
            in_time, late = random.integers(0, 3, 2).tolist() if predictions else (0, 0)
            stall = float(random.gamma(2.0, 1e-3)) + 1e-3 * (layer - 1) * (predictions > 0)
            fast.note_event(layer, number, stall, in_time, late)
            slow.note_event(layer, number, stall, in_time, late)
            for kind in (WITH, WITHOUT):
                if slow.measured[layer][kind]:
                    expected = mean_and_doubt(slow.measured[layer][kind])[0]
                    assert fast.state.mean_s[kind, layer] == pytest.approx(expected)
        fast.note_step(number, seconds)
        slow.note_step(number, seconds)
        assert fast.state.off_until.tolist() == slow.off_until
        assert fast.state.pause.tolist() == slow.pauses
        assert (fast.state.stage[0] == 0) == slow.on_trial
        if slow.savings[-1]:
            assert fast.state.saved_s[-1] == pytest.approx(mean_and_doubt(slow.savings[-1])[0], abs=1e-12)
        was_on, was_off = was_on + (not slow.on_trial), was_off + slow.is_off(-1, number)
    if gain_s == 3e-4:  # or nothing of the decision was tested
        assert (was_on > 0) == auto
    if gain_s == -3e-4:
        assert (was_off > 0) == auto


def test_all_ways_in_agree() -> None:
    random = np.random.default_rng(0)
    states = [start_trial(2, most=6) for _ in range(2)]
    live = PrefetchTrial(2, most=6)
    python: Any = note_event.py_func  # type: ignore[attr-defined]
    python_pass: Any = note_step.py_func  # type: ignore[attr-defined]
    for number in range(1, 400):
        for layer in range(2):
            asked = [budget_of(states[0], layer, number), live.most(layer, number)]
            asked.append(budget_of.py_func(states[1], layer, number))  # type: ignore[attr-defined]
            assert len(set(asked)) == 1
            event = (layer, number, float(random.gamma(2.0, 1e-3)), *random.integers(0, 3, 2).tolist())
            note_event(states[0], *event)
            python(states[1], *event)
            live.note_event(*event)
        seconds = float(random.gamma(2.0, 1e-3))
        note_step(states[0], number, seconds)
        python_pass(states[1], number, seconds)
        live.note_step(number, seconds)
    for left, middle, right in zip(states[0], states[1], live.state, strict=True):
        assert np.array_equal(left, right)
        assert np.allclose(left, middle, rtol=1e-9)


def test_of_two_passes_of_a_trial_one_goes_without_and_of_sixteen_where_predictions_are_on() -> None:
    payoff = PrefetchTrial(2)
    for stage, length in ((0, 2), (1, 16)):
        payoff.state.stage[0] = stage
        without = [number for number in range(1600) if payoff.most(1, number) == 0]
        assert [number // length for number in without] == list(range(1600 // length))
        assert [number for number in range(1600) if is_control_step(payoff.state, 0, number)] == without
        places = np.bincount([number % length for number in without], minlength=length)
        assert places.min() > 0.3 * places.mean()  # each place in a block is drawn about as often


@pytest.mark.parametrize("turns", [2, 3, 4, 8, 16])
def test_users_who_take_turns_go_without_about_as_often(turns: int) -> None:
    for length in (2, 16):
        without = [block * length + hashed(block) % length for block in range(4000)]
        share = np.bincount(np.array(without) % turns, minlength=turns) / len(without)
        assert np.abs(share * turns - 1).max() < 0.2


@pytest.mark.parametrize("seed", range(3))
def test_a_forecast_asked_for_by_name_never_pauses(seed: int) -> None:
    run = Run(gain=-2.0, noise=0.1, seed=seed, auto=False).run(600)
    for number in range(600):
        run.payoff.note_event(0, number, 1e-3 * run.random.random(), 0, 0)
    assert run.passes_with == list(range(1, 601))
    assert not run.payoff.state.off_until.any()
    assert run.payoff.decision == "forced"


def test_predictions_grow_while_they_come_in_time_up_to_the_slots() -> None:
    payoff, seen = PrefetchTrial(1, most=7, auto=False), []
    for number in range(1, 8):
        seen.append(payoff.most(0, number))
        payoff.note_event(0, number, 0.0, 2, 0)
    assert seen == [4, 5, 6, 7, 7, 7, 7]


def test_predictions_shrink_while_they_come_late_down_to_one() -> None:
    payoff, seen = PrefetchTrial(1, auto=False), []
    for number in range(1, 8):
        seen.append(payoff.most(0, number))
        payoff.note_event(0, number, 0.0, 1, 2)
    assert seen == [4, 3, 2, 1, 1, 1, 1]


@pytest.mark.parametrize(("in_time", "late"), [(0, 0), (1, 1), (3, 1)])
def test_predictions_stay_as_many_where_the_signs_are_mixed(in_time: int, late: int) -> None:
    payoff = PrefetchTrial(1)
    payoff.note_event(0, 1, 0.0, in_time, late)
    assert payoff.most(0, 3) == 4


def test_fewer_slots_than_the_first_predictions_are_all_that_is_sent() -> None:
    assert max(PrefetchTrial(1, most=2).most(0, number) for number in range(8)) == 2
    assert max(PrefetchTrial(1, most=0).most(0, number) for number in range(8)) == 0


@pytest.mark.parametrize(("gain", "noise"), [(0.0, 0.0), (-0.15, 0.0), (-0.15, 0.1), (-0.5, 0.1)])
def test_nothing_is_ever_on_without_a_gain(gain: float, noise: float) -> None:
    run = Run(gain, noise, seed=0).run(1500)
    assert run.first_on is None
    assert run.payoff.decision in ("off", "trial")


@pytest.mark.parametrize("seed", range(8))
def test_it_is_on_only_once_a_gain_is_shown(seed: int) -> None:
    """Up to 16 pairs of passes, all weigh the same: it is on once a pair's mean is beyond two errors and a half."""
    payoff, random = PrefetchTrial(1), np.random.default_rng(seed)
    seconds = 1e-3 * (1 + 0.2 * random.normal(size=34))
    predicted = np.array([payoff.most(0, number) > 0 for number in range(2, 36)])
    seconds -= 2e-4 * predicted
    pairs = np.where(predicted, -1, 1)[:32] * seconds[:32]
    savings = pairs[::2] + pairs[1::2]
    errors = [savings[:n].std() / np.sqrt(n) for n in range(1, 17)]
    shown = [n for n in range(MIN_COMPARISONS, 17) if savings[:n].mean() > 2.5 * errors[n - 1]]
    on = []
    for number, taken in enumerate(seconds.tolist(), 2):
        payoff.note_step(number, taken)
        if payoff.decision == "on":
            on.append(number)
            break
    assert on == [2 + 2 * n for n in shown[:1]]  # known as soon as the next pair begins


@pytest.mark.parametrize("seed", range(10))
def test_a_clear_gain_is_on_within_32_passes_and_stays(seed: int) -> None:
    run = Run(gain=0.2, noise=0.1, seed=seed).run(2000)
    assert run.first_on is not None
    assert 2 * MIN_COMPARISONS <= run.first_on <= 34
    assert len(run.passes_with) >= 0.9 * 2000
    assert run.payoff.decision == "on"


def test_a_gain_of_half_the_noise_is_found_by_most() -> None:
    runs = [Run(gain=0.1, noise=0.2, seed=seed).run(2000) for seed in range(20)]
    shares = [len(run.passes_with) / 2000 for run in runs]
    assert np.mean([share >= 0.9 for share in shares]) >= 0.6
    assert np.mean(shares) >= 0.75


def test_a_gain_is_on_for_all_but_control_passes() -> None:
    run = Run(gain=0.3, noise=0.05, seed=0).run(1000)
    assert run.first_on is not None
    assert run.first_on <= 2 * MIN_COMPARISONS + 2
    after = [number for number in run.passes_with if number >= 2 * CONTROL_EVERY]
    without = [number for number in range(2 * CONTROL_EVERY, 1001) if number not in after]
    assert [number // CONTROL_EVERY for number in without] == list(range(2, 2 + len(without)))


@pytest.mark.parametrize("loss", [0.02, 0.05, 0.15])
@pytest.mark.parametrize("seed", range(10))
def test_a_loss_costs_little(seed: int, loss: float) -> None:
    run = Run(gain=-loss, noise=0.1, seed=seed).run(1000)
    assert run.cost < 0.02
    assert run.payoff.decision == "off" or loss == 0.02


@pytest.mark.parametrize("seed", range(5))
def test_steep_growth_is_no_gain(seed: int) -> None:
    """Passes that take 1 % longer each time: steps without prefetch must not always come last."""
    run = Run(gain=-0.05, noise=0.02, seed=seed, growth=0.01).run(400)
    assert run.cost < 0.02


@pytest.mark.parametrize("seed", range(3))
def test_pauses_double_up_to_the_longest(seed: int) -> None:
    pauses = Run(gain=-0.3, noise=0.05, seed=seed).run(20_000).pauses()
    expected = [256, 512, 1024, 2048, 4096, 4096, 4096]
    assert len(pauses) >= 6
    # The passes before a pause, and those after it, may be control passes.
    assert all(0 <= found - wanted <= 4 for found, wanted in zip(pauses, expected, strict=False))


@pytest.mark.parametrize("growth", [1e-3, -1e-3])
@pytest.mark.parametrize("seed", range(5))
def test_passes_that_grow_longer_do_not_fool_it(seed: int, growth: float) -> None:
    loss = Run(gain=-0.05, noise=0.02, seed=seed, growth=growth).run(1000)
    assert loss.first_on is None
    assert loss.cost < 0.02
    gain = Run(gain=0.05, noise=0.02, seed=seed, growth=growth).run(1000)
    assert gain.first_on is not None
    assert gain.first_on <= 32
    assert len(gain.passes_with) >= 0.9 * 1000


def test_what_was_a_gain_and_becomes_a_loss_is_switched_off() -> None:
    run = Run(gain=0.2, noise=0.05, seed=0).run(300)
    assert run.payoff.decision == "on"
    payoff = run.payoff
    for number in range(301, 301 + 40 * CONTROL_EVERY):
        payoff.note_step(number, 1e-3 * (1 + 0.2 * (payoff.most(0, number) > 0) + 0.05 * run.random.normal()))
        if payoff.decision == "off":
            break
    assert payoff.decision == "off"


@pytest.mark.parametrize("seed", range(3))
def test_a_layer_where_predictions_lose_is_switched_off_alone_and_tried_again(seed: int) -> None:
    payoff, random = PrefetchTrial(3), np.random.default_rng(seed)
    payoff.state.stage[0] = 1
    tried = []
    for number in range(1, 1200):
        for layer, loss in enumerate([0.0, 1e-3, -1e-4]):
            predicted = payoff.most(layer, number) > 0
            tried += [number] * (predicted and layer == 1)
            payoff.note_event(layer, number, 1e-3 + loss * predicted + 1e-5 * random.random() * (layer == 1), 0, 0)
    gaps = np.diff(tried)
    assert gaps[gaps > 100].tolist() == pytest.approx([PAUSE_STEPS, 2 * PAUSE_STEPS], abs=3)
    assert tried[int(np.argmax(gaps > 100))] == pytest.approx(MIN_COMPARISONS * CONTROL_EVERY, abs=1)
    assert payoff.most(0, 1201) > 0
    assert payoff.most(2, 1201) > 0
    assert (payoff.state.off_until[[0, 2, 3]] == 0).all()


def test_whole_passes_switch_all_layers_off() -> None:
    payoff = PrefetchTrial(2)
    for number in range(1, 200):
        assert (payoff.most(0, number) > 0) == (payoff.most(1, number) > 0)
        payoff.note_step(number, 1e-3 * (1 + 0.1 * (payoff.most(0, number) > 0)) + 1e-7 * (number % 3))
    assert payoff.decision == "off"
    assert payoff.as_dict()["layers_switched_off"] == []
    assert all(payoff.most(layer, 200) == 0 for layer in range(2))


def test_what_happens_in_a_pause_teaches_nothing() -> None:
    run = Run(gain=-0.3, noise=0.05, seed=0).run(40)
    assert run.payoff.decision == "off"
    before = copy.deepcopy(run.payoff.state)
    for number in range(41, 100):
        run.payoff.note_event(0, number, 1.0, 0, 0)
        run.payoff.note_step(number, 1.0)
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(before, run.payoff.state, strict=True))


def test_asking_changes_nothing() -> None:
    payoff = PrefetchTrial(2)
    payoff.note_event(0, 1, 1e-3, 1, 0)
    before = copy.deepcopy(payoff.state)
    for number in range(40):
        payoff.most(1, number)
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(before, payoff.state, strict=True))

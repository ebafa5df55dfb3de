"""Whether prefetch pays: steps with it are compared with control steps without it, and it is on only where it wins.

It begins with a trial: of every two decode steps one is a control step. Only a gain that is shown switches prefetch on;
then one step in 16 is a control step, and a loss that is shown switches prefetch off again, for whole steps or for one
layer. What was switched off is tried again after a pause, which doubles each time. A control step is compared with the
others of its two, or 16: texts grow and machines slow down, and neighbours share that. Which of them is the control
step is a hash of the block's number, or users who take turns would always have it at the same turn.

Compiled functions on arrays, so that the simulator and the engine decide alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hotset.policies.base import compiled, entry_of

CONTROL_EVERY = 16
"""One decode step in so many goes without prefetch, to compare with."""
MIN_COMPARISONS, MAX_COMPARISONS = 8, 32  # comparisons before anything is decided, and after which a trial ends
MIN_WEIGHT = 1.0 / 16  # the least weight of the newest comparison
GAIN, LOSS, LIKELY = 2.5, 2.0, 1.0  # standard errors that show a gain, a loss, and enough gain at a trial's end
PAUSE_STEPS, MAX_PAUSE_STEPS = 256, 4096
FIRST_BUDGET = 4  # experts of a layer to prefetch at a time, to begin with
WITH, WITHOUT = 0, 1
TRIAL, ON = 0, 1
AUTO, MAX_BUDGET, ADAPTIVE, BY_LAYER = range(4)
"""Options: whether to decide at all, the largest budget, whether budgets move, and whether layers are judged alone."""


class TrialState(NamedTuple):
    """What is known of each layer's stalls, and in a last row of whole steps: prefetch itself takes time."""

    budget: Any  # int64 [layers + 1], experts to prefetch at a time
    mean_s: Any  # float64 [2, layers + 1], with prefetch and without, lately
    seen: Any  # int64 [2, layers + 1]
    block: Any  # int64 [layers + 1], the steps that are being compared: their number over the length of a block
    sums: Any  # float64 [2, layers + 1], of this block's measurements
    counts: Any  # int64 [2, layers + 1]
    saved_s: Any  # float64 [layers + 1], what prefetch saves: the mean of all comparisons, lately
    spread: Any  # float64 [layers + 1], squared deviations from it
    compared: Any  # int64 [layers + 1]
    off_until: Any  # int64 [layers + 1], the step from which prefetch is on again
    pause: Any  # int64 [layers + 1]
    stage: Any  # int64 [1]
    options: Any  # int64 [4]: see AUTO, MAX_BUDGET, ADAPTIVE, BY_LAYER


def start_trial(
    layers: int, *, auto: bool = True, most: int = 64, adaptive: bool = True, by_layer: bool = True
) -> TrialState:
    """Nothing is known yet."""
    rows = layers + 1
    return TrialState(
        budget=np.full(rows, min(FIRST_BUDGET, most) if adaptive else most),
        mean_s=np.zeros((2, rows)),
        seen=np.zeros((2, rows), np.int64),
        block=np.full(rows, -1),
        sums=np.zeros((2, rows)),
        counts=np.zeros((2, rows), np.int64),
        saved_s=np.zeros(rows),
        spread=np.zeros(rows),
        compared=np.zeros(rows, np.int64),
        off_until=np.zeros(rows, np.int64),
        pause=np.full(rows, PAUSE_STEPS),
        stage=np.array([TRIAL]),
        options=np.array([int(auto), most, int(adaptive), int(by_layer)]),
    )


@compiled
def is_off(trial: TrialState, layer: int, number: int) -> bool:
    """Whether a layer, or all of them, is switched off in the step of this number."""
    return bool(max(trial.off_until[layer], trial.off_until[-1]) > number)


@compiled
def is_control_step(trial: TrialState, layer: int, number: int) -> bool:
    """Whether nothing is prefetched for a layer in the step of this number."""
    if not trial.options[AUTO]:
        return False
    every = _block_length(trial)
    return bool(number % every == hashed(number // every) % every or is_off(trial, layer, number))


@compiled
def _block_length(trial: TrialState) -> int:
    return 2 if trial.stage[0] == TRIAL else CONTROL_EVERY


@compiled
def hashed(block: int) -> int:
    """A pseudo-random number, always the same for a block; small enough that a square of it is exact."""
    number = (block * 7919 + 104729) % 65521
    return int((number * number + 31 * block) % 65521 // 16)


@compiled
def budget_of(trial: TrialState, layer: int, number: int) -> int:
    """How many experts of a layer to prefetch in the step of this number."""
    return 0 if is_control_step(trial, layer, number) else trial.budget[layer]


@compiled
def note_event(trial: TrialState, layer: int, number: int, stall_s: float, in_time: int, late: int) -> None:
    """Take in how an event went: how long it stalled, and what of its prefetched experts came in time or late."""
    if not trial.options[ADAPTIVE]:
        pass
    elif late > in_time:
        trial.budget[layer] = max(1, trial.budget[layer] - 1)
    elif in_time and not late:
        trial.budget[layer] = min(trial.options[MAX_BUDGET], trial.budget[layer] + 1)
    if not trial.options[BY_LAYER]:
        return
    _measure(trial, layer, number, stall_s)
    if trial.options[AUTO] and _evidence(trial, layer) < -LOSS:
        _switch_off(trial, layer, number)


@compiled
def note_step(trial: TrialState, number: int, seconds: float) -> None:
    """Take in how long a whole decode step took, and decide."""
    last = len(trial.budget) - 1
    _measure(trial, last, number, seconds)
    if not trial.options[AUTO]:
        return
    evidence = _evidence(trial, last)
    trial_is_over = trial.stage[0] == TRIAL and trial.compared[last] >= MAX_COMPARISONS
    if evidence < -LOSS or (trial_is_over and evidence < LIKELY):
        _switch_off(trial, last, number)
        trial.stage[0] = TRIAL
        trial.block[:] = -1
    elif trial.stage[0] == TRIAL and (evidence > GAIN or trial_is_over):
        trial.stage[0] = ON
        trial.pause[last] = PAUSE_STEPS
        trial.block[:] = -1  # blocks have another length now


@compiled
def _measure(trial: TrialState, layer: int, number: int, seconds: float) -> None:
    """Keep a measurement, and compare a block once the next begins; what is switched off teaches nothing."""
    if is_off(trial, layer, number):
        return
    if number // _block_length(trial) != trial.block[layer]:
        _end_block(trial, layer)
        trial.block[layer] = number // _block_length(trial)
    kind = WITHOUT if is_control_step(trial, layer, number) else WITH
    trial.seen[kind, layer] += 1
    off = seconds - trial.mean_s[kind, layer]
    trial.mean_s[kind, layer] += off * max(MIN_WEIGHT, 1.0 / trial.seen[kind, layer])
    trial.sums[kind, layer] += seconds
    trial.counts[kind, layer] += 1


@compiled
def _end_block(trial: TrialState, layer: int) -> None:
    """Compare what a block holds, if it holds both kinds and was not cut short by another stage, and begin anew."""
    with_count, without_count = trial.counts[WITH, layer], trial.counts[WITHOUT, layer]
    if trial.block[layer] >= 0 and with_count > 0 and without_count > 0:
        mean_s = trial.sums[WITH, layer] / with_count
        _compare(trial, layer, trial.sums[WITHOUT, layer] / without_count - mean_s)
    for kind in range(2):
        trial.sums[kind, layer] = 0.0
        trial.counts[kind, layer] = 0


@compiled
def _compare(trial: TrialState, layer: int, saved_s: float) -> None:
    trial.compared[layer] += 1
    fresh = max(MIN_WEIGHT, 1.0 / trial.compared[layer])
    off = saved_s - trial.saved_s[layer]
    trial.saved_s[layer] += fresh * off
    trial.spread[layer] = (1.0 - fresh) * (trial.spread[layer] + fresh * off * off)


@compiled
def _evidence(trial: TrialState, layer: int) -> float:
    """How many standard errors the saving is away from nothing; few comparisons count as nothing."""
    compared = trial.compared[layer]
    if compared < MIN_COMPARISONS:
        return 0.0
    error = np.sqrt(trial.spread[layer] * max(MIN_WEIGHT, 1.0 / compared))
    return float(trial.saved_s[layer] / max(error, 1e-12))


@compiled
def _switch_off(trial: TrialState, layer: int, number: int) -> None:
    """Switch prefetch off for a while; the evidence stays to be looked at, and what comes after begins anew."""
    trial.off_until[layer] = number + 1 + trial.pause[layer]
    trial.pause[layer] = min(2 * trial.pause[layer], MAX_PAUSE_STEPS)
    trial.compared[layer] = trial.seen[WITH, layer] = trial.seen[WITHOUT, layer] = 0
    trial.block[layer] = -1


note_step_now, is_control_step_now = entry_of(note_step), entry_of(is_control_step)
budget_now, note_event_now = entry_of(budget_of), entry_of(note_event)

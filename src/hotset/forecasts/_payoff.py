"""Whether fetching ahead pays: passes with guesses are compared with passes without, and whoever loses goes without.

It begins with a trial: of every two decode passes one goes without guesses. Only a gain that is shown switches them on;
then one pass in 16 still goes without, and a loss that is shown switches them off again, for whole passes or for one
layer. What was switched off is tried again after a pause, which doubles each time. A pass without guesses is compared
with the others of its two, or 16: texts grow and machines slow down, and neighbours share that. Which of them goes
without is drawn anew each time, or users who take turns would always go without at the same turn.

Compiled functions on arrays, so that the simulator and the engine decide alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hotset.policies.base import compiled, compiled_entry

LEAST_CHANCE = 0.3
"""Below this a guess is wrong too often to be worth the link, even where it delays nobody."""
CONTROL = 16
"""One decode pass in so many goes without guesses, to compare with."""
FEW, MANY = 8, 32  # comparisons before anything is decided, and after which a trial ends
FRESH = 1.0 / 16  # the least weight of the newest comparison
GAIN, LOSS, LIKELY = 2.5, 2.0, 1.0  # standard errors that show a gain, a loss, and enough gain at a trial's end
PAUSE, LONGEST_PAUSE = 256, 4096  # passes
FIRST = 4  # guesses per layer to begin with
WITH, WITHOUT = 0, 1
TRIAL, ON = 0, 1


class PayoffState(NamedTuple):
    """What is known of each layer's stalls, and in a last row of whole passes: guessing itself takes time."""

    most: Any  # int64 [layers + 1], guesses to send at a time
    mean_s: Any  # float64 [2, layers + 1], with guesses and without, lately
    seen: Any  # int64 [2, layers + 1]
    block: Any  # int64 [layers + 1], the passes that are being compared: their number over the length of a block
    sums: Any  # float64 [2, layers + 1], of this block's measurements
    counts: Any  # int64 [2, layers + 1]
    saved_s: Any  # float64 [layers + 1], what guesses save: the mean of all comparisons, lately
    spread: Any  # float64 [layers + 1], squared deviations from it
    compared: Any  # int64 [layers + 1]
    off_until: Any  # int64 [layers + 1], the pass from which guesses are sent again
    pause: Any  # int64 [layers + 1]
    stage: Any  # int64 [1]
    options: Any  # int64 [2]: whether to decide at all, the most guesses ever


def start_payoff(layers: int, *, auto: bool = True, most: int = 64) -> PayoffState:
    """Nothing is known yet."""
    rows = layers + 1
    return PayoffState(
        most=np.full(rows, min(FIRST, most)),
        mean_s=np.zeros((2, rows)),
        seen=np.zeros((2, rows), np.int64),
        block=np.full(rows, -1),
        sums=np.zeros((2, rows)),
        counts=np.zeros((2, rows), np.int64),
        saved_s=np.zeros(rows),
        spread=np.zeros(rows),
        compared=np.zeros(rows, np.int64),
        off_until=np.zeros(rows, np.int64),
        pause=np.full(rows, PAUSE),
        stage=np.array([TRIAL]),
        options=np.array([int(auto), most]),
    )


@compiled
def is_off(payoff: PayoffState, layer: int, number: int) -> bool:
    """Whether a layer, or all of them, is switched off in the pass of this number."""
    return bool(max(payoff.off_until[layer], payoff.off_until[-1]) > number)


@compiled
def goes_without(payoff: PayoffState, layer: int, number: int) -> bool:
    """Whether nothing is guessed for a layer in the pass of this number."""
    if not payoff.options[0]:
        return False
    every = _block_length(payoff)
    return bool(number % every == drawn(number // every) % every or is_off(payoff, layer, number))


@compiled
def _block_length(payoff: PayoffState) -> int:
    return 2 if payoff.stage[0] == TRIAL else CONTROL


@compiled
def drawn(block: int) -> int:
    """A number that looks drawn, always the same for a block; small enough that a square of it is exact."""
    number = (block * 7919 + 104729) % 65521
    return int((number * number + 31 * block) % 65521 // 16)


@compiled
def most_guesses(payoff: PayoffState, layer: int, number: int) -> int:
    """How many experts of a layer to send for in the pass of this number."""
    return 0 if goes_without(payoff, layer, number) else payoff.most[layer]


@compiled
def note_event(payoff: PayoffState, layer: int, number: int, stall_s: float, in_time: int, late: int) -> None:
    """Take in how an event went: how long it stalled, and what of its guesses came in time or late."""
    if late > in_time:
        payoff.most[layer] = max(1, payoff.most[layer] - 1)
    elif in_time and not late:
        payoff.most[layer] = min(payoff.options[1], payoff.most[layer] + 1)
    _measure(payoff, layer, number, stall_s)
    if payoff.options[0] and _evidence(payoff, layer) < -LOSS:
        _switch_off(payoff, layer, number)


@compiled
def note_pass(payoff: PayoffState, number: int, seconds: float) -> None:
    """Take in how long a whole decode pass took, and decide."""
    last = len(payoff.most) - 1
    _measure(payoff, last, number, seconds)
    if not payoff.options[0]:
        return
    evidence = _evidence(payoff, last)
    trial_is_over = payoff.stage[0] == TRIAL and payoff.compared[last] >= MANY
    if evidence < -LOSS or (trial_is_over and evidence < LIKELY):
        _switch_off(payoff, last, number)
        payoff.stage[0] = TRIAL
        payoff.block[:] = -1
    elif payoff.stage[0] == TRIAL and (evidence > GAIN or trial_is_over):
        payoff.stage[0] = ON
        payoff.pause[last] = PAUSE
        payoff.block[:] = -1  # blocks have another length now


@compiled
def _measure(payoff: PayoffState, layer: int, number: int, seconds: float) -> None:
    """Keep a measurement, and compare a block once the next begins; what is switched off teaches nothing."""
    if is_off(payoff, layer, number):
        return
    if number // _block_length(payoff) != payoff.block[layer]:
        _end_block(payoff, layer)
        payoff.block[layer] = number // _block_length(payoff)
    kind = WITHOUT if goes_without(payoff, layer, number) else WITH
    payoff.seen[kind, layer] += 1
    off = seconds - payoff.mean_s[kind, layer]
    payoff.mean_s[kind, layer] += off * max(FRESH, 1.0 / payoff.seen[kind, layer])
    payoff.sums[kind, layer] += seconds
    payoff.counts[kind, layer] += 1


@compiled
def _end_block(payoff: PayoffState, layer: int) -> None:
    """Compare what a block holds, if it holds both kinds and was not cut short by another stage, and begin anew."""
    with_count, without_count = payoff.counts[WITH, layer], payoff.counts[WITHOUT, layer]
    if payoff.block[layer] >= 0 and with_count > 0 and without_count > 0:
        mean_s = payoff.sums[WITH, layer] / with_count
        _compare(payoff, layer, payoff.sums[WITHOUT, layer] / without_count - mean_s)
    for kind in range(2):
        payoff.sums[kind, layer] = 0.0
        payoff.counts[kind, layer] = 0


@compiled
def _compare(payoff: PayoffState, layer: int, saved_s: float) -> None:
    payoff.compared[layer] += 1
    fresh = max(FRESH, 1.0 / payoff.compared[layer])
    off = saved_s - payoff.saved_s[layer]
    payoff.saved_s[layer] += fresh * off
    payoff.spread[layer] = (1.0 - fresh) * (payoff.spread[layer] + fresh * off * off)


@compiled
def _evidence(payoff: PayoffState, layer: int) -> float:
    """How many standard errors the saving is away from nothing; nothing is said on few comparisons."""
    compared = payoff.compared[layer]
    if compared < FEW:
        return 0.0
    error = np.sqrt(payoff.spread[layer] * max(FRESH, 1.0 / compared))
    return float(payoff.saved_s[layer] / max(error, 1e-12))


@compiled
def _switch_off(payoff: PayoffState, layer: int, number: int) -> None:
    """Go without for a while; the evidence stays to be looked at, and what comes after begins anew."""
    payoff.off_until[layer] = number + 1 + payoff.pause[layer]
    payoff.pause[layer] = min(2 * payoff.pause[layer], LONGEST_PAUSE)
    payoff.compared[layer] = payoff.seen[WITH, layer] = payoff.seen[WITHOUT, layer] = 0
    payoff.block[layer] = -1


@compiled_entry
def note_pass_now(payoff: PayoffState, number: int, seconds: float) -> None:
    """The engine's way to `note_pass`."""
    note_pass(payoff, number, seconds)


@compiled_entry
def goes_without_now(payoff: PayoffState, layer: int, number: int) -> bool:
    """The engine's way to `goes_without`."""
    return goes_without(payoff, layer, number)


@compiled_entry
def most_now(payoff: PayoffState, layer: int, number: int) -> int:
    """The engine's way to `most_guesses`."""
    return most_guesses(payoff, layer, number)


@compiled_entry
def note_now(payoff: PayoffState, layer: int, number: int, stall_s: float, in_time: int, late: int) -> None:
    """The engine's way to `note_event`."""
    note_event(payoff, layer, number, stall_s, in_time, late)

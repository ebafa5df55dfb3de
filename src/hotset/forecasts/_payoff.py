"""Whether fetching ahead pays: a few tokens go without, and layers where that is no slower go without from then on.

Compiled functions on arrays, so that the simulator and the engine decide alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hotset.policies.base import compiled, compiled_entry

CONTROL = 16
"""One decode pass in so many goes without guesses, to compare with."""
FRESH = 0.1  # the weight of the newest measurement
FEW = 6  # control passes before anything is decided
PAUSE = 256  # passes that a layer goes without before it is tried again
FIRST = 4  # guesses per layer to begin with
SURE = 1.0  # standard errors by which guesses must lose
WITH, WITHOUT = 0, 1


class PayoffState(NamedTuple):
    """What is known of each layer, and in a last row of whole passes: guessing itself takes time."""

    most: Any  # int64 [layers + 1], guesses to send at a time
    stall_s: Any  # float64 [2, layers + 1], with guesses and without: the mean, lately
    spread: Any  # float64 [2, layers + 1], squared deviations from it, lately
    seen: Any  # int64 [2, layers + 1]
    off_until: Any  # int64 [layers + 1], the pass from which guesses are sent again
    options: Any  # int64 [2]: whether to decide at all, the most guesses ever


def start_payoff(layers: int, *, auto: bool = True, most: int = 64) -> PayoffState:
    """Nothing is known yet."""
    rows = layers + 1
    return PayoffState(
        np.full(rows, min(FIRST, most)),
        np.zeros((2, rows)),
        np.zeros((2, rows)),
        np.zeros((2, rows), np.int64),
        np.zeros(rows, np.int64),
        np.array([int(auto), most]),
    )


@compiled
def goes_without(payoff: PayoffState, layer: int, number: int) -> bool:
    """Whether nothing is guessed for a layer in the pass of this number."""
    off = max(payoff.off_until[layer], payoff.off_until[-1])
    return bool(payoff.options[0] and (number % CONTROL == 0 or off > number))


@compiled
def most_guesses(payoff: PayoffState, layer: int, number: int) -> int:
    """How many experts of a layer to send for in the pass of this number."""
    return 0 if goes_without(payoff, layer, number) else payoff.most[layer]


@compiled
def _loses(payoff: PayoffState, layer: int) -> bool:
    """Whether events stall longer with guesses than without, beyond what chance explains."""
    if payoff.seen[WITHOUT, layer] < FEW or payoff.seen[WITH, layer] < FEW:
        return False
    longer = payoff.stall_s[WITH, layer] - payoff.stall_s[WITHOUT, layer]
    doubt = 0.0
    for kind in range(2):
        doubt += payoff.spread[kind, layer] * max(FRESH, 1.0 / payoff.seen[kind, layer])
    return bool(longer > 0.0 and longer * longer > SURE * SURE * doubt)


@compiled
def note_event(payoff: PayoffState, layer: int, number: int, stall_s: float, in_time: int, late: int) -> None:
    """Take in how an event went: how long it stalled, and what of its guesses came in time or late."""
    kind = WITHOUT if goes_without(payoff, layer, number) else WITH
    payoff.seen[kind, layer] += 1
    fresh = max(FRESH, 1.0 / payoff.seen[kind, layer])
    off = stall_s - payoff.stall_s[kind, layer]
    payoff.stall_s[kind, layer] += fresh * off
    payoff.spread[kind, layer] = (1.0 - fresh) * (payoff.spread[kind, layer] + fresh * off * off)
    if late > in_time:
        payoff.most[layer] = max(1, payoff.most[layer] - 1)
    elif in_time and not late:
        payoff.most[layer] = min(payoff.options[1], payoff.most[layer] + 1)
    if payoff.options[0] and payoff.off_until[layer] <= number and _loses(payoff, layer):
        payoff.off_until[layer] = number + PAUSE
        for which in range(2):
            payoff.seen[which, layer] = 0


@compiled
def note_pass(payoff: PayoffState, number: int, seconds: float) -> None:
    """Take in how long a whole decode pass took."""
    note_event(payoff, len(payoff.most) - 1, number, seconds, 0, 0)


@compiled_entry
def note_pass_now(payoff: PayoffState, number: int, seconds: float) -> None:
    """The engine's way to `note_pass`."""
    note_pass(payoff, number, seconds)


@compiled_entry
def most_now(payoff: PayoffState, layer: int, number: int) -> int:
    """The engine's way to `most_guesses`."""
    return most_guesses(payoff, layer, number)


@compiled_entry
def note_now(payoff: PayoffState, layer: int, number: int, stall_s: float, in_time: int, late: int) -> None:
    """The engine's way to `note_event`."""
    note_event(payoff, layer, number, stall_s, in_time, late)

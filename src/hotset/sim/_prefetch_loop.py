"""The compiled loop behind `hotset.sim.prefetch`: events in order, a clock for compute and one for the link.

The functions are templates: they call `observe` and `probabilities`, which are bound per forecast.
"""

# ruff: noqa: F821, SIM110 - observe and probabilities are bound per forecast; compiled code knows no generators
from __future__ import annotations

from collections.abc import Callable
from math import isnan
from typing import Any, NamedTuple

from hotset.forecasts import Forecast, Seen  # noqa: F401 - what `seen_of` makes
from hotset.forecasts._kernel import bind
from hotset.prefetch.times import adjusted
from hotset.prefetch.trial import AUTO, TrialState, budget_of, is_control_step, is_off, note_event, note_step
from hotset.prefetch.votes import rank_votes  # noqa: F401 - what `load_predictions` calls
from hotset.sim.forecasting import PREFETCH_SOURCES, EventArrays, load_predictions, seen_of, token_of

STALL_S, TOTAL_S, IN_TIME, LATE, WASTED, DEMAND_BYTES, PREFETCHED_BYTES, WASTED_BYTES, STEPS_WITH = range(9)
SUMS = 9
FOUND_IN_TIME, FOUND_LATE, LATE_BYTES, BATCH_BYTES = range(4)
NO_PREFETCH, FORECAST, TRUTH = 0, 1, 2
FREE, DRAINING = -1, -2  # instead of a layer: an empty row, and one whose transfer cannot be stopped

observe: Callable[..., None]
probabilities: Callable[..., None]


class PrefetchSlots(NamedTuple):
    """The rows for prefetched experts: whose they are, and what has not arrived."""

    layer: Any  # int64 [rows], or FREE or DRAINING
    expert: Any  # int64 [rows]
    left: Any  # float64 [rows], bytes
    turn: Any  # int64 [rows], the order in which they were queued
    batch: Any  # int64 [rows], the event after which they were queued


class LinkState(NamedTuple):
    """The link, per layer and expert."""

    layer_s: float
    expert_s: float  # of a layer's compute, what is experts
    bytes_per_s: float
    latency_s: float
    expert_bytes: float


class Rules(NamedTuple):
    """A PrefetchPlan as the loop reads it, and what predicts."""

    mode: int
    reach: int
    parts: int
    rows_per_part: int
    max_ranks: int
    min_probability: float
    wraps: bool
    predicted_only: bool
    requeues: bool
    waits_for_batch: bool
    cancels: bool
    adjusts_times: bool


def advance_link(slots: PrefetchSlots, link: LinkState, rules: Rules, since_s: float, until_s: float) -> None:
    """Let prefetched experts travel while the link has nothing else to do, the first queued or the nearest first."""
    bytes_left = (until_s - since_s) * link.bytes_per_s
    while bytes_left > 0:
        first = -1
        for row in range(len(slots.layer)):
            if slots.layer[row] == FREE or slots.left[row] <= 0:
                continue
            if first < 0:
                first = row
            elif rules.requeues and slots.layer[row] != slots.layer[first]:
                first = row if slots.layer[row] < slots.layer[first] else first
            elif slots.turn[row] < slots.turn[first]:
                first = row
        if first < 0:
            return
        moved = min(bytes_left, slots.left[first])
        slots.left[first] -= moved
        bytes_left -= moved


def is_missing(log: Any, row: int, missing: int, expert: int) -> bool:
    """Whether an expert is among what an event had to load."""
    for i in range(missing):
        if log[row + i, 1] == expert:
            return True
    return False


def bytes_before(slots: PrefetchSlots, batch: int) -> float:
    """What has not arrived of all that was sent with a batch and before it."""
    found = 0.0
    for row in range(len(slots.layer)):
        if slots.layer[row] != FREE and slots.batch[row] <= batch:
            found += slots.left[row]
    return found


def last_late_batch(slots: PrefetchSlots, rules: Rules, log: Any, at: int, missing: int, layer: int) -> int:
    """The last batch that an event has to wait for as a whole, or -1."""
    found = -1
    for row in range(len(slots.layer) if rules.waits_for_batch else 0):
        wanted = slots.layer[row] == layer and is_missing(log, at, missing, slots.expert[row])
        if wanted and bytes_before(slots, slots.batch[row]) > 0:
            found = max(found, slots.batch[row])
    return found


def waste(slots: PrefetchSlots, link: LinkState, rules: Rules, row: int, sums: Any) -> None:
    """Count an expert that was not asked for; a transfer that cannot be stopped keeps its row until it ends."""
    moved = link.expert_bytes - slots.left[row]
    if not rules.cancels and slots.left[row] > 0:
        slots.layer[row] = DRAINING
        moved = link.expert_bytes
    sums[WASTED] += 1
    sums[WASTED_BYTES] += moved
    sums[PREFETCHED_BYTES] += moved


def claim(
    events: EventArrays, slots: PrefetchSlots, link: LinkState, rules: Rules, log: Any, at: int, missing: int,
    event: int, sums: Any, found: Any
) -> None:  # fmt: skip
    """Empty the rows of a layer: how many came in time and late, the rest of the late, and what has to come with it."""
    layer = events.layer[event]
    last_batch = last_late_batch(slots, rules, log, at, missing, layer)
    for i in range(4):
        found[i] = 0.0
    for row in range(len(slots.layer)):
        if slots.layer[row] != layer:
            continue
        slots.layer[row] = FREE
        if rules.requeues and slots.left[row] >= link.expert_bytes:
            continue  # it only stood in the queue
        is_stale = not rules.wraps and events.step[slots.batch[row]] != events.step[event]
        if is_stale or not is_missing(log, at, missing, slots.expert[row]):
            waste(slots, link, rules, row, sums)
            continue
        is_late = slots.batch[row] <= last_batch if rules.waits_for_batch else slots.left[row] > 0
        found[FOUND_LATE if is_late else FOUND_IN_TIME] += 1
        found[LATE_BYTES] += slots.left[row]
        sums[PREFETCHED_BYTES] += link.expert_bytes - slots.left[row]
    end_batches(slots, last_batch, found)


def end_batches(slots: PrefetchSlots, last_batch: int, found: Any) -> None:
    """Wait for all that is left up to a batch, and empty the rows of what has drained."""
    for row in range(len(slots.layer)):
        if slots.layer[row] != FREE and slots.batch[row] <= last_batch:
            found[BATCH_BYTES] += slots.left[row]
            slots.left[row] = 0.0
        if slots.layer[row] == DRAINING and slots.left[row] <= 0:
            slots.layer[row] = FREE


def is_queued(slots: PrefetchSlots, layer: int, expert: int) -> bool:
    """Whether an expert was sent for already."""
    for row in range(len(slots.layer)):
        if slots.layer[row] == layer and slots.expert[row] == expert:
            return True
    return False


def best_of(slots: PrefetchSlots, resident: Any, target: int, out: Any, rules: Rules, ranked: Any) -> int:
    """The likeliest expert of a layer that is neither resident nor sent for, or -1; of equals the better rank."""
    best = -1
    only = rules.predicted_only and rules.mode == FORECAST
    for place in range(min(len(ranked), rules.max_ranks) if only else len(out)):
        expert = ranked[place] if only else place
        if expert < 0:
            break
        better = out[expert] >= rules.min_probability and (best < 0 or out[expert] > out[best])
        if better and not resident[target, expert] and not is_queued(slots, target, expert):
            best = expert
    return best


def queue(
    slots: PrefetchSlots, link: LinkState, rules: Rules, resident: Any, target: int, out: Any, ranked: Any, budget: int,
    event: int, turn: int
) -> int:  # fmt: skip
    """Queue the likeliest experts of a layer that are not resident; returns the next turn."""
    first = (target % rules.parts) * rules.rows_per_part
    budget = min(budget, rules.max_ranks)
    for row in range(first, first + rules.rows_per_part):
        if rules.requeues and slots.layer[row] == target:
            if slots.left[row] < link.expert_bytes:
                budget -= 1
            else:
                slots.layer[row] = FREE
    for _ in range(budget):
        free = -1
        for row in range(first, first + rules.rows_per_part):
            if slots.layer[row] == FREE:
                free = row
        best = best_of(slots, resident, target, out, rules, ranked)
        if free < 0 or best < 0:
            return turn
        slots.layer[free], slots.expert[free] = target, best
        slots.left[free], slots.turn[free], slots.batch[free] = link.expert_bytes, turn, event
        turn += 1
    return turn


def apply_loads(log: Any, at: int, missing: int, resident: Any) -> None:
    """Note which experts were admitted and which evicted."""
    for i in range(at, at + missing):
        if log[i, 2] >= 0:
            resident[log[i, 0], log[i, 1]] = True
        if log[i, 4] >= 0:
            resident[log[i, 3], log[i, 4]] = False


def predict(
    events: EventArrays, state: Any, seen: Any, event: int, target: int, distance: int, mode: int, out: Any
) -> None:
    """Fill the probabilities of a layer ahead: the forecast's, or the truth."""
    if mode == FORECAST:
        probabilities(state, seen, target, distance, out)
        return
    for expert in range(len(out)):
        out[expert] = 0.0
    later = events.targets[event, distance - 1]
    if later >= 0:
        for i in range(events.start[later], events.start[later + 1]):
            out[events.expert[i]] = 1.0


def ends_step(events: EventArrays, event: int) -> bool:
    """Whether an event is the last of its step."""
    return bool(event + 1 == len(events.step) or events.step[event + 1] != events.step[event])


def follow(
    events: EventArrays, log: Any, misses: Any, resident: Any, state: Any, trial: TrialState, times: Any,
    slots: PrefetchSlots, link: LinkState, rules: Rules, out: Any, found: Any, predicted: Any, sums: Any
) -> None:  # fmt: skip
    """Walk through all events."""
    now, free_at, step_s, at, turn, missed = 0.0, 0.0, 0.0, 0, 0, 0
    layers = resident.shape[0]
    for event in range(len(events.layer)):
        layer, missing = events.layer[event], misses[event]
        first, last = events.start[event], events.start[event + 1]
        decode, number = events.phase[event] == 1, events.step[event]
        advance_link(slots, link, rules, free_at, now)
        claim(events, slots, link, rules, log, at, missing, event, sums, found)
        in_time, late = found[FOUND_IN_TIME], found[FOUND_LATE]
        absent = missing - in_time
        load = (absent - late) * link.expert_bytes + found[LATE_BYTES]
        transfer = (load + found[BATCH_BYTES]) / link.bytes_per_s + (link.latency_s if absent > 0 else 0.0)
        stall = max(0.0, transfer - link.expert_s * (last - first - absent) / (last - first))
        if decode:
            sums[STALL_S] += stall
            sums[TOTAL_S] += link.layer_s + stall
            sums[IN_TIME] += in_time
            sums[LATE] += late
            sums[DEMAND_BYTES] += load
            note_event(trial, layer, number, stall, int(in_time), int(late))
        apply_loads(log, at, missing, resident)
        at += missing
        missed += missing
        # A control step asks no router, and while prefetch is off nothing learns: neither is free.
        is_control = decode and is_control_step(trial, layers, number)
        is_idle = decode and trial.options[AUTO] > 0 and is_off(trial, layers, number)
        if rules.mode != NO_PREFETCH and not is_idle:
            given = len(events.predicted) > 0 and decode and not is_control
            if given:
                load_predictions(events, event, out, predicted)
            seen = seen_of(events, event, predicted, given)
            observe(state, seen)
            for distance in range(1, rules.reach + 1 if decode else 1):
                target = (layer + distance) % layers
                if layer + distance >= layers and not rules.wraps:
                    break
                budget = budget_of(trial, target, number + (layer + distance) // layers)
                if budget > 0:
                    predict(events, state, seen, event, target, distance, rules.mode, out)
                    ranked = predicted[distance - 1]
                    turn = queue(slots, link, rules, resident, target, out, ranked, budget, event, turn)
        free_at = now + transfer
        now += link.layer_s + stall
        step_s += link.layer_s + stall
        if ends_step(events, event):
            if decode:
                sums[STEPS_WITH] += rules.mode != NO_PREFETCH and not is_control
                seconds = adjusted(times, step_s, missed) if rules.adjusts_times else step_s
                if not isnan(seconds):
                    note_step(trial, number, seconds)
            step_s, missed = 0.0, 0


TEMPLATES = (
    load_predictions, token_of, seen_of, advance_link, is_missing, bytes_before, last_late_batch, waste, end_batches,
    claim, is_queued, best_of, queue, apply_loads, predict, ends_step, follow,
)  # fmt: skip
_MADE: dict[type[Forecast], Callable[..., None]] = {}


def loop_of(forecast: type[Forecast]) -> Callable[..., None]:
    """The compiled loop of one forecast, made once per process."""
    if forecast not in _MADE:
        _MADE[forecast] = bind(forecast, TEMPLATES, (follow,), globals(), PREFETCH_SOURCES)["follow"]
    return _MADE[forecast]

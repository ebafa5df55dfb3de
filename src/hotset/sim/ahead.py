"""Fetching ahead over a modelled link: what of the stalls a forecast saves, and how many bytes it wastes.

Guesses wait in slots of their own and never change who is resident. So a replay without them gives all misses, and
this follows with the forecast and the link alone. docs/design.md states the model.
"""

# ruff: noqa: F821, SIM110 - observe and chances are bound per forecast; compiled code knows no generators
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.cache.controller import Controller, Replayed
from hotset.checks import number, whole
from hotset.errors import HotsetError
from hotset.forecasts import MAX_DISTANCE, Forecast, Seen, parse
from hotset.forecasts._kernel import bind
from hotset.prefetch import MIN_PROBABILITY
from hotset.prefetch.trial import TrialState, budget_of, is_control_step, note_event, note_step, start_trial
from hotset.prefetch.votes import rank_votes  # noqa: F401 - what `recount_guesses` calls
from hotset.sim.forecasting import PREFETCH_SOURCES, Story, learn, recount_guesses, tell
from hotset.sim.link import Link
from hotset.trace import Trace
from hotset.trace.events import EventTable

AUTO, OFF, ORACLE = "auto", "off", "oracle"
"""What is less likely than this is not sent for, unless another threshold is asked for; the engine has the same."""
STALL_S, TOTAL_S, IN_TIME, LATE, WASTED, DEMAND_BYTES, GUESSED_BYTES, WASTED_BYTES, PASSES_WITH = range(9)
SUMS = 9
NO_GUESSES, FORECAST, TRUTH = 0, 1, 2

_MOST_SLOTS = 1 << 16

Resident = npt.NDArray[np.bool_]
"""Who sits in a slot, of shape (layers, experts)."""

observe: Callable[..., None]
chances: Callable[..., None]


class Board(NamedTuple):
    """The slots for guesses: whose they are, and what is still on its way."""

    layer: Any  # int64 [slots], -1 where empty
    expert: Any  # int64 [slots]
    left: Any  # float64 [slots], bytes
    turn: Any  # int64 [slots], the order of departure


class Road(NamedTuple):
    """The link, per layer and expert."""

    layer_s: float
    expert_s: float  # of a layer's compute, what is experts
    bytes_per_s: float
    latency_s: float
    expert_bytes: float


class Wish(NamedTuple):
    """Who guesses, how many layers ahead, and how sure a guess must be."""

    mode: int
    distances: int
    least_chance: float


@dataclass(frozen=True)
class Journey:
    """What a replay with guesses would have taken, in decode."""

    stall_s: float
    total_s: float
    in_time: int
    late: int
    wasted: int
    demand_bytes: float
    guessed_bytes: float
    wasted_bytes: float
    passes_with: int  # decode passes that guesses were sent for
    layers_switched_off: int  # at the end
    switched_off: bool  # whole passes, at the end


def simulate_ahead(
    trace: Trace,
    controller: Controller,
    link: Link,
    forecast: str,
    *,
    slots: int,
    auto: bool = True,
    distances: int = 1,
    least_chance: float = MIN_PROBABILITY,
) -> Journey:
    """Replay a trace and let a forecast fetch ahead; "off" and "oracle" are forecasts, too."""
    resident = controller.table.slot_of >= 0
    done = controller.replay(trace.events(), log=True)
    return follow_replay(
        trace, done, link, forecast, slots=slots, auto=auto, distances=distances, least_chance=least_chance,
        resident=resident,
    )  # fmt: skip


def chosen_forecast(trace: Trace, wished: str) -> tuple[str, bool]:
    """The forecast for a wish, and whether it may switch itself off: auto is the routers' guesses, where recorded."""
    if wished != AUTO:
        return wished, False
    return ("best" if trace.guesses is None else "gate"), True


def follow_replay(
    trace: Trace,
    done: Replayed,
    link: Link,
    forecast: str,
    *,
    slots: int,
    auto: bool = True,
    distances: int = 1,
    least_chance: float = MIN_PROBABILITY,
    resident: Resident | None = None,
    taught: Trace | None = None,
) -> Journey:
    """The same for a replay that was done and logged, of a cache that began with `resident`; empty if not given.

    `taught` are earlier requests that the forecast has seen.
    """
    whole(distances, "the layers that guesses reach ahead", 1, MAX_DISTANCE)
    whole(slots, "the number of slots for guesses", 0, _MOST_SLOTS)
    number(least_chance, "the least chance of a guess", 0, 1e9)
    layers, experts = trace.shape.layers, trace.shape.experts
    events = trace.events()
    _check_replay(done, events, resident)
    story = tell(trace, events, np.ones(len(events), np.bool_))
    chosen = parse("previous" if forecast in (OFF, ORACLE) else forecast)
    state = chosen.start(trace.shape)
    if taught is not None:
        learn(chosen, state, taught)
        story = story._replace(request=story.request + taught.requests)
    wish = Wish({OFF: NO_GUESSES, ORACLE: TRUTH}.get(forecast, FORECAST), distances, least_chance)
    payoff = start_trial(layers, auto=auto and forecast != OFF, most=slots)
    board = Board(np.full(slots, -1), np.zeros(slots, np.int64), np.zeros(slots), np.zeros(slots, np.int64))
    near = np.zeros((layers, experts), np.bool_) if resident is None else resident.copy()
    sums = np.zeros(SUMS)
    _follow_of(type(chosen))(
        story, done.log, done.misses, near, state, payoff, board, _road(link, trace), wish,
        np.zeros(experts), np.zeros(3), np.empty((MAX_DISTANCE, experts), np.int16), sums,
    )  # fmt: skip
    return _journey(sums, payoff, int(story.step[-1]) + 1)


def _check_replay(done: Replayed, events: EventTable, resident: Resident | None) -> None:
    """Refuse the log of another replay, or of one that was not logged."""
    shape = events.shape
    misses, log = done.misses, done.log
    fits = len(misses) == len(events) and (misses >= 0).all() and int(misses.sum()) == len(log)
    if not fits or log.shape[1:] != (5,) or (log[:, [1, 4]] >= shape.experts).any():
        raise HotsetError("this replay is not of these events, or it was not logged")
    if (log[:, [0, 3]] >= shape.layers).any() or (log[:, :2] < 0).any():
        raise HotsetError("this replay is of a model with other layers")
    if resident is not None and resident.shape != (shape.layers, shape.experts):
        raise HotsetError(f"the residents are a grid of shape {(shape.layers, shape.experts)}, not {resident.shape}")


def _road(link: Link, trace: Trace) -> Road:
    size = trace.shape.expert_bytes
    if size is None:
        raise HotsetError("a modelled link needs the size of an expert: pass --expert-bytes")
    layer_s = link.compute_s / trace.shape.layers
    return Road(layer_s, layer_s * link.expert_share, link.bytes_per_s, link.latency_s, float(size))


def _journey(sums: Any, payoff: TrialState, next_pass: int) -> Journey:
    return Journey(
        stall_s=float(sums[STALL_S]),
        total_s=float(sums[TOTAL_S]),
        in_time=int(sums[IN_TIME]),
        late=int(sums[LATE]),
        wasted=int(sums[WASTED]),
        demand_bytes=float(sums[DEMAND_BYTES]),
        guessed_bytes=float(sums[GUESSED_BYTES]),
        wasted_bytes=float(sums[WASTED_BYTES]),
        passes_with=int(sums[PASSES_WITH]),
        layers_switched_off=int((payoff.off_until[:-1] > next_pass).sum()),
        switched_off=bool(payoff.off_until[-1] > next_pass),
    )


def travel(board: Board, road: Road, since_s: float, until_s: float) -> None:
    """Let guesses travel, in the order of their departure, while the link has nothing else to do."""
    bytes_left = (until_s - since_s) * road.bytes_per_s
    while bytes_left > 0:
        first = -1
        for slot in range(len(board.layer)):
            waits = board.layer[slot] >= 0 and board.left[slot] > 0
            if waits and (first < 0 or board.turn[slot] < board.turn[first]):
                first = slot
        if first < 0:
            return
        moved = min(bytes_left, board.left[first])
        board.left[first] -= moved
        bytes_left -= moved


def is_missing(log: Any, row: int, missing: int, expert: int) -> bool:
    """Whether an expert is among what an event had to load."""
    for i in range(missing):
        if log[row + i, 1] == expert:
            return True
    return False


def claim(board: Board, road: Road, log: Any, row: int, missing: int, layer: int, sums: Any, found: Any) -> None:
    """Empty the slots of guesses for a layer: found[0] came in time, found[1] are late, with found[2] bytes to go."""
    for i in range(3):
        found[i] = 0.0
    for slot in range(len(board.layer)):
        if board.layer[slot] != layer:
            continue
        board.layer[slot] = -1
        moved = road.expert_bytes - board.left[slot]
        sums[GUESSED_BYTES] += moved
        if not is_missing(log, row, missing, board.expert[slot]):
            sums[WASTED] += 1
            sums[WASTED_BYTES] += moved
        elif board.left[slot] <= 0:
            found[0] += 1
        else:
            found[1] += 1
            found[2] += board.left[slot]


def is_on_board(board: Board, layer: int, expert: int) -> bool:
    """Whether an expert was sent for already."""
    for slot in range(len(board.layer)):
        if board.layer[slot] == layer and board.expert[slot] == expert:
            return True
    return False


def send(
    board: Board, road: Road, resident: Any, target: int, out: Any, least: float, most: int, turn: int
) -> int:  # fmt: skip
    """Send for the likeliest experts of a layer that are not near; returns the next turn."""
    for _ in range(most):
        free, best = -1, -1
        for slot in range(len(board.layer)):
            if board.layer[slot] < 0:
                free = slot
        for expert in range(len(out)):
            better = out[expert] >= least and (best < 0 or out[expert] > out[best])
            if better and not resident[target, expert] and not is_on_board(board, target, expert):
                best = expert
        if free < 0 or best < 0:
            return turn
        board.layer[free], board.expert[free] = target, best
        board.left[free], board.turn[free] = road.expert_bytes, turn
        turn += 1
    return turn


def settle(log: Any, row: int, missing: int, resident: Any) -> None:
    """Note who sat down and who left."""
    for i in range(row, row + missing):
        if log[i, 2] >= 0:
            resident[log[i, 0], log[i, 1]] = True
        if log[i, 4] >= 0:
            resident[log[i, 3], log[i, 4]] = False


def foresee(story: Story, state: Any, seen: Any, event: int, target: int, distance: int, mode: int, out: Any) -> None:
    """Fill the chances of a layer ahead: the forecast's, or the truth."""
    if mode == FORECAST:
        chances(state, seen, target, distance, out)
        return
    for expert in range(len(out)):
        out[expert] = 0.0
    later = story.ahead[event, distance - 1]
    if later >= 0:
        for i in range(story.start[later], story.start[later + 1]):
            out[story.expert[i]] = 1.0


def token_of(story: Story, event: int) -> int:
    """The id of the token that an event's pass computes, if it is one and known."""
    step = story.step[event]
    if len(story.token_ids) > 0 and story.bounds[step + 1] - story.bounds[step] == 1:
        return int(story.token_ids[story.bounds[step]])
    return -1


def ends_pass(story: Story, event: int) -> bool:
    """Whether an event is the last of its pass."""
    return bool(event + 1 == len(story.step) or story.step[event + 1] != story.step[event])


def follow(
    story: Story, log: Any, misses: Any, resident: Any, state: Any, payoff: TrialState, board: Board, road: Road,
    wish: Wish, out: Any, found: Any, guesses: Any, sums: Any
) -> None:  # fmt: skip
    """Walk through all events with a clock for the compute and one for the link."""
    now, free_at, pass_s, row, turn = 0.0, 0.0, 0.0, 0, 0
    layers = resident.shape[0]
    for event in range(len(story.layer)):
        layer, missing = story.layer[event], misses[event]
        first, last = story.start[event], story.start[event + 1]
        decode, number = story.phase[event] == 1, story.step[event]
        travel(board, road, free_at, now)
        claim(board, road, log, row, missing, layer, sums, found)
        in_time, late, late_left = found[0], found[1], found[2]
        absent = missing - in_time
        load = (absent - late) * road.expert_bytes + late_left
        transfer = load / road.bytes_per_s + (road.latency_s if absent > 0 else 0.0)
        stall = max(0.0, transfer - road.expert_s * (last - first - absent) / (last - first))
        if decode:
            sums[STALL_S] += stall
            sums[TOTAL_S] += road.layer_s + stall
            sums[IN_TIME] += in_time
            sums[LATE] += late
            sums[DEMAND_BYTES] += load
            note_event(payoff, layer, number, stall, int(in_time), int(late))
        settle(log, row, missing, resident)
        row += missing
        if wish.mode != NO_GUESSES:
            if story.guesses.shape[0] > 0:
                recount_guesses(story, event, out, guesses)
            seen = Seen(
                layer, story.expert[first:last], story.count[first:last], story.tokens[event], story.phase[event],
                story.request[event], token_of(story, event), guesses[:, : guesses.shape[1] * (len(story.guesses) > 0)],
            )  # fmt: skip
            observe(state, seen)
            for distance in range(1, wish.distances + 1 if decode else 1):
                target = (layer + distance) % layers
                most = budget_of(payoff, target, number + (layer + distance) // layers)
                if most > 0:
                    foresee(story, state, seen, event, target, distance, wish.mode, out)
                    turn = send(board, road, resident, target, out, wish.least_chance, most, turn)
        free_at = now + transfer
        now += road.layer_s + stall
        pass_s += road.layer_s + stall
        if ends_pass(story, event):
            if decode:
                sums[PASSES_WITH] += wish.mode != NO_GUESSES and not is_control_step(payoff, layers, number)
                note_step(payoff, number, pass_s)
            pass_s = 0.0


_TEMPLATES = (
    recount_guesses, travel, is_missing, claim, is_on_board, send, settle, foresee, token_of, ends_pass,
    follow,
)  # fmt: skip
_MADE: dict[type[Forecast], Callable[..., None]] = {}


def _follow_of(forecast: type[Forecast]) -> Callable[..., None]:
    if forecast not in _MADE:
        _MADE[forecast] = bind(forecast, _TEMPLATES, (follow,), globals(), PREFETCH_SOURCES)["follow"]
    return _MADE[forecast]

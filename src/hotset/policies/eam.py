"""Activation-aware caching: the past request that is most like the running one says what comes next.

MoE-Infinity (arXiv 2401.14361) counts the tokens that use each expert during one request, as a matrix of layers and
experts, and keeps the matrices of past requests, prefill and decode apart. The functions here are shared: the forecast
`eam` and the collection of a profile are built on the same state.

No call says when a request ends. Requests that take turns get a pass each in a round, so one is over

- when another has begun two passes since it was last seen; a second pass in a row thus ends all others,
- when its number comes back with a prompt after a decode,
- when it was seen longest ago of all running ones and a new one finds no room.

One that has run alone is stored as soon as another one comes: of requests one after the other each then finds all
before it. If it comes back after all, it goes on where it was, and is stored again in the same place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hotset.policies.base import EventView, Grid, Policy, compiled, compiled_entry
from hotset.shape import ModelShape

CAPACITY = 200
MAX_CAPACITY = 4096
MAX_NEAREST = 8
RUNNING = 16
"""Requests that may take turns; of more, some are cut into pieces."""
PHASES = 2
_MAX_BYTES = 256 << 20  # of stored matrices; a very large model keeps fewer of them
_MAX_RUNNING_BYTES = 64 << 20
_NEVER = np.iinfo(np.int64).max  # when an empty place was seen: nothing was seen later
_NO_REQUEST, _SEEDED = -2, -1  # numbers of no request


class EamState(NamedTuple):
    """The matrices of past requests, those of the running ones, and the dot products between them.

    Counts are dense: a request of some hundred tokens uses most experts, and a list of what it used would be longer.
    They lie in two orders, since one event touches an expert in all matrices, and a score all experts of one matrix.
    """

    held: Any  # int64 [1], stored requests
    columns: Any  # float32 [phases, layers, experts, capacity], tokens
    rows: Any  # float32 [capacity, phases, layers, experts], the same
    squares: Any  # float64 [phases, layers, capacity], squared norm of each row
    totals: Any  # float64 [phases, layers, capacity], sum of each row
    running: Any  # float64 [phases, layers, running, experts]
    running_totals: Grid  # [phases, layers, running]
    running_square: Any  # float64 [phases, running]
    dots: Any  # float64 [phases, running, capacity], between running and stored requests
    known: Any  # float64 [phases, running, capacity], squared norm over the rows that the running request has by now
    request: Any  # int64 [running], its number
    phase: Any  # int64 [running], of its last event
    layer: Any  # int64 [running], of its last event
    passes: Any  # int64 [running], that it has begun
    begun: Any  # int64 [running], the event that began its last pass
    seen: Any  # int64 [running], its last event
    own: Any  # int64 [running], where it is stored although it may go on, or -1
    unsaved: Any  # int64 [running], 1 if it has events that are not stored
    clock: Any  # int64 [2], events so far, and the place of the request whose turn it is
    matched: Any  # int32 [1 + nearest], how many stored requests are the nearest, then which
    eps: Any  # float64 [1]


@compiled
def observe(state: EamState, table: Any, event: EventView) -> None:
    """Take the event into the running request, then look for past ones like it."""
    take(state, event.layer, event.experts, event.counts, event.phase, event.request)
    match(state, event.phase)


@compiled
def score(state: EamState, table: Any, event: EventView, layer: int, expert: int) -> Any:
    """The predicted share of the layer's uses; less in deep layers, which leave time to prefetch."""
    return (share(state, event.phase, layer, expert) + state.eps[0]) * (1.0 - layer / state.running.shape[1])


@compiled
def take(state: EamState, layer: int, experts: Any, counts: Any, phase: int, request: int) -> None:
    """Add one event to its request, and to the dot products with all stored ones."""
    if request == _SEEDED:
        phase = 1
    run = _turn(state, layer, phase, request)
    held, dots = state.held[0], state.dots[phase, run]
    if state.running_totals[phase, layer, run] == 0.0:
        for place in range(held):
            state.known[phase, run, place] += state.squares[phase, layer, place]
    for i in range(len(experts)):
        count, before = float(counts[i]), state.running[phase, layer, run, experts[i]]
        state.running[phase, layer, run, experts[i]] = before + count
        state.running_totals[phase, layer, run] += count
        state.running_square[phase, run] += count * (2.0 * before + count)
        column = state.columns[phase, layer, experts[i]]
        for place in range(held):
            dots[place] += count * column[place]


@compiled
def match(state: EamState, phase: int) -> None:
    """Find the stored requests nearest to the one whose turn it is, by cosine over the rows it has in this phase."""
    run = state.clock[1]
    state.matched[0] = 0
    for place in range(state.held[0]):
        if state.dots[phase, run, place] > 0.0 and place != state.own[run]:
            _rank(state, phase, run, place)


@compiled
def share(state: EamState, phase: int, layer: int, expert: int) -> Any:
    """The expert's share of the layer's uses in the nearest requests; without any, in the running one."""
    total = total_of(state, phase, layer)
    return uses_of(state, phase, layer, expert) / total if total > 0.0 else 0.0


@compiled
def uses_of(state: EamState, phase: int, layer: int, expert: int) -> Any:
    """The tokens that used the expert in the nearest requests; without any, in the running one."""
    if state.matched[0] == 0:
        return state.running[phase, layer, state.clock[1], expert]
    uses = 0.0
    for i in range(1, 1 + state.matched[0]):
        uses += state.rows[state.matched[i], phase, layer, expert]
    return uses


@compiled
def total_of(state: EamState, phase: int, layer: int) -> Any:
    """The same of all experts of the layer."""
    if state.matched[0] == 0:
        return state.running_totals[phase, layer, state.clock[1]]
    total = 0.0
    for i in range(1, 1 + state.matched[0]):
        total += state.totals[phase, layer, state.matched[i]]
    return total


@compiled
def _turn(state: EamState, layer: int, phase: int, request: int) -> Any:
    """The place of the event's request among the running ones, once those that are over by now are stored."""
    state.clock[0] += 1
    run = _find(state, request)
    if run >= 0 and phase < state.phase[run]:
        state.seen[run] = 0  # another request of the same number: the old one is over before all others
        run = -1
    end_before(state, _limit(state, run, layer))
    if run < 0:
        run = _begin(state, request)
    if state.passes[run] == 0 or layer <= state.layer[run]:
        state.passes[run] += 1
        state.begun[run] = state.clock[0]
    state.phase[run], state.layer[run], state.seen[run] = phase, layer, state.clock[0]
    state.unsaved[run], state.clock[1] = 1, run
    return run


@compiled
def _limit(state: EamState, run: int, layer: int) -> Any:
    """Running requests last seen before this event are over; a run of -1 is a new request."""
    if run >= 0:
        return state.begun[run] if layer <= state.layer[run] else 1
    if _find(state, _SEEDED) >= 0:  # no request takes turns with a profile
        return state.clock[0]
    return state.seen[_oldest(state)] + 1 if _find(state, _NO_REQUEST) < 0 else 1


@compiled
def _begin(state: EamState, request: int) -> Any:
    """Give a new request an empty place, and store what has run alone until now."""
    lone = _lone(state)
    if lone >= 0:
        _save(state, lone)
    run = _find(state, _NO_REQUEST)
    state.request[run] = request
    return run


@compiled
def _lone(state: EamState) -> Any:
    """The only running request, if it has begun a second pass: so far no other takes turns with it."""
    found = -1
    for run in range(len(state.request)):
        if state.request[run] != _NO_REQUEST:
            if found >= 0:
                return -1
            found = run
    return found if found >= 0 and state.passes[found] > 1 else -1


@compiled
def _find(state: EamState, request: int) -> Any:
    for run in range(len(state.request)):
        if state.request[run] == request:
            return run
    return -1


@compiled
def _oldest(state: EamState) -> Any:
    """The running request that was seen longest ago."""
    found = 0
    for run in range(1, len(state.seen)):
        if state.seen[run] < state.seen[found]:
            found = run
    return found


@compiled
def end_before(state: EamState, limit: int) -> None:
    """Store the running requests last seen before this event, the one seen longest ago first, and forget them."""
    run = _oldest(state)
    while state.seen[run] < limit:
        _save(state, run)
        _clear(state, run)
        run = _oldest(state)


@compiled
def _rank(state: EamState, phase: int, run: int, place: int) -> None:
    """Put a stored request among the nearest, if it belongs there; the earlier goes first among equals."""
    best, most = state.matched, len(state.matched) - 1
    at = best[0]
    while at > 0 and _is_nearer(state, phase, run, place, best[at]):
        if at < most:
            best[at + 1] = best[at]
        at -= 1
    if at < most:
        best[at + 1] = place
        best[0] = min(best[0] + 1, most)


@compiled
def _is_nearer(state: EamState, phase: int, run: int, one: int, other: int) -> Any:
    """Whether the first has the larger cosine; squares, so that whole numbers are compared exactly."""
    dots, known = state.dots[phase, run], state.known[phase, run]
    return dots[one] * dots[one] * known[other] > dots[other] * dots[other] * known[one]


@compiled
def _save(state: EamState, run: int) -> None:
    """Store a running request if it has anything new; what was only seeded makes way for anything else."""
    seeded = state.request[run] == _SEEDED and state.held[0] > 0
    if state.unsaved[run] == 0 or seeded or state.running_square[0, run] + state.running_square[1, run] == 0.0:
        return
    place = state.own[run] if state.own[run] >= 0 else _place(state, run)
    _store(state, run, place)
    for other in range(len(state.own)):
        if state.own[other] == place:
            state.own[other] = -1
        if state.request[other] != _NO_REQUEST:
            _relate(state, other, place)
    state.own[run], state.unsaved[run] = place, 0


@compiled
def _place(state: EamState, run: int) -> Any:
    """Where the finished request goes: an empty place, or that of the request most like it, to keep them diverse."""
    if state.held[0] < state.rows.shape[0]:
        state.held[0] += 1
        return state.held[0] - 1
    found, nearest = 0, -1.0
    for place in range(state.held[0]):
        near = likeness(state, run, place)
        if near > nearest:
            found, nearest = place, near
    return found


@compiled
def likeness(state: EamState, run: int, place: int) -> Any:
    """The cosines of the two phases, added up, between a stored request and the whole of a running one."""
    near = 0.0
    for phase in range(PHASES):
        square = 0.0
        for layer in range(state.squares.shape[1]):
            square += state.squares[phase, layer, place]
        if square > 0.0 and state.running_square[phase, run] > 0.0:
            near += state.dots[phase, run, place] / math.sqrt(square * state.running_square[phase, run])
    return near


@compiled
def _store(state: EamState, run: int, place: int) -> None:
    for phase in range(PHASES):
        for layer in range(state.running.shape[1]):
            square = 0.0
            for expert in range(state.running.shape[3]):
                count = np.float32(state.running[phase, layer, run, expert])
                state.rows[place, phase, layer, expert] = count
                state.columns[phase, layer, expert, place] = count
                square += float(count) * float(count)
            state.squares[phase, layer, place] = square
            state.totals[phase, layer, place] = state.running_totals[phase, layer, run]


@compiled
def _relate(state: EamState, run: int, place: int) -> None:
    """Compute the dot products of a running request with what was stored while it runs; once per request."""
    for phase in range(PHASES):
        dot, known = 0.0, 0.0
        for layer in range(state.running.shape[1]):
            if state.running_totals[phase, layer, run] > 0.0:
                known += state.squares[phase, layer, place]
                for expert in range(state.running.shape[3]):
                    dot += state.running[phase, layer, run, expert] * state.rows[place, phase, layer, expert]
        state.dots[phase, run, place], state.known[phase, run, place] = dot, known


@compiled
def _clear(state: EamState, run: int) -> None:
    state.request[run], state.seen[run], state.own[run] = _NO_REQUEST, _NEVER, -1
    state.phase[run], state.passes[run], state.matched[0] = 0, 0, 0
    for phase in range(PHASES):
        state.running_square[phase, run] = 0.0
        for place in range(state.dots.shape[2]):
            state.dots[phase, run, place] = 0.0
            state.known[phase, run, place] = 0.0
        for layer in range(state.running.shape[1]):
            state.running_totals[phase, layer, run] = 0.0
            for expert in range(state.running.shape[3]):
                state.running[phase, layer, run, expert] = 0.0


@compiled_entry
def add_row(state: EamState, phase: int, layer: int, experts: Any, counts: Any) -> None:
    """Add a row to the request that runs, from Python."""
    take(state, layer, experts, counts, phase, 0)


@compiled_entry
def end_requests(state: EamState, keep: bool) -> None:
    """Store all running requests or drop them, from Python."""
    if keep:
        end_before(state, state.clock[0] + 1)
    for run in range(len(state.request)):
        _clear(state, run)


def empty_state(shape: ModelShape, capacity: int, nearest: int, eps: float) -> EamState:
    """No request is stored, and none runs."""
    layers, experts = shape.layers, shape.experts
    capacity = max(1, min(capacity, _MAX_BYTES // (PHASES * layers * experts * 4)))
    running = max(1, min(RUNNING, _MAX_RUNNING_BYTES // (PHASES * layers * experts * 8)))
    return EamState(
        held=np.zeros(1, np.int64),
        columns=np.zeros((PHASES, layers, experts, capacity), np.float32),
        rows=np.zeros((capacity, PHASES, layers, experts), np.float32),
        squares=np.zeros((PHASES, layers, capacity)),
        totals=np.zeros((PHASES, layers, capacity)),
        running=np.zeros((PHASES, layers, running, experts)),
        running_totals=np.zeros((PHASES, layers, running)),
        running_square=np.zeros((PHASES, running)),
        dots=np.zeros((PHASES, running, capacity)),
        known=np.zeros((PHASES, running, capacity)),
        request=np.full(running, _NO_REQUEST),
        phase=np.zeros(running, np.int64),
        layer=np.zeros(running, np.int64),
        passes=np.zeros(running, np.int64),
        begun=np.zeros(running, np.int64),
        seen=np.full(running, _NEVER),
        own=np.full(running, -1),
        unsaved=np.zeros(running, np.int64),
        clock=np.zeros(2, np.int64),
        matched=np.zeros(1 + nearest, np.int32),
        eps=np.array([eps]),
    )


@dataclass(frozen=True, kw_only=True)
class Eam(Policy, name="eam", observe=observe, score=score, collects_requests=True):
    """What the past requests most like this one used least is evicted, deep layers first (arXiv 2401.14361).

    Of `capacity` past requests the `nearest` are added up. As long as there are none, the running one has to do. What
    a profile keeps is the collection, see hotset.profile.matrices; a sum or a mean of it would say nothing.
    """

    capacity: int = CAPACITY
    nearest: int = 1
    eps: float = 1e-8

    def check(self) -> None:
        """Sizes within reason, and an eps that is no probability of its own."""
        self.require(1 <= self.capacity <= MAX_CAPACITY, f"capacity must be 1 to {MAX_CAPACITY} requests")
        self.require(1 <= self.nearest <= MAX_NEAREST, f"nearest must be 1 to {MAX_NEAREST} requests")
        self.require(0 < self.eps <= 1, "eps must be more than 0 and at most 1")

    def start(self, shape: ModelShape) -> EamState:
        """No request is stored, and none runs."""
        return empty_state(shape, self.capacity, self.nearest, self.eps)


POLICY = Eam

"""Activation-aware caching: the past request that is most like the running one says what comes next.

MoE-Infinity (arXiv 2401.14361) counts the tokens that use each expert during one request, as a matrix of layers and
experts, and keeps the matrices of past requests, prefill and decode apart. The functions here are shared: the forecast
`eam` and the collection of a profile are built on the same state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hotset.policies.base import Ask, Grid, Policy, compiled, compiled_entry
from hotset.shape import ModelShape

CAPACITY = 200
MAX_CAPACITY = 4096
MAX_NEAREST = 8
PHASES = 2
_MOST_BYTES = 256 << 20  # of stored matrices; a very large model keeps fewer of them
_NOBODY, _TAUGHT = -2, -1  # numbers of no request


class EamState(NamedTuple):
    """The matrices of past requests, that of the running one, and the dot products between them.

    Counts are dense: a request of some hundred tokens uses most experts, and a list of what it used would be longer.
    They lie in two orders, since one event touches an expert in all matrices, and a score all experts of one matrix.
    """

    held: Any  # int64 [1], stored requests
    columns: Any  # float32 [phases, layers, experts, capacity], tokens
    rows: Any  # float32 [capacity, phases, layers, experts], the same
    squares: Any  # float64 [phases, layers, capacity], squared norm of each row
    totals: Any  # float64 [phases, layers, capacity], sum of each row
    running: Any  # float64 [phases, layers, experts]
    running_totals: Grid  # [phases, layers]
    running_square: Any  # float64 [phases]
    dots: Any  # float64 [phases, capacity], with the running request
    known: Any  # float64 [phases, capacity], squared norm over the rows that the running request has by now
    last: Any  # int64 [2], request and phase of the last event
    matched: Any  # int32 [1 + nearest], how many stored requests are the nearest, then which
    eps: Any  # float64 [1]


@compiled
def observe(state: EamState, table: Any, ask: Ask) -> None:
    """Take the event into the running request, then look for past ones like it."""
    take(state, ask.layer, ask.experts, ask.counts, ask.phase, ask.request)
    match(state, ask.phase)


@compiled
def score(state: EamState, table: Any, ask: Ask, layer: int, expert: int) -> Any:
    """The predicted share of the layer's uses; less in deep layers, which leave time to fetch ahead."""
    return (share(state, ask.phase, layer, expert) + state.eps[0]) * (1.0 - layer / state.running.shape[1])


@compiled
def take(state: EamState, layer: int, experts: Any, counts: Any, phase: int, request: int) -> None:
    """Add one event to the running request, and to its dot products with all others."""
    if request == _TAUGHT:
        phase = 1
    if request != state.last[0] or phase < state.last[1]:
        finish(state)
    state.last[0], state.last[1] = request, phase
    held, dots = state.held[0], state.dots[phase]
    if state.running_totals[phase, layer] == 0.0:
        for place in range(held):
            state.known[phase, place] += state.squares[phase, layer, place]
    for i in range(len(experts)):
        count, before = float(counts[i]), state.running[phase, layer, experts[i]]
        state.running[phase, layer, experts[i]] = before + count
        state.running_totals[phase, layer] += count
        state.running_square[phase] += count * (2.0 * before + count)
        column = state.columns[phase, layer, experts[i]]
        for place in range(held):
            dots[place] += count * column[place]


@compiled
def match(state: EamState, phase: int) -> None:
    """Find the stored requests nearest to the running one by cosine over the rows it has in this phase."""
    state.matched[0] = 0
    for place in range(state.held[0]):
        if state.dots[phase, place] > 0.0:
            _rank(state, phase, place)


@compiled
def share(state: EamState, phase: int, layer: int, expert: int) -> Any:
    """The expert's share of the layer's uses in the nearest requests; without any, in the running one."""
    total = total_of(state, phase, layer)
    return uses_of(state, phase, layer, expert) / total if total > 0.0 else 0.0


@compiled
def uses_of(state: EamState, phase: int, layer: int, expert: int) -> Any:
    """The tokens that used the expert in the nearest requests; without any, in the running one."""
    if state.matched[0] == 0:
        return state.running[phase, layer, expert]
    uses = 0.0
    for i in range(1, 1 + state.matched[0]):
        uses += state.rows[state.matched[i], phase, layer, expert]
    return uses


@compiled
def total_of(state: EamState, phase: int, layer: int) -> Any:
    """The same of all experts of the layer."""
    if state.matched[0] == 0:
        return state.running_totals[phase, layer]
    total = 0.0
    for i in range(1, 1 + state.matched[0]):
        total += state.totals[phase, layer, state.matched[i]]
    return total


@compiled
def finish(state: EamState) -> None:
    """Store the running request, if there is one, and begin anew; what was only taught makes way for anything else."""
    taught = state.last[0] == _TAUGHT
    if state.running_square[0] + state.running_square[1] > 0.0 and not (taught and state.held[0] > 0):
        _store(state, _place(state))
    _clear(state)


@compiled
def _rank(state: EamState, phase: int, place: int) -> None:
    """Put a stored request among the nearest, if it belongs there; the earlier goes first among equals."""
    best, most = state.matched, len(state.matched) - 1
    at = best[0]
    while at > 0 and _is_nearer(state, phase, place, best[at]):
        if at < most:
            best[at + 1] = best[at]
        at -= 1
    if at < most:
        best[at + 1] = place
        best[0] = min(best[0] + 1, most)


@compiled
def _is_nearer(state: EamState, phase: int, one: int, other: int) -> Any:
    """Whether the first has the larger cosine; squares, so that whole numbers are compared exactly."""
    a, b = state.dots[phase, one], state.dots[phase, other]
    return a * a * state.known[phase, other] > b * b * state.known[phase, one]


@compiled
def _place(state: EamState) -> Any:
    """Where the finished request goes: an empty place, or that of the request most like it, to keep them diverse."""
    if state.held[0] < state.rows.shape[0]:
        state.held[0] += 1
        return state.held[0] - 1
    found, nearest = 0, -1.0
    for place in range(state.held[0]):
        near = likeness(state, place)
        if near > nearest:
            found, nearest = place, near
    return found


@compiled
def likeness(state: EamState, place: int) -> Any:
    """The cosines of the two phases, added up, between a stored request and the whole running one."""
    near = 0.0
    for phase in range(PHASES):
        square = 0.0
        for layer in range(state.squares.shape[1]):
            square += state.squares[phase, layer, place]
        if square > 0.0 and state.running_square[phase] > 0.0:
            near += state.dots[phase, place] / math.sqrt(square * state.running_square[phase])
    return near


@compiled
def _store(state: EamState, place: int) -> None:
    for phase in range(PHASES):
        for layer in range(state.running.shape[1]):
            square = 0.0
            for expert in range(state.running.shape[2]):
                count = np.float32(state.running[phase, layer, expert])
                state.rows[place, phase, layer, expert] = count
                state.columns[phase, layer, expert, place] = count
                square += float(count) * float(count)
            state.squares[phase, layer, place] = square
            state.totals[phase, layer, place] = state.running_totals[phase, layer]


@compiled
def _clear(state: EamState) -> None:
    state.last[0], state.last[1], state.matched[0] = _NOBODY, 0, 0
    for phase in range(PHASES):
        state.running_square[phase] = 0.0
        for place in range(state.dots.shape[1]):
            state.dots[phase, place] = 0.0
            state.known[phase, place] = 0.0
        for layer in range(state.running.shape[1]):
            state.running_totals[phase, layer] = 0.0
            for expert in range(state.running.shape[2]):
                state.running[phase, layer, expert] = 0.0


@compiled_entry
def add_row(state: EamState, phase: int, layer: int, experts: Any, counts: Any) -> None:
    """Add a row to the request that runs, from Python."""
    take(state, layer, experts, counts, phase, 0)


@compiled_entry
def end_request(state: EamState, keep: bool) -> None:
    """Store the running request or drop it, from Python."""
    if keep:
        finish(state)
    else:
        _clear(state)


@compiled_entry
def find_nearest(state: EamState, phase: int) -> None:
    """Fill state.matched, from Python."""
    match(state, phase)


@compiled_entry
def fill_shares(state: EamState, phase: int, out: Grid) -> None:
    """Fill a grid with the predicted shares, from Python."""
    for layer in range(out.shape[0]):
        for expert in range(out.shape[1]):
            out[layer, expert] = share(state, phase, layer, expert)


def empty_state(shape: ModelShape, capacity: int, nearest: int, eps: float) -> EamState:
    """No request is stored, and none runs."""
    layers, experts = shape.layers, shape.experts
    capacity = max(1, min(capacity, _MOST_BYTES // (PHASES * layers * experts * 4)))
    return EamState(
        held=np.zeros(1, np.int64),
        columns=np.zeros((PHASES, layers, experts, capacity), np.float32),
        rows=np.zeros((capacity, PHASES, layers, experts), np.float32),
        squares=np.zeros((PHASES, layers, capacity)),
        totals=np.zeros((PHASES, layers, capacity)),
        running=np.zeros((PHASES, layers, experts)),
        running_totals=np.zeros((PHASES, layers)),
        running_square=np.zeros(PHASES),
        dots=np.zeros((PHASES, capacity)),
        known=np.zeros((PHASES, capacity)),
        last=np.array([_NOBODY, 0]),
        matched=np.zeros(1 + nearest, np.int32),
        eps=np.array([eps]),
    )


@dataclass(frozen=True, kw_only=True)
class Eam(Policy):
    """What the past requests most like this one used least leaves, deep layers first (arXiv 2401.14361).

    Of `capacity` past requests the `nearest` are added up. As long as there are none, the running one has to do. What
    a profile keeps is the collection, see hotset.profile.matrices; a sum or a mean of it would say nothing.
    """

    name: ClassVar[str] = "eam"
    observe: ClassVar[Any] = staticmethod(observe)
    score: ClassVar[Any] = staticmethod(score)
    capacity: int = CAPACITY
    nearest: int = 1
    eps: float = 1e-8

    def check(self) -> None:
        """Sizes within reason, and an eps that is no chance of its own."""
        self.require(1 <= self.capacity <= MAX_CAPACITY, f"capacity must be 1 to {MAX_CAPACITY} requests")
        self.require(1 <= self.nearest <= MAX_NEAREST, f"nearest must be 1 to {MAX_NEAREST} requests")
        self.require(0 < self.eps <= 1, "eps must be more than 0 and at most 1")

    def start(self, shape: ModelShape) -> EamState:
        """No request is stored, and none runs."""
        return empty_state(shape, self.capacity, self.nearest, self.eps)


POLICY = Eam

"""The compiled heart: serve one event. The simulator's loop and the engine's call are the same functions.

The functions below are templates: they call `observe` and `score` without defining them. `kernels_of` binds a copy to
the two functions of a policy and compiles it, so every policy gets its own inlined machine code. Numba caches that on
disk under the function's qualified name and does not look at what the function calls; the name therefore carries a
digest of every source file involved, and an edited policy is never served from a stale cache.
"""

# ruff: noqa: F821 - observe and score are bound per policy
from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hotset.cache import counters, table, usage
from hotset.cache.counters import Count
from hotset.cache.table import FOREVER, Table
from hotset.cache.usage import Usage, track
from hotset.policies import base
from hotset.policies.base import Admit, EventView, Policy, bind

EVENTS, TOKENS, HITS, MISSES = int(Count.EVENTS), int(Count.TOKENS), int(Count.HITS), int(Count.MISSES)
ADMITTED, EVICTED, STAGED = int(Count.ADMITTED), int(Count.EVICTED), int(Count.STAGED)
ALWAYS, LATE, FREE = int(Admit.ALWAYS), int(Admit.LATE), int(Admit.FREE)

wide: Any = np.int64
observe: Callable[[Any, Table, EventView], None]
score: Callable[[Any, Table, EventView, int, int], float]


class Kernels(NamedTuple):
    """The compiled functions of one policy."""

    serve: Callable[..., int]
    replay: Callable[..., int]
    seed_from_rates: Callable[..., None]
    victim: Callable[..., int]
    fill: Callable[..., int]


def look_up(table: Table, event: EventView) -> int:
    """Protect the event's experts, count hits, and list what is missing; return how many are."""
    missing = 0
    for i in range(len(event.experts)):
        expert = np.uintp(event.experts[i])  # unsigned: an index that cannot count from the end is cheaper
        table.last[event.layer, expert] = max(table.last[event.layer, expert], event.tick)
        if table.slot_of[event.layer, expert] < 0:
            table.loads[missing, 0] = expert
            missing += 1
    table.counters[event.phase, EVENTS, event.layer] += 1
    table.counters[event.phase, TOKENS, event.layer] += event.tokens
    table.counters[event.phase, HITS, event.layer] += len(event.experts) - missing
    table.counters[event.phase, MISSES, event.layer] += missing
    return missing


def slots_are_scarce(table: Table, event: EventView, admit: int, missing: int) -> bool:
    """Whether some of the missing may go without a slot, so that their order matters."""
    group = table.group_of[event.layer]
    if missing <= table.num_free[group]:
        return False
    movable = table.bounds[group + 1] - table.bounds[group] - table.num_pinned[group]
    return bool(admit != ALWAYS or len(table.bounds) == 2 or len(event.experts) > movable)


def rank_missing(table: Table, state: Any, event: EventView, missing: int) -> None:
    """Put the most valuable first; equals keep their order."""
    for i in range(missing):
        expert = table.loads[i, 0]
        value = score(state, table, event, event.layer, expert)
        at = i
        while at > 0 and table.worth[at - 1] < value:
            table.worth[at] = table.worth[at - 1]
            table.loads[at, 0] = table.loads[at - 1, 0]
            at -= 1
        table.worth[at] = value
        table.loads[at, 0] = expert


def find_victim(table: Table, state: Any, event: EventView, late: bool) -> int:
    """The slot of the resident with the lowest score among those that may be evicted, or -1.

    The event's own experts stay until it is served, pins always do, and in a pool no layer is brought below its floor
    by another. Ties go to the one used longer ago, then to the lower layer and expert, so that slots never decide.
    """
    bar = event.tick + late  # what was used then or later is not evicted; a pin counts as used at the end of time
    if len(table.bounds) == 2:
        return victim_of_pool(table, state, event, bar)
    return victim_of_layer(table, state, event, bar)


def victim_of_layer(table: Table, state: Any, event: EventView, bar: int) -> int:
    """Among few slots, without short cuts: the victim is random to a CPU, and a branch predicted wrongly is dear."""
    layer, experts = event.layer, table.last.shape[1]
    found, lowest, first = -1, np.inf, FOREVER
    for slot in range(table.bounds[layer], table.bounds[layer + 1]):
        expert = table.expert_in[slot]
        age = table.last[layer, np.uintp(expert)]
        turn = age * experts + expert  # who goes first among equals: the older, then the lower
        value = score(state, table, event, layer, expert)
        weaker = (age < bar) & ((value < lowest) | ((value == lowest) & (turn < first)))
        found = slot if weaker else found
        lowest = value if weaker else lowest
        first = turn if weaker else first
    return found


def victim_of_pool(table: Table, state: Any, event: EventView, bar: int) -> int:
    """Among many slots, with short cuts: nearly all of them score higher than the victim so far."""
    experts = table.last.shape[1]
    found, lowest, first = -1, np.inf, FOREVER
    for slot in range(table.bounds[1]):
        layer, expert = table.layer_in[slot], table.expert_in[slot]
        value = score(state, table, event, layer, expert)
        if value > lowest:
            continue
        age = table.last[layer, expert]
        if age >= bar or (layer != event.layer and table.resident[layer] <= table.floor[layer]):
            continue
        turn = (age * table.last.shape[0] + layer) * experts + expert
        if value < lowest or turn < first:
            found, lowest, first = slot, value, turn
    return found


def assign(table: Table, event: EventView, row: int, slot: int, evicted_layer: int, evicted_expert: int) -> None:
    """Give the row-th missing expert this slot, and note which expert was evicted from it."""
    expert = table.loads[row, 0]
    table.slot_of[event.layer, expert] = slot
    table.layer_in[slot] = event.layer
    table.expert_in[slot] = expert
    table.resident[event.layer] += 1
    table.loads[row, 1] = slot
    table.loads[row, 2] = evicted_layer
    table.loads[row, 3] = evicted_expert


def take_free(table: Table, event: EventView, missing: int) -> int:
    """Assign as many empty slots as there are; return how many that is."""
    group = table.group_of[event.layer]
    assigned = int(min(missing, table.num_free[group]))
    for row in range(assigned):
        table.num_free[group] -= 1
        assign(table, event, row, table.free[table.bounds[group] + table.num_free[group]], -1, -1)
    return assigned


def replace_victims(table: Table, state: Any, event: EventView, admit: int, row: int, missing: int) -> int:
    """Assign the rest the slots of victims, as far as the admission rule allows.

    An expert of the event itself that is evicted has yet to compute, so what takes its slot arrives in staging: no more
    of them than there are rows for.
    """
    swaps = table.swaps[0] if admit == LATE else 0
    while row < missing:
        slot = find_victim(table, state, event, swaps > 0)
        if slot < 0:
            return row
        layer, expert = table.layer_in[slot], table.expert_in[slot]
        if admit != ALWAYS:
            candidate = score(state, table, event, event.layer, table.loads[row, 0])
            resident = score(state, table, event, layer, expert)
            if candidate < resident or (admit == LATE and candidate == resident):
                return row
        swaps -= table.last[layer, expert] == event.tick
        table.slot_of[layer, expert] = -1
        table.resident[layer] -= 1
        table.counters[event.phase, EVICTED, layer] += 1
        assign(table, event, row, slot, layer, expert)
        row += 1
    return row


def serve(table: Table, state: Any, event: EventView, admit: int) -> int:
    """Serve one event: protect, look up, learn, then assign slots to what had to be loaded; return the number of loads.

    Afterwards the first rows of table.loads say what was loaded, its slot, and which expert was evicted.
    """
    table.clock[0] += 1
    table.passes[event.layer] += 1
    missing = look_up(table, event)
    observe(state, table, event)
    if missing == 0:
        return 0
    if missing > 1 and slots_are_scarce(table, event, admit, missing):
        rank_missing(table, state, event, missing)
    assigned = take_free(table, event, missing)
    if assigned < missing and admit != FREE:
        assigned = replace_victims(table, state, event, admit, assigned, missing)
    for row in range(assigned, missing):
        for column in range(1, 4):  # element by element: a slice assignment costs more than all the rest
            table.loads[row, column] = -1
    table.counters[event.phase, ADMITTED, event.layer] += assigned
    table.counters[event.phase, STAGED, event.layer] += missing - assigned
    return missing


def serve_one(
    table: Table, state: Any, usage: Usage, layer: int, experts: Any, counts: Any, tokens: int, phase: int,
    request: int, routes: Any, requests: Any, admit: int
) -> int:  # fmt: skip
    """Serve one event given by its parts and take it into the statistics: the engine's way in."""
    event = EventView(layer, experts, counts, tokens, phase, table.clock[0] + 1, request, routes, requests)
    missing = serve(table, state, event, admit)
    track(usage, event, table.loads, missing)
    return missing


def seed_from_rates(
    table: Table, state: Any, layer: int, experts: Any, counts: Any, tokens: int, routes: Any, requests: Any
) -> None:  # fmt: skip
    """Let the policy learn of a past that was not served here, as of a prompt of so many tokens."""
    observe(state, table, EventView(layer, experts, counts, tokens, 0, table.clock[0], -1, routes, requests))


def victim(table: Table, state: Any, layer: int, none: Any, routes: Any) -> int:
    """The slot that a layer's next candidate would take if no slot is empty, or -1; of an event without experts."""
    event = EventView(layer, none, none, 1, 1, table.clock[0] + 1, -1, routes, none)
    return find_victim(table, state, event, False)


def routes_of(layer: int, first: int, last: int, chosen: Any, asked: Any, routes: Any, requests: Any) -> int:
    """Copy what the tokens of an event chose, and whose they are; tokens that passed the layer by are left out."""
    found = 0
    for token in range(first, last):
        here = False
        for k in range(chosen.shape[2]):
            expert = wide(chosen[token, layer, k])
            routes[found, k] = expert
            here |= expert >= 0
        if here:
            requests[found] = asked[token]
            found += 1
    return found


def replay(
    table: Table, state: Any, start: Any, layers: Any, tokens: Any, phases: Any, requests: Any, experts: Any,
    counts: Any, bounds: Any, chosen: Any, asked: Any, routes: Any, owners: Any, admits: Any, misses: Any, log: Any
) -> int:  # fmt: skip
    """Serve all events in order: the simulator's way in; return the rows written to the log, if it has any.

    `chosen` is what every token chose, for policies that look at it, and else empty; `bounds` are the tokens of each
    event, `routes` and `owners` scratch.
    """
    logged, routed = 0, 0
    for at in range(len(layers)):
        first, last = start[at], start[at + 1]
        # Numbers as wide as serve_one has them: what is compiled for one of the two is then used by both.
        layer, phase, request = wide(layers[at]), wide(phases[at]), wide(requests[at])
        used, of_each = experts[first:last], counts[first:last]
        if chosen.shape[0] > 0:
            routed = routes_of(layer, bounds[at, 0], bounds[at, 1], chosen, asked, routes, owners)
        event = EventView(
            layer, used, of_each, wide(tokens[at]), phase, table.clock[0] + 1, request, routes[:routed], owners[:routed]
        )
        missing = serve(table, state, event, admits[phase])
        misses[at] = missing
        if log.shape[0] > 0:
            for row in range(missing):
                log[logged, 0] = layers[at]
                for column in range(4):
                    log[logged, 1 + column] = table.loads[row, column]
                logged += 1
    return logged


def fill(table: Table, layers: Any, experts: Any) -> int:
    """Assign empty slots to experts, in the given order, skipping residents and full groups; return how many."""
    assigned = 0
    for i in range(len(layers)):
        layer, expert = layers[i], experts[i]
        group = table.group_of[layer]
        if table.slot_of[layer, expert] >= 0 or table.num_free[group] == 0:
            continue
        table.num_free[group] -= 1
        slot = table.free[table.bounds[group] + table.num_free[group]]
        table.slot_of[layer, expert] = slot
        table.layer_in[slot], table.expert_in[slot] = layer, expert
        table.resident[layer] += 1
        assigned += 1
    return assigned


_MADE: dict[type[Policy], Kernels] = {}
_ENTRIES = (serve_one, replay, seed_from_rates, victim, fill)
_TEMPLATES = (
    look_up,
    slots_are_scarce,
    rank_missing,
    victim_of_layer,
    victim_of_pool,
    find_victim,
    assign,
    take_free,
    replace_victims,
    serve,
    serve_one,
    routes_of,
    replay,
    seed_from_rates,
    victim,
)


def kernels_of(policy: type[Policy]) -> Kernels:
    """The compiled functions of one policy, made once per process; the machine code comes from disk if it is there."""
    if policy not in _MADE:
        _MADE[policy] = _make(policy)
    return _MADE[policy]


def _make(policy: type[Policy]) -> Kernels:
    names = globals() | {"observe": policy.observe, "score": policy.score}
    space = bind(_TEMPLATES, _ENTRIES, names, f"{policy.name}_", [*_sources(), Path(inspect.getfile(policy))])
    filled = bind((fill,), (fill,), globals(), "", _sources())
    return Kernels(space["serve_one"], space["replay"], space["seed_from_rates"], space["victim"], filled["fill"])


def _sources() -> list[Path]:
    """All source that ends up in the machine code of every policy."""
    own = [Path(module.__file__ or "") for module in (table, counters, usage, base)]
    return [*own, Path(__file__), *sorted(Path(base.__file__).parent.glob("_[a-z]*.py"))]

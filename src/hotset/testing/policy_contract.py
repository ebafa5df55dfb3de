"""What holds for every policy, replayed on small random workloads in both scopes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from hotset.cache import Controller, Scope, SlotPlan
from hotset.cache.counters import Count
from hotset.checks import instance
from hotset.errors import PolicyError
from hotset.plugins import resolve, uncompilable
from hotset.policies import Admit, EventView, Policy, parse
from hotset.policies.base import parse_options
from hotset.testing.events import SCOPES, cases, one_layer, random_events, random_shape
from hotset.testing.require import require, require_same
from hotset.trace import Event, Phase
from hotset.trace.events import EventTable


def check_policy(policy: Policy | type[Policy] | str) -> None:
    """Check the contract of a policy, given as such, as its class, or by name or file."""
    if isinstance(policy, str):
        policy = parse(resolve(policy))
    made = instance(policy() if isinstance(policy, type) else policy, Policy, "a policy", PolicyError)
    try:
        for check in CHECKS:
            check(made)
    except Exception as error:
        if (refused := uncompilable(error)) is None:
            raise
        raise refused from error


def _controller(policy: Policy, events: EventTable, slots: int, scope: Scope = Scope.LAYER) -> Controller:
    return Controller(SlotPlan(events.shape, slots, scope), policy)


def check_table(controller: Controller) -> None:
    """The slot table says the same thing wherever one looks."""
    table, plan = controller.table, controller.plan
    require(np.count_nonzero(table.slot_of >= 0) <= plan.cached, "more experts are resident than there are slots")
    for (layer, expert), slot in np.ndenumerate(table.slot_of):
        kept = slot < 0 or (table.layer_in[slot], table.expert_in[slot]) == (layer, expert)
        require(kept, "the slot table contradicts itself: did observe or score write to it?")
    require_same(table.resident, (table.slot_of >= 0).sum(axis=1), "the table miscounts its residents")
    for group, (first, last) in enumerate(zip(table.bounds[:-1], table.bounds[1:], strict=True)):
        free = table.free[first : first + table.num_free[group]].tolist()
        layers = np.flatnonzero(table.group_of == group)
        taken = [slot for slot in table.slot_of[layers].ravel().tolist() if slot >= 0]
        require(sorted(free + taken) == list(range(first, last)), "a slot is neither free nor taken, or both")


def slots_are_kept(policy: Policy) -> None:
    """The budget holds, and the table is consistent."""
    for events, slots, scope in cases(seed=1):
        controller = _controller(policy, events, slots, scope)
        for first in range(0, len(events), 10):
            controller.replay(events.slice(first, min(first + 10, len(events))))
            check_table(controller)
            within = scope is not Scope.LAYER or (controller.table.resident <= controller.plan.per_layer()).all()
            require(within, "a layer holds more than its slots")


def _follow(
    controller: Controller, events: EventTable
) -> Iterator[tuple[Event, list[list[int]], set[tuple[int, int]]]]:
    """Each event with its loads and who was resident before it."""
    replayed = controller.replay(events, log=True)
    log = np.asarray(replayed.log)
    ends, residents = np.cumsum(replayed.misses), set[tuple[int, int]]()
    for event, misses, end in zip(events, replayed.misses, ends, strict=True):
        rows = log[end - misses : end].tolist()
        yield event, rows, set(residents)
        residents -= {(row[3], row[4]) for row in rows}
        residents |= {(row[0], row[1]) for row in rows if row[2] >= 0}


def running_experts_stay(policy: Policy) -> None:
    """What an event uses is not evicted by it, under any rule of admission but late."""
    options: dict[str, Any] = {"bypass": False} if hasattr(policy, "bypass") else {}
    for admit in Admit:
        own = replace(policy, admit=admit.name.lower(), **options)
        for events, slots, scope in cases(seed=2, number=3):
            for event, rows, residents in _follow(_controller(own, events, slots, scope), events):
                evicted = {(row[3], row[4]) for row in rows if row[4] >= 0}
                running = {(event.layer, expert) for expert in event.experts}
                require(evicted <= residents | running, "an expert is evicted that was not resident")
                protected = own.admission is not Admit.LATE or event.phase == Phase.PREFILL
                require(not protected or not evicted & running, "an expert is evicted by the event that uses it")


def pins_stay(policy: Policy) -> None:
    """A pinned expert is never evicted."""
    rng = np.random.default_rng(3)
    for scope in SCOPES:
        shape = random_shape(rng)
        events = random_events(rng, shape, 80)
        controller = _controller(policy, events, shape.layers * (shape.top_k + 1), scope)
        pins = [(layer, shape.experts - 1) for layer in range(shape.layers)][: 1 if scope is Scope.POOL else None]
        controller.pin(pins)  # type: ignore[arg-type]
        log = np.asarray(controller.replay(events, log=True).log)
        require(not set(map(tuple, log[:, 3:].tolist())) & set(pins), "a pinned expert is evicted")
        require(set(pins) <= set(controller.residents()), "a pinned expert is not resident")
        check_table(controller)


def runs_are_the_same(policy: Policy) -> None:
    """Two replays of the same events load and evict the same: no clock and no chance decides."""
    for events, slots, scope in cases(seed=4):
        one, two = (_controller(policy, events, slots, scope).replay(events, log=True) for _ in range(2))
        require_same(one.log, two.log, "two replays of the same events differ: where does chance come in?")
        require_same(one.counters.array, two.counters.array, "two replays of the same events count otherwise")


def counters_reconcile(policy: Policy) -> None:
    """Hits and misses are all that was asked for, admitted and staged all that was loaded, of each layer as well."""
    for events, slots, scope in cases(seed=5):
        controller = _controller(policy, events, slots, scope)
        replayed = controller.replay(events, log=True)
        log, total = np.asarray(replayed.log), replayed.counters.total
        for phase in (Phase.PREFILL, Phase.DECODE):
            count = {c: total(c, phase) for c in Count}
            chosen = events.phase == phase
            asked = np.diff(events.start)[chosen].sum()
            require(count[Count.HITS] + count[Count.MISSES] == asked, "hits and misses are not all that was asked for")
            require(
                count[Count.ADMITTED] + count[Count.STAGED] == count[Count.MISSES] == replayed.misses[chosen].sum(),
                "admitted and staged experts are not all that was missed",
            )
            require(count[Count.EVENTS] == chosen.sum(), "events are miscounted")
            require(count[Count.TOKENS] == events.tokens[chosen].sum(), "tokens are miscounted")
        require(total(Count.STAGED) == np.count_nonzero(log[:, 2] < 0), "staged experts are miscounted")
        require(total(Count.EVICTED) == np.count_nonzero(log[:, 4] >= 0), "evictions are miscounted")
        left = total(Count.ADMITTED) - total(Count.EVICTED)
        require(left == len(controller.residents()), "residents are not what was admitted and not evicted")
        _check_layers(events, replayed)


def _check_layers(events: EventTable, replayed: Any) -> None:
    array, layers = replayed.counters.array.sum(axis=0), events.shape.layers
    asked = np.bincount(events.layer, np.diff(events.start), layers)
    require_same(array[Count.HITS] + array[Count.MISSES], asked, "the counters of a layer are not its own")
    evicted = replayed.log[replayed.log[:, 4] >= 0, 3]
    require_same(array[Count.EVICTED], np.bincount(evicted, minlength=layers), "a layer's evictions are not its own")


def a_full_cache_misses_once(policy: Policy) -> None:
    """With room for all experts each is loaded once, and none is evicted."""
    for events, _, scope in cases(seed=7, number=4):
        counters = _controller(policy, events, events.shape.total_experts, scope).replay(events).counters
        asked = {(event.layer, expert) for event in events for expert in event.experts}
        require(counters.total(Count.MISSES) == len(asked), "with room for all, an expert is loaded twice")
        spare = counters.total(Count.EVICTED) + counters.total(Count.STAGED)
        require(spare == 0, "with room for all, an expert is evicted or not kept")


def states_are_carried_on(policy: Policy) -> None:
    """A cache that restores what another saved goes on as that one does: the state holds all that decides."""
    for events, slots, scope in cases(seed=8):
        half = len(events) // 2
        one, two = (_controller(policy, events, slots, scope) for _ in range(2))
        one.replay(events.slice(0, half))
        if not policy.offline:  # the state of an offline policy is the future, which a replay reads again
            two.restore(one.save())
        for mine, theirs in zip(two.table, one.table, strict=True):
            mine[...] = theirs
        rest = events.slice(half, len(events))
        one_rest, two_rest = one.replay(rest, log=True), two.replay(rest, log=True)
        require_same(one_rest.log, two_rest.log, "a restored state goes on in another way: what is not in the state?")


def saved_states_are_copies(policy: Policy) -> None:
    """What was saved does not change as the cache goes on, and a state of another shape is refused."""
    events = next(cases(seed=9))[0]
    controller = _controller(policy, events, events.shape.top_k)
    controller.state = controller.policy.with_future(controller.state, events)
    saved = controller.save()
    before = {key: array.copy() for key, array in saved.items()}
    controller.replay(events)
    for key, array in saved.items():
        require_same(array, before[key], f"the saved {key} changes as the cache goes on")
    small, large = one_layer(4, 1, [[0]]), one_layer(5, 1, [[0]])
    try:
        _controller(policy, small, 2).restore(_controller(policy, large, 2).save())
    except PolicyError:
        return
    require(False, "a state of another model's shape is taken")


def one_by_one_is_as_in_bulk(policy: Policy) -> None:
    """Events served one by one, as a live model does, load and evict as in a replay."""
    for events, slots, scope in cases(seed=10, number=3):
        bulk = _controller(policy, events, slots, scope)
        expected = bulk.replay(events, log=True)
        single = _controller(policy, events, slots, scope)
        single.state = single.policy.with_future(single.state, events)
        rows = []
        for event, misses in zip(events, expected.misses.tolist(), strict=True):
            served = single.serve(event)
            require(served.hits == len(event.experts) - misses, "a live event hits other experts than its replay")
            rows += [_row(load) for load in served.loads]
        require(rows == np.asarray(expected.log).tolist(), "live events load or evict otherwise than their replay")
        require_same(single.counters().array, expected.counters.array, "live events are counted otherwise")
        for mine, theirs in zip(single.table[:-2], bulk.table[:-2], strict=True):  # the last two are scratch
            require_same(mine, theirs, "live events leave another table than their replay")


def _row(load: Any) -> list[int]:
    slot = -1 if load.slot is None else load.slot
    return [*load.key, slot, *(load.evicted or (-1, -1))]


def scores_are_numbers(policy: Policy) -> None:
    """What a policy says of an expert can be compared: one that is no number is never evicted."""
    score: Any = type(policy).score
    for events, slots, scope in cases(seed=11, number=2):
        controller = _controller(policy, events, slots, scope)
        controller.state = policy.with_future(controller.state, events)
        for event in events:
            controller.serve(event)
            view = EventView(
                event.layer, np.array(event.experts, np.int32), np.array(event.counts, np.int32), event.tokens,
                int(event.phase), int(controller.table.clock[0]), 0, np.zeros((0, events.shape.top_k), np.int32),
                np.zeros(0, np.int32),
            )  # fmt: skip
            for expert in range(events.shape.experts):
                value = float(score(controller.state, controller.table, view, event.layer, expert))
                require(not math.isnan(value), f"score is not a number ({value}) for expert {expert}: victims go by it")


def text_gives_it_back(policy: Policy) -> None:
    """Its text, a name and options, makes it again."""
    name, _, options = policy.spec.partition(":")
    require(name == policy.name, "its text does not begin with its name")
    again = type(policy)(**parse_options(type(policy), options))
    require(again == policy, f"its text, {policy.spec}, makes another policy: {again}")


CHECKS: tuple[Callable[[Policy], None], ...] = (
    slots_are_kept,
    running_experts_stay,
    pins_stay,
    runs_are_the_same,
    counters_reconcile,
    a_full_cache_misses_once,
    states_are_carried_on,
    saved_states_are_copies,
    one_by_one_is_as_in_bulk,
    scores_are_numbers,
    text_gives_it_back,
)
"""The parts of the contract, in the order in which they are checked."""

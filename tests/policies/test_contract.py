"""What holds for every policy, the ones still to be written included: they are found by name."""

import sys
from itertools import product
from textwrap import dedent

import numpy as np
import pytest
from event_samples import one_layer, random_budget, random_events, random_shape, workloads
from hypothesis import given, settings
from hypothesis import strategies as st

import hotset.policies
from hotset.cache import Controller, Scope, SlotPlan
from hotset.cache.counters import Count
from hotset.errors import PolicyError
from hotset.policies import Admit, names, parse
from hotset.trace import Phase

SCOPES = [Scope.LAYER, Scope.POOL]

every_policy = pytest.mark.parametrize("name", names())


def controller_of(name, events, slots, scope=Scope.LAYER):
    return Controller(SlotPlan(events.shape, slots, scope), parse(name))


def cases(seed, number=6, **options):
    """Random workloads with a number of slots, in both scopes."""
    rng = np.random.default_rng(seed)
    for _, scope in product(range(number), SCOPES):
        shape = random_shape(rng)
        yield random_events(rng, shape, 50, **options), random_budget(rng, shape), scope


def check_table(controller):
    """The slot table says the same thing wherever one looks."""
    table, plan = controller.table, controller.plan
    assert np.count_nonzero(table.slot_of >= 0) <= plan.cached
    for (layer, expert), slot in np.ndenumerate(table.slot_of):
        assert slot < 0 or (table.layer_in[slot], table.expert_in[slot]) == (layer, expert)
    np.testing.assert_array_equal(table.resident, (table.slot_of >= 0).sum(axis=1))
    for group, (first, last) in enumerate(zip(table.bounds[:-1], table.bounds[1:], strict=True)):
        free = table.free[first : first + table.num_free[group]].tolist()
        layers = np.flatnonzero(table.group_of == group)
        taken = [slot for slot in table.slot_of[layers].ravel().tolist() if slot >= 0]
        assert sorted(free + taken) == list(range(first, last))


@every_policy
def test_slots_are_kept_and_the_table_is_consistent(name):
    for events, slots, scope in cases(seed=1):
        controller = controller_of(name, events, slots, scope)
        for first in range(0, len(events), 10):
            controller.replay(events.slice(first, min(first + 10, len(events))))
            check_table(controller)
            if scope is Scope.LAYER:
                assert (controller.table.resident <= controller.plan.per_layer()).all()


@every_policy
def test_slots_are_kept_on_any_workload(name):
    @settings(max_examples=20, deadline=None)
    @given(workload=workloads(), scope=st.sampled_from(SCOPES))
    def check(workload, scope):
        controller = controller_of(name, *workload, scope)
        controller.replay(workload[0])
        check_table(controller)

    check()


def follow(controller, events):
    """Each event with its loads and who was resident before it."""
    replayed = controller.replay(events, log=True)
    ends = np.cumsum(replayed.misses)
    residents = set()
    for event, misses, end in zip(events, replayed.misses, ends, strict=True):
        rows = replayed.log[end - misses : end].tolist()
        yield event, rows, set(residents)
        residents -= {(row[3], row[4]) for row in rows}
        residents |= {(row[0], row[1]) for row in rows if row[2] >= 0}


@every_policy
@pytest.mark.parametrize("admit", Admit)
def test_a_running_expert_is_never_evicted(name, admit):
    bypass = ",bypass=off" if parse(name).offline else ""
    policy = parse(f"{name}:admit={admit.name.lower()}{bypass}")
    for events, slots, scope in cases(seed=2, number=3):
        controller = Controller(SlotPlan(events.shape, slots, scope), policy)
        for event, rows, residents in follow(controller, events):
            left = {(row[3], row[4]) for row in rows if row[4] >= 0}
            running = {(event.layer, expert) for expert in event.experts}
            assert left <= residents | running
            if policy.admission is not Admit.LATE or event.phase == Phase.PREFILL:
                assert not left & running


@every_policy
def test_a_pin_is_never_evicted(name):
    rng = np.random.default_rng(3)
    for scope in SCOPES:
        shape = random_shape(rng)
        events = random_events(rng, shape, 80)
        controller = controller_of(name, events, shape.layers * (shape.top_k + 1), scope)
        pins = [(layer, shape.experts - 1) for layer in range(shape.layers)]
        if scope is Scope.POOL:
            pins = pins[:1]
        controller.pin(pins)
        log = controller.replay(events, log=True).log
        assert not set(map(tuple, log[:, 3:].tolist())) & set(pins)
        assert set(pins) <= set(controller.residents())
        check_table(controller)


@every_policy
def test_two_runs_are_the_same(name):
    for events, slots, scope in cases(seed=4):
        one, two = (controller_of(name, events, slots, scope).replay(events, log=True) for _ in range(2))
        np.testing.assert_array_equal(one.log, two.log)
        np.testing.assert_array_equal(one.counters.array, two.counters.array)


@every_policy
def test_counters_reconcile(name):
    for events, slots, scope in cases(seed=5):
        controller = controller_of(name, events, slots, scope)
        replayed = controller.replay(events, log=True)
        for phase in (Phase.PREFILL, Phase.DECODE):
            count = {c: replayed.counters.total(c, phase) for c in Count}
            chosen = events.phase == phase
            assert count[Count.HITS] + count[Count.MISSES] == np.diff(events.start)[chosen].sum()
            assert count[Count.ADMITTED] + count[Count.STAGED] == count[Count.MISSES]
            assert count[Count.MISSES] == replayed.misses[chosen].sum()
            assert count[Count.EVENTS] == chosen.sum()
            assert count[Count.TOKENS] == events.tokens[chosen].sum()
        log, total = replayed.log, replayed.counters.total
        assert total(Count.STAGED) == np.count_nonzero(log[:, 2] < 0)
        assert total(Count.EVICTED) == np.count_nonzero(log[:, 4] >= 0)
        assert total(Count.ADMITTED) - total(Count.EVICTED) == len(controller.residents())


@every_policy
def test_counters_of_a_layer_are_its_own(name):
    for events, slots, scope in cases(seed=6, number=3):
        replayed = controller_of(name, events, slots, scope).replay(events, log=True)
        array = replayed.counters.array.sum(axis=0)
        asked = np.bincount(events.layer, np.diff(events.start), events.shape.layers)
        np.testing.assert_array_equal(array[Count.HITS] + array[Count.MISSES], asked)
        left = replayed.log[replayed.log[:, 4] >= 0, 3]
        np.testing.assert_array_equal(array[Count.EVICTED], np.bincount(left, minlength=events.shape.layers))


@every_policy
def test_a_cache_of_all_experts_misses_each_once(name):
    for events, _, scope in cases(seed=7, number=4):
        replayed = controller_of(name, events, events.shape.total_experts, scope).replay(events)
        asked = {(event.layer, expert) for event in events for expert in event.experts}
        assert replayed.counters.total(Count.MISSES) == len(asked)
        assert replayed.counters.total(Count.EVICTED) == replayed.counters.total(Count.STAGED) == 0


@every_policy
def test_what_was_learnt_can_be_carried_on(name):
    for events, slots, scope in cases(seed=8):
        half = len(events) // 2
        one = controller_of(name, events, slots, scope)
        one.replay(events.slice(0, half))
        two = controller_of(name, events, slots, scope)
        if not two.policy.offline:  # the state of an offline policy is the future, which a replay reads again
            two.restore(one.save())
        for mine, theirs in zip(two.table, one.table, strict=True):
            mine[...] = theirs
        rest = events.slice(half, len(events))
        one_rest, two_rest = one.replay(rest, log=True), two.replay(rest, log=True)
        np.testing.assert_array_equal(one_rest.log, two_rest.log)
        np.testing.assert_array_equal(one_rest.misses, two_rest.misses)


@every_policy
def test_a_saved_state_is_a_copy(name):
    events = next(cases(seed=9))[0]
    controller = controller_of(name, events, events.shape.top_k)
    controller.state = controller.policy.with_future(controller.state, events)
    saved = controller.save()
    before = {key: array.copy() for key, array in saved.items()}
    controller.replay(events)
    assert all(np.array_equal(saved[key], before[key], equal_nan=True) for key in saved)


@every_policy
def test_a_state_of_another_shape_is_refused(name):
    small, large = one_layer(4, 1, [[0]]), one_layer(5, 1, [[0]])
    controller = controller_of(name, small, 2)
    saved = controller_of(name, large, 2).save()
    with pytest.raises(PolicyError, match="does not fit"):
        controller.restore(saved)


@every_policy
def test_one_by_one_is_the_same_as_in_bulk(name):
    for events, slots, scope in cases(seed=10, number=3):
        bulk = controller_of(name, events, slots, scope)
        expected = bulk.replay(events, log=True)
        single = controller_of(name, events, slots, scope)
        single.state = single.policy.with_future(single.state, events)
        rows = []
        for event, misses in zip(events, expected.misses.tolist(), strict=True):
            served = single.serve(event)
            assert served.hits == len(event.experts) - misses
            rows += [_row(load) for load in served.loads]
        assert rows == expected.log.tolist()
        np.testing.assert_array_equal(single.counters().array, expected.counters.array)
        for mine, theirs in zip(single.table[:-2], bulk.table[:-2], strict=True):  # the last two are scratch
            np.testing.assert_array_equal(mine, theirs)


def _row(load):
    slot = -1 if load.slot is None else load.slot
    return [*load.key, slot, *(load.evicted or (-1, -1))]


@every_policy
def test_text_of_a_policy_parses_to_it(name):
    policy = parse(name)
    assert policy.spec == name
    other = parse(f"{name}:admit=late,bypass=off" if policy.offline else f"{name}:admit=late")
    assert parse(other.spec) == other


@pytest.mark.parametrize(
    ("spec", "shortest"),
    [
        ("decay:half_life=16.0", "decay"),
        ("decay:half_life=8.0", "decay:half_life=8"),
        ("decay:half_life=0.1", "decay:half_life=0.1"),
        ("decay:half_life=auto", "decay:half_life=auto"),
        ("window:tokens=064", "window"),
        ("window:tokens=auto", "window:tokens=auto"),
        ("slru:hint=on,hint_half_life=16", "slru:hint=on"),
        ("slru:hint=on,hint_half_life=inf", "slru:hint=on,hint_half_life=inf"),
    ],
)
def test_one_policy_has_one_text(spec, shortest):
    assert parse(spec).spec == shortest
    assert parse(shortest) == parse(spec)


TOY = """
    from dataclasses import dataclass
    from typing import Any, ClassVar, NamedTuple

    import numpy as np

    from hotset.policies.base import Policy, compiled


    class State(NamedTuple):
        unused: Any


    @compiled
    def observe(state, table, ask):
        state.unused[0] += 1


    @compiled
    def score(state, table, ask, layer, expert):
        return expert


    @dataclass(frozen=True, kw_only=True)
    class Highest(Policy):
        name: ClassVar[str] = "highest"
        observe: ClassVar[Any] = staticmethod(observe)
        score: ClassVar[Any] = staticmethod(score)

        def start(self, shape):
            return State(np.zeros(1))


    POLICY = Highest
"""


def test_a_new_file_is_a_new_policy(tmp_path, monkeypatch):
    (tmp_path / "highest.py").write_text(dedent(TOY))
    monkeypatch.setattr(hotset.policies, "__path__", [*hotset.policies.__path__, str(tmp_path)])
    assert "highest" in names()
    try:
        events = one_layer(6, 1, [[5], [4], [3], [5], [0], [1], [5], [4]])
        controller = controller_of("highest", events, 2)
        # 5 and 4 sit; each candidate replaces the lowest number: 3 for 4, 0 for 3, 1 for 0, 4 for 1. 5 is hit twice.
        assert controller.replay(events).misses.tolist() == [1, 1, 1, 0, 1, 1, 0, 1]
        assert controller.residents() == [(0, 4), (0, 5)]
    finally:
        sys.modules.pop("hotset.policies.highest", None)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing", 'no policy is called "nothing"; there are belady, '),
        ("lru:half_life=3", 'lru has no option "half_life"; it has admit'),
        ("lru:admit", r'lru has no option "admit"; it has admit \(write name=value\)'),
        ("decay:half_life=long", 'half_life must be a number or auto, not "long"'),
        ("decay:half_life=0", "half_life must be a positive number"),
        ("decay:half_life=nan", "half_life must be a positive number"),
        ("window:tokens=0", "tokens must be 1 to 4096"),
        ("window:tokens=1.5", 'tokens must be a number or auto, not "1.5"'),
        ("slru:protected=1.5", "protected must be a share of the slots"),
        ("slru:hint_half_life=0", "hint_half_life must be a positive number of tokens, or inf"),
        ("slru:hint=maybe", 'hint is on or off, not "maybe"'),
        ("lru:admit=never", 'admit must be one of always, score, late, free, not "never"'),
        ("blend:transitions=maybe", 'transitions is on, off or auto, not "maybe"'),
    ],
)
def test_a_wrong_policy_is_refused_by_name(spec, message):
    with pytest.raises(PolicyError, match=message):
        parse(spec)

"""Slots for experts that no event waits for: in whatever order, every slot has one owner."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from live_samples import ONLINE, SCOPES, arrays_of, ask, assert_same, cache_of

from hotset.cache import Scope
from hotset.engine.slots import SlotCache
from hotset.errors import BudgetError
from hotset.shape import ExpertKey, ModelShape
from hotset.trace import Event, Phase

SHAPE = ModelShape(3, 6, 2)

keys = st.builds(ExpertKey, st.integers(0, SHAPE.layers - 1), st.integers(0, SHAPE.experts - 1))
numbers = st.integers(0, 1000)


def check_slots(controller, held):
    """Every slot is free, or assigned, or reserved, and all counts say so."""
    table = controller.table
    assigned = {int(slot): key for key, slot in np.ndenumerate(table.slot_of) if slot >= 0}
    assert len(assigned) == np.count_nonzero(table.slot_of >= 0)  # no slot is assigned to two
    free = [
        int(slot)
        for group, first in enumerate(table.bounds[:-1])
        for slot in table.free[first : first + table.num_free[group]]
    ]
    assert sorted([*free, *assigned, *held.values()]) == list(range(controller.plan.cached))
    for slot, key in [*assigned.items(), *((slot, key) for key, slot in held.items())]:
        assert (table.layer_in[slot], table.expert_in[slot]) == tuple(key)
        group = table.group_of[key[0]]
        assert table.bounds[group] <= slot < table.bounds[group + 1]
    assert all(table.layer_in[slot] == table.expert_in[slot] == -1 for slot in free)
    np.testing.assert_array_equal(table.resident, (table.slot_of >= 0).sum(axis=1))
    assert set(controller.pins()) <= set(controller.residents())
    assert table.num_pinned.sum() == len(controller.pins())


class Interleaving(RuleBasedStateMachine):
    """Warming, pinning and serving in any order that the lock of an engine allows."""

    @initialize(policy=st.sampled_from(ONLINE), scope=st.sampled_from(SCOPES), slots=st.integers(4, 17))
    def begin(self, policy, scope, slots):
        self.controller = cache_of(SHAPE, slots, policy, scope)
        self.reservations = self.controller.residency
        self.held = {}
        self.warmed = 0

    @rule(key=keys)
    def hold(self, key):
        here = self.controller.table.slot_of[key] >= 0 or key in self.held
        group = self.controller.table.group_of[key.layer]
        room = self.controller.table.num_free[group] > 0
        slot = self.reservations.reserve(key)
        assert (slot is None) == (here or not room)
        if slot is not None:
            self.held[key] = slot

    @rule(wanted=st.lists(keys, max_size=4), evict=st.booleans())
    def hold_all(self, wanted, evict):
        pins = self.controller.pins()
        before = set(self.controller.residents())
        found = self.reservations.reserve_all(wanted, evict=evict)
        assert not found.keys() & (self.held.keys() | set(self.controller.residents()))
        assert evict or before == set(self.controller.residents())
        assert self.controller.pins() == pins
        self.held |= found

    @precondition(lambda self: self.held)
    @rule(number=numbers, pin=st.booleans())
    def commit_one(self, number, pin):
        key = sorted(self.held)[number % len(self.held)]
        pin = pin and self.may_pin(key)
        came_first = self.controller.table.slot_of[key] >= 0
        free = int(self.controller.table.num_free.sum())
        del self.held[key]
        assert SlotCache(self.controller).commit(key, pin=pin) is not bool(came_first)
        assert key in self.controller.residents()
        assert (key in self.controller.pins()) or not pin
        assert self.controller.table.num_free.sum() == free + came_first
        self.warmed += not came_first

    @precondition(lambda self: self.held)
    @rule(number=numbers)
    def give_back(self, number):
        key = sorted(self.held)[number % len(self.held)]
        before = self.controller.residents()
        del self.held[key]
        self.reservations.cancel(key)
        assert self.controller.residents() == before

    @rule(layer=st.integers(0, SHAPE.layers - 1))
    def make_room(self, layer):
        group = self.controller.table.group_of[layer]
        free, before = self.controller.table.num_free[group], set(self.controller.residents())
        found = self.reservations.make_room(layer)
        left = before - set(self.controller.residents())
        assert found == (self.controller.table.num_free[group] > 0)
        assert len(left) == (found and not free)

    @rule(key=keys)
    def pin(self, key):
        if self.may_pin(key):
            self.controller.pin([key])
            assert key in self.controller.pins()

    @precondition(lambda self: set(self.controller.pins()) - self.held.keys())
    @rule(number=numbers)
    def unpin(self, number):
        pins = sorted(set(self.controller.pins()) - self.held.keys())
        self.controller.unpin([pins[number % len(pins)]])
        assert pins[number % len(pins)] not in self.controller.pins()

    @precondition(lambda self: set(self.controller.residents()) - set(self.controller.pins()))
    @rule(number=numbers)
    def drop(self, number):
        loose = sorted(set(self.controller.residents()) - set(self.controller.pins()))
        self.controller.residency.drop([loose[number % len(loose)]])

    @rule(
        layer=st.integers(0, SHAPE.layers - 1),
        counts=st.dictionaries(st.integers(0, SHAPE.experts - 1), st.integers(1, 3), min_size=1),
        phase=st.sampled_from(list(Phase)),
    )
    def serve(self, layer, counts, phase):
        pins, before = set(self.controller.pins()), set(self.controller.residents())
        asked = {ExpertKey(layer, expert) for expert in counts}
        experts = tuple(sorted(counts))
        served = self.controller.serve(Event(0, layer, experts, tuple(counts[e] for e in experts), 3, phase))
        assert {load.key for load in served.loads} == asked - before
        assert not {load.slot for load in served.loads} & set(self.held.values())
        assert not {load.evicted for load in served.loads} & pins
        assigned = {load.key for load in served.loads if load.slot is not None}
        left = {load.evicted for load in served.loads} - {None}
        assert set(self.controller.residents()) == (before | assigned) - left

    def may_pin(self, key):
        """Whether a pin would be taken: room for events is left, and an empty slot if it needs one."""
        table = self.controller.table
        group = table.group_of[key.layer]
        pins = {*self.controller.pins(), key}
        size = table.bounds[group + 1] - table.bounds[group]
        there = sum(table.group_of[layer] == group for layer, _ in pins)
        return there <= max(size - SHAPE.top_k, 0) and (table.slot_of[key] >= 0 or table.num_free[group] > 0)

    @invariant()
    def every_slot_has_one_owner(self):
        if hasattr(self, "held"):
            check_slots(self.controller, self.held)
            assert len(self.reservations.reserved) == len(self.held)
            assert self.reservations.preloaded.sum() == self.warmed


Interleaving.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestInterleaving = Interleaving.TestCase


def full(policy="lru", scope=Scope.LAYER):
    """A cache of two layers with three slots each, and no empty one."""
    controller = cache_of(ModelShape(2, 8, 2), 6, policy, scope)
    for layer in (0, 1):
        ask(controller, layer, 0, 1)
        ask(controller, layer, 2)
    return controller, controller.residency


@pytest.mark.parametrize("scope", SCOPES)
def test_a_slot_given_back_is_as_if_it_was_never_held(scope):
    controller = cache_of(SHAPE, 12, "lfu", scope)
    ask(controller, 0, 1, 2)
    before = arrays_of(controller)
    reservations = controller.residency
    wanted = [ExpertKey(0, 5), ExpertKey(2, 0)]
    held = reservations.reserve_all(wanted)
    assert list(held) == wanted
    for key in reversed(wanted):
        reservations.cancel(key)
    assert_same(arrays_of(controller), before)
    assert len(reservations.reserved) == 0


def test_an_expert_that_is_here_or_on_its_way_gets_no_second_slot():
    controller = cache_of(SHAPE, 12)
    reservations = controller.residency
    ask(controller, 0, 1)
    assert reservations.reserve(ExpertKey(0, 1)) is None
    assert reservations.reserve(ExpertKey(0, 2)) is not None
    assert reservations.reserve(ExpertKey(0, 2)) is None
    assert len(reservations.reserved) == 1


def test_an_expert_on_its_way_is_served_and_its_held_slot_comes_back():
    controller = cache_of(ModelShape(1, 8, 2), 4)
    reservations, key = controller.residency, ExpertKey(0, 7)
    slot = reservations.reserve(key)
    served = ask(controller, 0, 6, 7)
    assert served.hits == 0
    assert all(load.slot not in (None, slot) for load in served.loads)
    assert controller.table.num_free[0] == 1
    assert reservations.commit(key) is False
    assert controller.table.num_free[0] == 2
    assert controller.residents() == [(0, 6), (0, 7)]
    assert not reservations.preloaded.any()
    check_slots(controller, {})


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("scope", SCOPES)
def test_no_event_takes_a_held_slot(policy, scope):
    controller, reservations = full(policy, scope)
    held = reservations.reserve_all([ExpertKey(0, 7)], evict=True)
    assert len(held) == 1
    for first in range(0, 6, 2):
        served = ask(controller, 0, first, first + 1)
        assert not {load.slot for load in served.loads} & set(held.values())
        check_slots(controller, held)
    assert reservations.commit(ExpertKey(0, 7))
    assert ask(controller, 0, 7).hits == 1


def test_room_is_made_by_the_victim_and_only_if_there_is_none():
    controller, reservations = full()
    assert reservations.make_room(0)
    assert controller.residents() == [(0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]  # 0 is as old as 1, and lower
    assert reservations.make_room(0)
    assert len(controller.residents()) == 5


def test_nothing_is_evicted_where_all_slots_are_pinned_or_held():
    controller, reservations = full()
    controller.pin([(0, 0)])
    held = reservations.reserve_all([ExpertKey(0, 6), ExpertKey(0, 7)], evict=True)
    assert len(held) == 2
    assert not reservations.make_room(0)
    assert reservations.reserve_all([ExpertKey(0, 5)], evict=True) == {}
    assert [load.slot for load in ask(controller, 0, 3, 4).loads] == [None, None]
    check_slots(controller, held)


def test_without_leave_to_evict_a_full_layer_is_left_alone():
    controller, reservations = full()
    before = arrays_of(controller)
    assert reservations.reserve_all([ExpertKey(0, 6), ExpertKey(1, 7)]) == {}
    assert_same(arrays_of(controller), before)


def test_a_committed_slot_can_be_pinned_and_is_counted_as_preloaded():
    controller = cache_of(SHAPE, 12)
    reservations, key = controller.residency, ExpertKey(1, 4)
    assert reservations.reserve(key) is not None
    assert SlotCache(controller).commit(key, pin=True)
    assert controller.pins() == [key]
    assert reservations.preloaded[key] == reservations.preloaded.sum() == 1


def test_an_expert_pinned_while_on_its_way_stays_pinned():
    controller = cache_of(SHAPE, 12)
    reservations, key = controller.residency, ExpertKey(1, 4)
    reservations.reserve(key)
    controller.pin([key])
    assert reservations.commit(key) is False
    assert controller.pins() == [key]
    check_slots(controller, {})


def test_pins_that_would_starve_a_layer_are_refused_when_they_arrive():
    controller = cache_of(ModelShape(1, 8, 2), 3)
    reservations = controller.residency
    first, second = ExpertKey(0, 6), ExpertKey(0, 7)
    assert len(reservations.reserve_all([first, second])) == 2
    SlotCache(controller).commit(first, pin=True)
    with pytest.raises(BudgetError, match="2 pins starve layer 0"):
        SlotCache(controller).commit(second, pin=True)
    assert controller.pins() == [first]
    check_slots(controller, {})


def test_a_held_slot_outlives_a_pin_that_came_and_went():
    controller = cache_of(ModelShape(1, 8, 2), 5)
    reservations, key = controller.residency, ExpertKey(0, 7)
    held = {key: reservations.reserve(key)}
    controller.pin([key])
    controller.unpin([key])
    for first in range(0, 6, 2):
        ask(controller, 0, first, first + 1)
        check_slots(controller, held)


def test_nothing_is_evicted_for_an_expert_on_its_way():
    controller, reservations = full()
    reservations.reserve_all([ExpertKey(0, 7)], evict=True)
    before = controller.residents()
    assert reservations.reserve_all([ExpertKey(0, 7)], evict=True) == {}
    assert controller.residents() == before

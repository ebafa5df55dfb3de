"""How slots are laid out, and which budgets are refused."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotset.cache import Controller, Scope, SlotPlan
from hotset.cache.table import make_table
from hotset.errors import BudgetError
from hotset.policies import parse
from hotset.shape import ModelShape

SHAPE = ModelShape(3, 8, 2)


def test_the_first_layers_get_what_does_not_divide():
    plan = SlotPlan(SHAPE, 11)
    assert plan.per_layer().tolist() == [4, 4, 3]
    assert plan.bounds().tolist() == [0, 4, 8, 11]


def test_a_pool_is_one_group():
    assert SlotPlan(SHAPE, 11, Scope.POOL).bounds().tolist() == [0, 11]


@given(layers=st.integers(1, 9), experts=st.integers(1, 20), data=st.data())
def test_layout_of_any_plan(layers, experts, data):
    shape = ModelShape(layers, experts, data.draw(st.integers(1, experts)))
    staging = data.draw(st.integers(0, 5))
    slots = data.draw(st.integers(shape.top_k, 2 * shape.total_experts))
    plan = SlotPlan(shape, slots, data.draw(st.sampled_from(Scope)), staging)
    assert plan.cached == min(slots, shape.total_experts)
    assert plan.bounds()[-1] == plan.cached
    sizes = plan.per_layer()
    assert sizes.sum() == plan.cached
    assert sizes.max() - sizes.min() <= 1
    assert (np.diff(sizes) <= 0).all()


def test_staging_lies_beside_the_cache():
    plan = SlotPlan(SHAPE, 11, staging=3)
    assert plan.cached == 11
    assert plan.per_layer().tolist() == [4, 4, 3]


def test_never_more_slots_than_experts():
    assert SlotPlan(SHAPE, 1000).cached == 24


def test_floors_exist_once_they_all_fit():
    # 3 layers x (2 + 1)
    assert SlotPlan(SHAPE, 8, Scope.POOL).floors().tolist() == [0, 0, 0]
    assert SlotPlan(SHAPE, 9, Scope.POOL).floors().tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    ("spec", "scope", "floors"),
    [
        ("lru", Scope.POOL, [3, 3, 3]),
        ("lru:admit=score", Scope.POOL, [3, 3, 3]),
        ("lru:admit=late", Scope.POOL, [0, 0, 0]),
        ("belady", Scope.POOL, [0, 0, 0]),
        ("belady:bypass=off", Scope.POOL, [3, 3, 3]),
        ("lru", Scope.LAYER, [0, 0, 0]),
    ],
)
def test_floors_hold_in_a_pool_unless_all_is_decided_late(spec, scope, floors):
    controller = Controller(SlotPlan(SHAPE, 12, scope), parse(spec))
    assert controller.table.floor.tolist() == floors


def test_an_empty_table():
    table = make_table(SlotPlan(SHAPE, 11))
    assert table.free.tolist() == [3, 2, 1, 0, 7, 6, 5, 4, 10, 9, 8]
    assert table.num_free.tolist() == [4, 4, 3]
    assert (table.slot_of == -1).all()
    assert not table.counters.any()


def test_a_budget_below_one_event_is_refused_with_the_smallest_that_works():
    message = r"1 slots cannot hold one event \(2 experts\); the smallest that works is 2 slots$"
    with pytest.raises(BudgetError, match=message):
        SlotPlan(SHAPE, 1)
    assert SlotPlan(SHAPE, 2).cached == 2


def test_the_smallest_budget_in_bytes_pays_for_staging():
    with pytest.raises(BudgetError, match=r"the smallest that works is 2 slots \(5(\.0+)? MiB\)"):
        SlotPlan(ModelShape(3, 8, 2, 2**20), 1, staging=3)


def test_the_smallest_budget_is_also_given_in_bytes():
    with pytest.raises(BudgetError, match=r"the smallest that works is 2 slots \(2(\.0+)? MiB\)"):
        SlotPlan(ModelShape(3, 8, 2, 2**20), 0)


def test_negative_staging_is_refused():
    with pytest.raises(BudgetError, match="staging must be a whole number of at least 0"):
        SlotPlan(SHAPE, 8, staging=-1)


def test_lru_in_a_pool_below_one_cycle_is_warned_of():
    warning = SlotPlan(ModelShape(3, 8, 2, 2**20), 5, Scope.POOL).warning("lru")
    assert "5 slots is less than one token's cycle (6 = layers x top_k)" in warning
    assert re.search(r"at least 6 slots \(6(\.0+)? MiB\)", warning)
    assert SlotPlan(SHAPE, 6, Scope.POOL).warning("lru") is None
    assert SlotPlan(SHAPE, 5, Scope.POOL).warning("blend") is None
    assert SlotPlan(SHAPE, 5, Scope.LAYER).warning("lru") is None

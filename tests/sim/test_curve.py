"""The curve of all cache sizes equals a replay at each of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_samples import PUBLIC, random_trace, replay, trace_of

from hotset.cache import Controller, Scope, SlotPlan
from hotset.cache.counters import Count
from hotset.errors import BudgetError
from hotset.policies import parse
from hotset.shape import ModelShape
from hotset.sim import lru_curve
from hotset.trace import Phase
from hotset.trace.combine import interleave
from hotset.trace.importers import import_trace

SHAPE = ModelShape(3, 8, 3)


def lru_hits(events, slots, scope=Scope.LAYER):
    return replay("lru", events, slots, scope)[1].counters.total(Count.HITS)


def lru_hits_without_floors(events, slots):
    controller = Controller(SlotPlan(events.shape, slots, Scope.POOL), parse("lru"))
    controller.table.floor[:] = 0
    return controller.replay(events).counters.total(Count.HITS)


@pytest.mark.parametrize("streams", [1, 3])
def test_every_size_per_layer(streams):
    events = interleave(random_trace(shape=SHAPE), streams).events()
    curve = lru_curve(events)
    assert curve.smallest == events.largest
    sizes = range(events.largest * SHAPE.layers, SHAPE.total_experts + 1)
    assert [curve.hits(slots) for slots in sizes] == [lru_hits(events, slots) for slots in sizes]


@pytest.mark.parametrize("streams", [1, 3])
def test_every_size_of_a_pool(streams):
    events = interleave(random_trace(seed=1, shape=SHAPE), streams).events()
    curve = lru_curve(events, Scope.POOL)
    sizes = range(events.largest, SHAPE.total_experts + 1)
    assert [curve.hits(slots) for slots in sizes] == [lru_hits_without_floors(events, slots) for slots in sizes]
    below_floors = range(events.largest, SHAPE.layers * (SHAPE.top_k + 1))
    expected = [lru_hits(events, slots, Scope.POOL) for slots in below_floors]
    assert [curve.hits(slots) for slots in below_floors] == expected


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_workload(data):
    shape = ModelShape(data.draw(st.integers(1, 3)), 6, 2)
    pair = st.lists(st.integers(0, 5), min_size=2, max_size=2, unique=True)
    token = st.lists(pair, min_size=shape.layers, max_size=shape.layers)
    passes = data.draw(st.lists(st.lists(token, min_size=1, max_size=2), min_size=1, max_size=30))
    events = trace_of(shape, [[(Phase.DECODE, tokens) for tokens in passes]]).events()
    for scope in Scope:
        curve = lru_curve(events, scope)
        groups = shape.layers if scope is Scope.LAYER else 1
        slots = data.draw(st.integers(events.largest * groups, shape.total_experts))
        expected = lru_hits(events, slots) if scope is Scope.LAYER else lru_hits_without_floors(events, slots)
        assert curve.hits(slots) == expected


def test_by_hand():
    shape = ModelShape(1, 4, 1)
    passes = [(Phase.DECODE, [[[expert]]]) for expert in (0, 1, 0, 2, 1, 1)]
    curve = lru_curve(trace_of(shape, [passes]).events())
    # Depths: 0 is found under 1, 1 under 2 and 0, then 1 on top.
    assert curve.found.tolist() == [[1, 1, 1, 0]]
    assert curve.hit_rates(np.array([1, 2, 3, 4])).tolist() == pytest.approx([1 / 6, 2 / 6, 3 / 6, 3 / 6])


def test_the_curve_of_a_phase_sees_only_that_phase():
    trace = random_trace(prompt=4)
    only = trace.take(trace.phase == Phase.DECODE)
    found = lru_curve(trace.events(), phase=Phase.DECODE).found
    np.testing.assert_array_equal(found, lru_curve(only.events()).found)
    prompts = lru_curve(trace.events(), phase=Phase.PREFILL)
    assert prompts.accesses == np.diff(trace.events().start)[trace.events().phase == Phase.PREFILL].sum()


def test_sizes_that_cannot_hold_an_event_are_refused():
    events = random_trace(shape=SHAPE).events()
    with pytest.raises(BudgetError, match="the curve holds from 9 slots on"):
        lru_curve(events).hits(8)
    with pytest.raises(BudgetError, match="from 3 slots on"):
        lru_curve(events, Scope.POOL).hits(2)


def test_more_slots_than_experts_change_nothing():
    events = random_trace(shape=SHAPE).events()
    for scope in Scope:
        curve = lru_curve(events, scope)
        assert curve.hits(1000) == curve.hits(SHAPE.total_experts)


@pytest.mark.public_traces
@pytest.mark.skipif(not (PUBLIC / "gpt-oss-20b.npz").exists(), reason="the public traces are not beside this checkout")
def test_on_a_real_model():
    trace = import_trace(PUBLIC / "gpt-oss-20b.npz")
    events = trace.take(slice(0, 15_000)).events()
    by_layer, by_pool = lru_curve(events), lru_curve(events, Scope.POOL)
    for slots in (96, 200, 384):
        assert by_layer.hits(slots) == lru_hits(events, slots)
        assert by_pool.hits(slots) == lru_hits_without_floors(events, slots)

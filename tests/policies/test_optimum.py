"""Belady is the optimum: an exhaustive search over all contents finds no more hits, and no policy has more."""

from itertools import combinations

import numpy as np
import pytest
from event_samples import decode, random_shape, workloads
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.cache import Controller, Scope, SlotPlan
from hotset.cache.counters import Count
from hotset.policies import names, parse
from hotset.shape import ModelShape
from hotset.trace import Phase

CAUSAL = [name for name in names() if not parse(name).offline]


def hits_of(spec, events, slots, scope):
    replayed = Controller(SlotPlan(events.shape, slots, scope), parse(spec)).replay(events)
    return replayed.counters.total(Count.HITS)


def best_hits(events, plan):
    """The most hits that any contents can give, found by trying all of them after each event."""
    best = {frozenset(): 0}
    for event in events:
        asked = frozenset((event.layer, expert) for expert in event.experts)
        after = {}
        for contents, hits in best.items():
            total = hits + len(contents & asked)
            for kept in _subsets(contents | asked, plan):
                after[kept] = max(after.get(kept, -1), total)
        best = after
    return max(best.values())


def _subsets(keys, plan):
    sizes = plan.per_layer().tolist()
    for number in range(min(len(keys), plan.cached) + 1):
        for kept in map(frozenset, combinations(sorted(keys), number)):
            if plan.scope is Scope.POOL or _fits(kept, sizes):
                yield kept


def _fits(kept, sizes):
    return all(sum(layer == own for layer, _ in kept) <= size for own, size in enumerate(sizes))


def tiny_events(rng, shape, number):
    rows = []
    for _ in range(number):
        width = int(rng.integers(1, shape.experts + 1))
        experts = rng.choice(shape.experts, width, replace=False).tolist()
        rows.append((int(rng.integers(shape.layers)), experts))
    return decode(shape, rows)


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("shape", [ModelShape(1, 5, 1), ModelShape(2, 3, 1), ModelShape(3, 2, 1)])
def test_exhaustive_search_finds_nothing_better(scope, shape):
    rng = np.random.default_rng(1)
    for _ in range(12):
        events = tiny_events(rng, shape, 10)
        for slots in (1, 2, 3):
            best = best_hits(events, SlotPlan(shape, slots, scope))
            assert hits_of("belady", events, slots, scope) == best
            assert hits_of("belady:bypass=off", events, slots, scope) <= best


@settings(max_examples=40, deadline=None)
@given(
    workload=workloads(phases=(Phase.DECODE,), most_events=8, most_layers=2, most_experts=3),
    scope=st.sampled_from(Scope),
)
def test_exhaustive_search_on_any_small_workload(workload, scope):
    events, slots = workload
    assert hits_of("belady", events, slots, scope) == best_hits(events, SlotPlan(events.shape, slots, scope))


@settings(max_examples=60, deadline=None)
@given(workload=workloads(phases=(Phase.DECODE,), most_events=40), scope=st.sampled_from(Scope))
def test_no_policy_beats_it(workload, scope):
    best = hits_of("belady", *workload, scope)
    for spec in [*CAUSAL, "belady:bypass=off", "lru:admit=late", "lfu:admit=score"]:
        assert hits_of(spec, *workload, scope) <= best


def test_no_policy_beats_it_on_longer_workloads():
    rng = np.random.default_rng(2)
    for scope in (*Scope, *Scope):
        shape = random_shape(rng)
        events = tiny_events(rng, shape, 300)
        slots = max(shape.top_k, shape.total_experts // 3)
        best = hits_of("belady", events, slots, scope)
        assert all(hits_of(name, events, slots, scope) <= best for name in CAUSAL)

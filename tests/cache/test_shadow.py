"""The log of a live cache, and shadows that follow it without touching it."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from live_samples import (
    ONLINE,
    SCOPES,
    arrays_of,
    ask,
    assert_same,
    cache_of,
    long_workloads,
    make_events,
    plain,
    random_budget,
    random_events,
    random_shape,
    serve_all,
    serve_live,
)

from hotset.cache.shadow import CounterDelta, log_is_full, shadow_of, take_log, twin_of
from hotset.cache.table import WARM
from hotset.cache.usage import USES
from hotset.shape import ModelShape
from hotset.trace import Phase

SHAPE = ModelShape(2, 6, 2)


def live_cases(policy, number=4):
    """Live caches in both scopes that have served half of a workload, and the other half."""
    rng = np.random.default_rng(5)
    for scope in SCOPES * number:
        shape = random_shape(rng)
        events = random_events(rng, shape, 80)
        live = cache_of(shape, random_budget(rng, shape), policy, scope)
        half = len(events) // 2
        serve_all(live, events.slice(0, half))
        yield live, events.slice(half, len(events))


@settings(max_examples=60, deadline=None)
@given(workload=long_workloads(), cut=st.integers(0, 24))
def test_the_log_holds_exactly_what_was_served_since(workload, cut):
    events, slots = workload
    cut = min(cut, len(events))
    controller = cache_of(events.shape, slots)
    for part in (events.slice(0, cut), events.slice(cut, len(events))):
        serve_all(controller, part)
        assume(not controller.usage.log[2])  # a log that is not read for too long ends: the next test
        logged = take_log(controller.usage, events.shape)
        assert [plain(event) for event in logged] == [plain(event) for event in part]
        assert logged.accesses == part.accesses
    assert len(take_log(controller.usage, events.shape)) == 0


def test_a_log_that_is_not_read_ends_and_the_statistics_go_on():
    controller = cache_of(SHAPE, 6)
    routed = [(i % 2, (i % 5, 5)) for i in range(1000)]
    for layer, experts in routed:
        ask(controller, layer, *experts)
    assert controller.usage.counts[USES].sum() == 2000
    assert log_is_full(controller.usage, SHAPE)
    logged = [(event.layer, event.experts) for event in take_log(controller.usage, SHAPE)]
    assert 32 * SHAPE.layers <= len(logged) < 1000
    assert logged == routed[: len(logged)]
    ask(controller, 1, 3)
    assert [plain(event) for event in take_log(controller.usage, SHAPE)] == [(1, (3,), (1,), 1, Phase.DECODE)]


@pytest.mark.parametrize("width", [1, 2, 6])
def test_a_log_that_is_not_full_takes_another_whole_pass(width):
    controller = cache_of(SHAPE, 6)
    passes = 0
    while passes < 99 and not log_is_full(controller.usage, SHAPE):
        for layer in range(SHAPE.layers):
            ask(controller, layer, *range(width), tokens=9, phase=Phase.PREFILL)
        passes += 1
    assert 1 < passes < 99
    assert len(take_log(controller.usage, SHAPE)) == passes * SHAPE.layers


def test_a_log_of_decode_passes_is_full_after_32():
    controller = cache_of(SHAPE, 6)
    for number in range(32 * SHAPE.layers):
        assert not log_is_full(controller.usage, SHAPE)
        ask(controller, number % SHAPE.layers, 1, 2)
    assert log_is_full(controller.usage, SHAPE)


@pytest.mark.parametrize("policy", ONLINE)
def test_a_twin_goes_on_as_the_live_cache_does(policy):
    for live, rest in live_cases(policy):
        twin = twin_of(live)
        assert_same(arrays_of(twin), arrays_of(live))
        take_log(live.usage, rest.shape)
        for event in rest:
            before = twin.counters()
            misses = serve_live(live, event)
            twin.replay(take_log(live.usage, rest.shape))
            assert int((twin.counters() - before).array[:, 3].sum()) == misses
        ignored = ["table.loads", "table.worth"]
        assert_same(arrays_of(twin), arrays_of(live), but=ignored)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_twin_keeps_pins(scope):
    live = cache_of(SHAPE, 8, "lru", scope)
    live.pin([(0, 4)])
    live.pin([(1, 5)], WARM)
    twin = twin_of(live)
    assert twin.pins() == [(0, 4)]
    assert twin.pins(WARM) == [(1, 5)]


@pytest.mark.parametrize("policy", ["lru", "blend", "slru"])
def test_shadows_never_touch_the_live_cache(policy):
    for live, rest in live_cases(policy, number=2):
        shadows = [twin_of(live), shadow_of(live, "lfu"), shadow_of(live, policy)]
        before, counts = arrays_of(live), live.usage.counts.copy()
        for shadow in shadows:
            shadow.replay(rest)
            shadow.unpin(shadow.pins())
        assert_same(arrays_of(live), before)
        np.testing.assert_array_equal(live.usage.counts, counts)
        assert all(shadow.counters().array.any() for shadow in shadows)


def test_a_shadow_of_another_policy_begins_empty_and_does_what_that_policy_does():
    for live, rest in live_cases("lfu"):
        shadow = shadow_of(live, "lru")
        assert shadow.residents() == []
        alone = cache_of(live.plan.shape, live.plan.slots, "lru", live.plan.scope)
        serve_all(alone, rest)
        shadow.replay(rest)
        np.testing.assert_array_equal(shadow.counters().array, alone.counters().array)
        assert shadow.residents() == alone.residents()


def test_a_delta_counts_decode_since_the_last_read():
    controller = cache_of(SHAPE, 6)
    ask(controller, 0, 1, 2)
    delta = CounterDelta(controller)
    assert delta.read() == (0, 0, 0)
    ask(controller, 0, 1, 3)
    ask(controller, 1, 1, 3)  # the second layer has seen one token, the first two
    ask(controller, 0, 0, 1, 5, tokens=40, phase=Phase.PREFILL)
    assert delta.read() == (1, 1, 3)
    assert delta.read() == (0, 0, 0)


def test_a_logged_batch_keeps_its_counts():
    controller = cache_of(SHAPE, 6)
    table = make_events(SHAPE, [(1, {0: 3, 4: 1}, 3, Phase.DECODE), (0, {2: 500}, 500, Phase.PREFILL)])
    serve_all(controller, table)
    logged = take_log(controller.usage, SHAPE)
    assert logged.count.tolist() == [3, 1, 500]
    assert logged.tokens.tolist() == [3, 500]
    assert logged.phase.tolist() == [Phase.DECODE, Phase.PREFILL]


def test_a_log_that_has_ended_stays_ended():
    controller = cache_of(SHAPE, 6)
    routed = [(i % 2, tuple(range(6 if i % 5 else 1))) for i in range(1000)]
    for layer, experts in routed:
        ask(controller, layer, *experts)
    logged = [(event.layer, event.experts) for event in take_log(controller.usage, SHAPE)]
    assert logged == routed[: len(logged)]


def test_a_shadow_knows_what_single_tokens_chose():
    """Two requests in turns, then a step of both: whose routes the log cannot tell."""
    rng = np.random.default_rng(3)
    shape = ModelShape(3, 12, 2)
    live = cache_of(shape, 18, "nextuse")
    shadow = shadow_of(live, "nextuse")
    for step in range(90):
        for layer in range(shape.layers):
            experts = np.sort(rng.choice(12, 2, replace=False, p=_skewed(step % 2))).astype(np.int32)
            one = np.array([step % 2], np.int32)
            live.route(layer, experts, request=step % 2, routes=experts[None], requests=one)
        if step % 7 == 6:
            shadow.replay(take_log(live.usage, shape))
    shadow.replay(take_log(live.usage, shape))
    assert_same(arrays_of(live), arrays_of(shadow), but=["table.loads", "table.order", "table.counters"])
    assert shadow.state.passes[:2].tolist() == [45, 45]
    both = np.arange(4, dtype=np.int32)
    live.route(0, both, np.ones(4, np.int32), 2, routes=both.reshape(2, 2), requests=np.arange(2, dtype=np.int32))
    (events,) = [take_log(live.usage, shape)]
    assert events.routed.experts.shape[0] == 0
    assert events.routed.bounds.tolist() == [[0, 0]]
    shadow.replay(events)
    assert shadow.state.passes[:2].tolist() == [45, 45]


def _skewed(which):
    weight = np.ones(12)
    weight[4 * which : 4 * which + 3] = 6
    return weight / weight.sum()

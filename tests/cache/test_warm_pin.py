"""Warm pins: pinned if a trial shows that it pays, unpinned once it does not."""

from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_samples import SCOPES, TWO_LAYERS, by_pass, cache_of, random_events, serve_all, skewed_passes

from hotset.cache import Scope
from hotset.cache.counters import Count
from hotset.cache.shadow import take_log
from hotset.cache.table import WARM
from hotset.cache.warm_pin import RETRY, WarmPin, most_used, pin_residents
from hotset.policies import parse
from hotset.shape import ExpertKey, ModelShape
from hotset.trace import Phase

TOKENS = 64
LOOK_PASSES = 16
HOT, OTHER = [0, 1, 2, 3], [20, 21, 22, 23]

both_scopes = pytest.mark.parametrize("scope", SCOPES)


class Bench:
    """A live cache of 16 slots, half of what one layer has, with warm pins after 64 tokens."""

    def __init__(self, policy="lru", scope=Scope.LAYER):
        self.live = cache_of(TWO_LAYERS, 16, policy, scope)
        self.said = []
        self.warm = WarmPin(self.live, TOKENS, self.said.append)
        self.rng = np.random.default_rng(0)

    def run(self, hot, passes=TOKENS):
        """Serve a skewed workload with a look every few passes; returns its hit rate."""
        before = self.live.counters()
        events = by_pass(skewed_passes(self.rng, TWO_LAYERS, hot, passes))
        for number, one in enumerate(events, start=1):
            serve_all(self.live, one)
            if number % LOOK_PASSES == 0:
                self.warm.take(take_log(self.live.usage, TWO_LAYERS))
        return (self.live.counters() - before).hit_rate(Phase.DECODE)


def by_hand(hot):
    return [(layer, expert) for layer in range(2) for expert in hot]


@both_scopes
def test_what_was_used_most_is_protected_and_hits_rise(scope):
    bench = Bench("lru", scope)
    before = bench.run(HOT)
    assert bench.warm.state == "trying"
    assert bench.live.pins(WARM) == []  # nothing happens to the live cache before the trial is over
    bench.run(HOT)
    assert bench.warm.state == "protecting"
    resident = [key for key in by_hand(HOT) if bench.live.table.slot_of[key] >= 0]
    assert bench.live.pins(WARM) == resident  # the others are pinned when they come
    after = bench.run(HOT, 4 * TOKENS)
    assert bench.live.pins(WARM) == by_hand(HOT)
    assert after > before + 0.05
    assert bench.warm.state == "protecting"
    assert bench.said[0].endswith("pinned from now on")
    assert len(bench.said) == 1


@both_scopes
def test_after_a_change_of_workload_it_lets_go_and_observes_anew(scope):
    bench = Bench("lru", scope)
    bench.run(HOT, 3 * TOKENS)
    assert bench.warm.state == "protecting"
    bench.run(OTHER, TOKENS)
    assert bench.warm.state == "observing"
    assert bench.live.pins(WARM) == []
    assert bench.said[-1].endswith("without them: unpinned")
    bench.run(OTHER, 2 * TOKENS + LOOK_PASSES)
    assert bench.live.pins(WARM) == by_hand(OTHER)
    assert [one["protected"] for one in bench.warm.rounds] == [True, True]


@both_scopes
@pytest.mark.parametrize("policy", ["lfu", "static", "blend"])
def test_a_policy_that_gains_nothing_is_left_alone(policy, scope):
    bench = Bench(policy, scope)
    bench.run(HOT, 6 * TOKENS)
    assert bench.warm.state == "declined"
    assert bench.live.pins(WARM) == []
    assert [one["protected"] for one in bench.warm.rounds] == [False]  # asked once, and not again and again
    assert bench.said[-1].endswith("not pinned, it does not pay")
    assert bench.warm.as_dict()["experts"] == []


def test_what_was_declined_is_tried_again_after_a_while_and_said_once():
    bench = Bench("lfu")
    bench.run(HOT, 2 * TOKENS)
    assert bench.warm.state == "declined"
    bench.run(HOT, RETRY * TOKENS)
    assert bench.warm.state == "observing"
    bench.run(HOT, 2 * TOKENS)
    assert [one["protected"] for one in bench.warm.rounds] == [False, False]
    assert len(bench.said) == 1
    bench.run(HOT, RETRY * TOKENS)
    bench.run(OTHER, 2 * TOKENS)  # lfu holds on to the old ones, so that pinning the new ones pays
    assert bench.warm.state == "protecting"
    assert set(bench.live.pins(WARM)) <= set(by_hand(OTHER))
    assert len(bench.live.pins(WARM)) > 4


def test_a_pin_for_good_stays_when_warm_pins_go():
    bench = Bench()
    bench.run(HOT, 3 * TOKENS)
    bench.live.pin([(0, 1)])
    assert bench.live.pins() == [(0, 1)]
    bench.run(OTHER, 2 * TOKENS)
    assert bench.live.pins() == [(0, 1)]
    assert (0, 1) not in bench.live.pins(WARM)
    assert (0, 1) not in most_used(bench.live, np.ones((2, 32), np.int64))


def test_a_log_with_gaps_begins_the_span_anew():
    bench = Bench()
    bench.run(HOT, 2 * TOKENS - LOOK_PASSES)
    bench.warm.take(None)
    bench.run(HOT, TOKENS - LOOK_PASSES)
    assert bench.warm.state == "trying"
    bench.run(HOT, LOOK_PASSES)
    assert bench.warm.state == "protecting"


def test_a_round_says_what_was_predicted_and_what_came():
    bench = Bench()
    bench.run(HOT)
    copies = [deepcopy(bench.live.table), deepcopy(bench.live.save())]
    observed = bench.live.counters()
    bench.run(HOT)
    trial = (bench.live.counters() - observed).hit_rate(Phase.DECODE)  # still without protection
    [one] = bench.warm.rounds
    assert one == {
        "predicted_points": pytest.approx(100 * (protected_rate(copies, TOKENS) - trial)),
        "protected": True,
        "before": observed.hit_rate(Phase.DECODE),
    }
    assert one["predicted_points"] > 0
    after = bench.run(HOT)
    assert bench.warm.rounds[0]["after"] == after
    assert bench.warm.as_dict() == {
        "state": "protecting",
        "tokens": TOKENS,
        "experts": [list(key) for key in by_hand(HOT)],
        "rounds": bench.warm.rounds,
    }


def protected_rate(copies, skipped):
    """The hit rate of the trial, had the live cache been protected from its beginning."""
    table, learnt = copies
    other = cache_of(TWO_LAYERS, 16)
    for name, array in table._asdict().items():
        getattr(other.table, name)[...] = array
    other.restore(learnt)
    rng = np.random.default_rng(0)
    skewed_passes(rng, TWO_LAYERS, HOT, skipped)
    before = other.counters()
    pin_residents(other, map(ExpertKey._make, by_hand(HOT)))
    for number, one in enumerate(by_pass(skewed_passes(rng, TWO_LAYERS, HOT, TOKENS)), start=1):
        serve_all(other, one)
        if number % LOOK_PASSES == 0:
            pin_residents(other, map(ExpertKey._make, by_hand(HOT)))
    return (other.counters() - before).hit_rate(Phase.DECODE)


def test_observing_and_trying_leave_the_live_cache_as_it_is():
    bench, alone = Bench(), cache_of(TWO_LAYERS, 16)
    bench.run(HOT, 2 * TOKENS - LOOK_PASSES)
    alone.replay(skewed_passes(np.random.default_rng(0), TWO_LAYERS, HOT, 2 * TOKENS - LOOK_PASSES))
    assert bench.warm.state == "trying"
    np.testing.assert_array_equal(bench.live.counters().array, alone.counters().array)
    assert bench.live.residents() == alone.residents()


def test_only_decode_since_the_last_beginning_is_observed():
    bench = Bench()
    bench.run(OTHER, 3 * LOOK_PASSES)
    bench.warm.take(None)
    bench.live.route(0, np.arange(8, 16, dtype=np.int32), np.full(8, 900, np.int32), 900, Phase.PREFILL)
    bench.run(HOT)
    assert bench.warm.state == "trying"
    assert bench.warm.chosen == by_hand(HOT)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), scope=st.sampled_from(SCOPES))
def test_never_more_than_half_of_a_layers_slots_are_chosen_and_those_the_most_used(data, scope):
    shape = ModelShape(data.draw(st.integers(1, 3)), 6, 1)
    slots = data.draw(st.integers(1, shape.total_experts))
    numbers = st.lists(st.integers(0, 5), min_size=6, max_size=6)
    uses = np.array([data.draw(numbers) for _ in range(shape.layers)])
    live = cache_of(shape, slots, "lru", scope)
    chosen = np.zeros(uses.shape, bool)
    for key in most_used(live, uses):
        chosen[key] = True
    own = slots // shape.layers
    for layer in range(shape.layers):
        room = own + (layer < slots % shape.layers and scope is Scope.LAYER)
        taken, left = uses[layer, chosen[layer]], uses[layer, ~chosen[layer]]
        assert len(taken) == min(int(room / 2), np.count_nonzero(uses[layer]))
        assert (taken > 0).all()
        assert taken.min(initial=9) >= left.max(initial=0)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    scope=st.sampled_from(SCOPES),
    policy=st.sampled_from(["lru", "lfu", "slru", "decay", "layered", "blend", "blend:admit=always"]),
)
def test_what_is_pinned_is_never_evicted_and_there_is_room_for_every_event(seed, scope, policy):
    rng, shape = np.random.default_rng(seed), ModelShape(2, 8, 2)
    live = cache_of(shape, 8, policy, scope)
    events = list(random_events(rng, shape, 60))
    serve_all(live, events[:20])
    live.pin(live.residents()[:1])
    pin_residents(live, most_used(live, live.usage.counts[0].sum(axis=0)))
    pinned = set(live.pins(WARM)) | set(live.pins())
    for event in events[20:]:
        assert not {load.evicted for load in live.serve(event).loads} & pinned
        assert pinned <= set(live.residents())


def test_released_experts_leave_again():
    live = cache_of(ModelShape(1, 8, 1), 2)
    live.route(0, np.array([0], np.int32))
    pin_residents(live, [ExpertKey(0, 0), ExpertKey(0, 5)])
    for expert in (1, 2, 3):
        live.route(0, np.array([expert], np.int32))
    assert live.residents() == [(0, 0), (0, 3)]
    assert (live.pins(WARM), live.pins()) == ([(0, 0)], [])
    live.unpin([ExpertKey(0, 0)], WARM)
    assert live.pins(WARM) == []
    for expert in (4, 5):
        live.route(0, np.array([expert], np.int32))
    assert live.residents() == [(0, 4), (0, 5)]


def test_a_cache_without_decode_tokens_is_never_judged():
    live = cache_of(TWO_LAYERS, 16)
    warm = WarmPin(live, 1, print)
    for _ in range(5):
        live.route(0, np.arange(8, dtype=np.int32), tokens=100, phase=Phase.PREFILL)
        warm.take(take_log(live.usage, TWO_LAYERS))
    assert warm.state == "observing"
    assert warm.rounds == []
    assert live.counters().total(Count.TOKENS, Phase.DECODE) == 0
    assert parse("lru") == live.policy

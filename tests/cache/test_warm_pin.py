"""Warm pins: protected if a trial says that it pays, let go once it does not."""

from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_samples import SCOPES, TWO_LAYERS, by_pass, cache_of, random_events, serve_all, skewed_passes

from hotset.cache import Scope
from hotset.cache.counters import Count
from hotset.cache.shadow import take_log
from hotset.cache.warm_pin import WarmPin, most_used, protected, release
from hotset.policies import parse
from hotset.shape import ModelShape
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
    assert protected(bench.live) == []  # nothing happens to the live cache before the trial is over
    bench.run(HOT)
    assert bench.warm.state == "protecting"
    assert protected(bench.live) == by_hand(HOT)
    after = bench.run(HOT, 4 * TOKENS)
    assert after > before + 0.05
    assert bench.warm.state == "protecting"
    assert bench.said[0].endswith("protected from now on")
    assert len(bench.said) == 1


@both_scopes
def test_after_a_change_of_workload_it_lets_go_and_observes_anew(scope):
    bench = Bench("lru", scope)
    bench.run(HOT, 3 * TOKENS)
    assert bench.warm.state == "protecting"
    bench.run(OTHER, TOKENS)
    assert bench.warm.state == "observing"
    assert protected(bench.live) == []
    assert bench.said[-1].endswith("without it: let go")
    bench.run(OTHER, 2 * TOKENS)
    assert protected(bench.live) == by_hand(OTHER)
    assert [one["protected"] for one in bench.warm.rounds] == [True, True]


@both_scopes
@pytest.mark.parametrize("policy", ["lfu", "static", "blend"])
def test_a_policy_that_gains_nothing_is_left_alone(policy, scope):
    bench = Bench(policy, scope)
    bench.run(HOT, 6 * TOKENS)
    assert bench.warm.state == "declined"
    assert protected(bench.live) == []
    assert [one["protected"] for one in bench.warm.rounds] == [False]  # asked once, and not again and again
    assert bench.said[-1].endswith("not protected, it does not pay")
    assert bench.warm.as_dict()["experts"] == []


def test_what_was_declined_is_tried_again_after_a_shift():
    bench = Bench("lfu")
    bench.run(HOT, 3 * TOKENS)
    assert bench.warm.state == "declined"
    bench.warm.observe_anew()
    assert bench.warm.state == "observing"
    bench.run(OTHER, 2 * TOKENS)  # lfu holds on to the old ones, so that protection of the new ones pays
    assert bench.warm.state == "protecting"
    assert protected(bench.live) == by_hand(OTHER)


def test_what_is_protected_stays_so_at_a_shift_until_it_loses():
    bench = Bench()
    bench.run(HOT, 2 * TOKENS)
    bench.warm.observe_anew()
    assert bench.warm.state == "protecting"
    assert protected(bench.live) == by_hand(HOT)


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
    chosen = np.zeros((2, 32), bool)
    chosen[:, HOT] = True
    other.policy.set_score_floor(other.state, other.table, chosen)
    rng = np.random.default_rng(0)
    skewed_passes(rng, TWO_LAYERS, HOT, skipped)
    return other.replay(skewed_passes(rng, TWO_LAYERS, HOT, TOKENS)).counters.hit_rate(Phase.DECODE)


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
    bench.warm.observe_anew()
    bench.live.route(0, np.arange(8, 16, dtype=np.int32), np.full(8, 900, np.int32), 900, Phase.PREFILL)
    bench.run(HOT)
    assert bench.warm.state == "trying"
    assert np.argwhere(bench.warm.chosen).tolist() == [list(key) for key in by_hand(HOT)]


@settings(max_examples=80, deadline=None)
@given(data=st.data(), scope=st.sampled_from(SCOPES))
def test_never_more_than_half_of_a_layers_slots_are_chosen_and_those_the_most_used(data, scope):
    shape = ModelShape(data.draw(st.integers(1, 3)), 6, 1)
    slots = data.draw(st.integers(1, shape.total_experts))
    numbers = st.lists(st.integers(0, 5), min_size=6, max_size=6)
    uses = np.array([data.draw(numbers) for _ in range(shape.layers)])
    live = cache_of(shape, slots, "lru", scope)
    chosen = most_used(live, uses)
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
def test_the_protected_leave_only_when_nobody_else_may(seed, scope, policy):
    rng, shape = np.random.default_rng(seed), ModelShape(2, 8, 2)
    live = cache_of(shape, 8, policy, scope)
    chosen = rng.random((2, 8)) < 0.3
    floor = 3 if scope is Scope.POOL else 0  # 2 x (2 + 1) residents fit into 8 slots
    live.policy.set_score_floor(live.state, live.table, chosen)
    for event in random_events(rng, shape, 60):
        residents = set(live.residents())
        for load in live.serve(event).loads:
            if load.evicted is not None and chosen[load.evicted]:
                free = {key for key in residents if may_leave(event, residents, key, scope, floor)}
                assert all(chosen[key] for key in free)
            residents = residents - {load.evicted} | ({load.key} if load.slot is not None else set())


def may_leave(event, residents, key, scope, floor):
    """Not what the event asked for, nor of another layer that would have too few."""
    if key.layer == event.layer:
        return key.expert not in event.experts
    return scope is Scope.POOL and sum(other.layer == key.layer for other in residents) > floor


def test_released_experts_leave_again():
    live = cache_of(ModelShape(1, 8, 1), 2)
    chosen = np.zeros((1, 8), bool)
    chosen[0, 0] = True
    live.policy.set_score_floor(live.state, live.table, chosen)
    for expert in (0, 1, 2, 3):
        live.route(0, np.array([expert], np.int32))
    assert live.residents() == [(0, 0), (0, 3)]
    release(live)
    assert protected(live) == []
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

"""From a profile to a warm cache and back: worth so many tokens, no more, and fading like them."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from live_samples import ONLINE, arrays_of, ask, assert_same, cache_of, random_events, serve_all

from hotset import reference
from hotset.cache.counters import Count
from hotset.cache.learning import hottest, learnt, prime
from hotset.policies.base import EventView
from hotset.profile import Fingerprint, Profile
from hotset.profile.combine import merge
from hotset.profile.fold import profile_of, raw_profile
from hotset.shape import ModelShape
from hotset.trace import Phase

SHAPE = ModelShape(2, 8, 2)
MODEL = Fingerprint("Qwen3MoeForCausalLM", "abc")
REFERENCE = reference.trace("it").shape
QUARTER = REFERENCE.total_experts // 4


def profile(decode=None, **changes):
    """A profile with these decode counts, or none at all."""
    uses = np.zeros((2, 2, 8))
    if decode is not None:
        uses[Phase.DECODE] = decode
    return replace(raw_profile(SHAPE, MODEL, uses, np.array([0, 10])), **changes)


def random_profile(seed=0):
    return profile(np.random.default_rng(seed).gamma(0.5, size=(2, 8)) * 100)


def trained(seed=0, events=60, **options):
    """A blend cache that has served something."""
    controller = cache_of(SHAPE, 8, "blend")
    serve_all(controller, random_events(np.random.default_rng(seed), SHAPE, events, **options))
    return controller


def saved(controller, **changes):
    """What a cache learnt, as a profile of its policy without any counts."""
    return profile(policy=controller.policy.name, learnt=learnt(controller) | changes)


def probabilities(controller):
    """All scores, on a scale on which they add."""
    score, none, shape = controller.policy.score.py_func, np.zeros(0, np.int32), controller.plan.shape
    routes = np.zeros((0, 2), np.int32)
    now = EventView(0, none, none, 1, 1, int(controller.table.clock[0]) + 1, -1, routes, none)
    grid = (shape.layers, shape.experts)
    scores = np.array([score(controller.state, controller.table, now, *key) for key in np.ndindex(grid)], float)
    as_counts = {"decay": np.exp2, "blend": np.exp}.get(controller.policy.name, np.asarray)
    return as_counts(scores.reshape(grid))


@pytest.mark.parametrize("policy", ONLINE)
def test_a_prior_of_nothing_teaches_the_order_among_equals_and_nothing_else(policy):
    heat = random_profile()
    controller, fresh = cache_of(SHAPE, 8, policy), cache_of(SHAPE, 8, policy)
    prime(controller, replace(heat, policy="blend", learnt=learnt(trained())), 0)
    assert_same(arrays_of(controller), arrays_of(fresh), but=["table.last"])
    last = controller.table.last
    assert (last < 0).all()
    for layer, row in enumerate(heat.hotness()):
        np.testing.assert_array_equal(np.argsort(last[layer]), np.argsort(row))
    assert controller.recalled_tokens == 0


def test_among_equals_the_coldest_leaves_first():
    controller = cache_of(SHAPE, 8)
    prime(controller, profile([[1, 4, 3, 2, 0, 0, 0, 0]] * 2), 0)
    controller.preload(profile([[1, 4, 3, 2, 0, 0, 0, 0]] * 2).hotness())
    assert [ask(controller, 0, expert).loads[0].evicted for expert in (4, 5, 6)] == [(0, 0), (0, 3), (0, 2)]


def test_what_was_used_already_stays_later_than_all_that_is_only_known():
    controller = cache_of(SHAPE, 8)
    ask(controller, 0, 7)
    prime(controller, random_profile())
    assert controller.table.last[0, 7] == controller.table.last.max() == 1


def test_a_prior_counts_as_a_prompt_of_so_many_tokens():
    heat = random_profile()
    lfu, decay = cache_of(SHAPE, 8, "lfu"), cache_of(SHAPE, 8, "decay")
    prime(lfu, heat, 64)
    prime(decay, heat, 64)
    np.testing.assert_allclose(lfu.state.uses, 64 * heat.hotness())
    np.testing.assert_allclose(lfu.state.uses.sum(axis=1), 64 * SHAPE.top_k)
    np.testing.assert_allclose(probabilities(decay), 64 * heat.hotness())


@pytest.mark.parametrize("policy", ["lru", "layered"])
def test_recency_can_only_know_the_order(policy):
    controller = cache_of(SHAPE, 8, policy)
    prime(controller, random_profile(), 64)
    assert not controller.state.last.any()


def test_priming_serves_nothing():
    controller = cache_of(SHAPE, 8, "blend")
    prime(controller, random_profile())
    assert not controller.counters().array.any()
    assert not controller.usage.counts.any()
    assert controller.residents() == []


@cache
def reference_profile(name):
    return profile_of(reference.trace(name), MODEL)


@pytest.mark.parametrize("policy", ["blend", "lfu", "decay", "lfru", "static"])
def test_a_prior_of_another_workload_fades(policy):
    primed, cold = cache_of(REFERENCE, QUARTER, policy), cache_of(REFERENCE, QUARTER, policy)
    prime(primed, reference_profile("python"), 64)
    events, served, apart = reference.trace("it").events(), 0, []
    for passes in (8, 858):
        for controller in (primed, cold):
            controller.replay(events.slice(served, 8 * passes))
        served = 8 * passes
        apart.append(np.abs(probabilities(primed) - probabilities(cold)).sum() / probabilities(cold).sum())
    assert apart[0] > 0.05
    assert apart[1] < 0.05
    assert apart[1] < apart[0] / 2


def decode_hits(policy, events, tokens, known):
    """Hits and misses of the first decode tokens, the slots filled with the hottest of the profile, if any."""
    controller = cache_of(REFERENCE, QUARTER, policy)
    if known is not None:
        prime(controller, known)
        controller.preload(known.hotness())
    last = np.flatnonzero((events.phase == Phase.DECODE) & (events.layer == REFERENCE.layers - 1))[tokens - 1]
    done = controller.replay(events.slice(0, int(last) + 1)).counters
    return np.array([done.total(Count.HITS, Phase.DECODE), done.total(Count.MISSES, Phase.DECODE)])


@pytest.mark.parametrize("policy", ["blend", "lru", "lfu", "decay", "slru"])
def test_its_own_profile_raises_the_hits_of_the_first_tokens_of_other_requests(policy):
    fit, judge = reference.trace("it").split()
    starts = [judge.select([request]).events() for request in range(judge.requests)]
    cold, warm = (sum(decode_hits(policy, e, 8, known) for e in starts) for known in (None, profile_of(fit, MODEL)))
    assert warm[0] / warm.sum() > cold[0] / cold.sum() + 0.005


@pytest.mark.parametrize("wrong", ["python", "ja"])
@pytest.mark.parametrize("policy", ["blend", "lru", "lfu", "decay", "slru", "lfru", "window"])
def test_a_wrong_profile_costs_less_than_two_points_over_256_tokens(policy, wrong):
    events = reference.trace("it").events()
    cold, warm = (decode_hits(policy, events, 256, known) for known in (None, reference_profile(wrong)))
    assert warm[0] / warm.sum() > cold[0] / cold.sum() - 0.02


def test_the_hottest_come_first_and_the_unused_not_at_all():
    heat = profile([[0, 3, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 2, 2]])
    assert hottest(heat) == [(0, 1), (1, 6), (1, 7), (0, 2)]
    assert hottest(profile()) == []


@pytest.mark.parametrize("policy", sorted(set(ONLINE) - {"blend", "nextuse"}))
def test_policies_that_only_count_carry_nothing(policy):
    controller = cache_of(SHAPE, 8, policy)
    ask(controller, 0, 1)
    assert learnt(controller) == {}


def test_what_was_learnt_survives_a_file_and_a_new_start(tmp_path):
    first = trained(prefill=0.0)
    saved(first).save(tmp_path / "it.profile")
    second = cache_of(SHAPE, 8, "blend")
    prime(second, Profile.load(tmp_path / "it.profile"), 10_000)
    for name in ("shared", "own", "follows", "followed"):
        np.testing.assert_array_equal(getattr(second.state, name), getattr(first.state, name))
    before, after = learnt(first), learnt(second)
    assert before.keys() == after.keys()
    assert before["sum.tokens"] == after["sum.tokens"] > 0


def test_what_is_learnt_is_a_copy():
    controller = trained()
    learnt(controller)["sum.followed"][...] = -1.0
    assert (controller.state.followed >= 0).all()


def test_merged_learning_adds_counts_and_averages_weights():
    some, other = trained(1), trained(2, events=90)
    weigh = [replace(saved(c), uses=np.full((2, 2, 8), mass)) for c, mass in ((some, 3.0), (other, 1.0))]
    merged = merge(weigh)
    controller = cache_of(SHAPE, 8, "blend")
    prime(controller, replace(merged, uses=np.zeros((2, 2, 8))), 10_000)
    np.testing.assert_allclose(controller.state.followed, some.state.followed + other.state.followed)
    np.testing.assert_allclose(controller.state.own, 0.75 * some.state.own + 0.25 * other.state.own)
    tokens = [c.table.counters[Phase.DECODE, Count.TOKENS].max() for c in (some, other)]
    assert controller.recalled_tokens == sum(tokens)


@pytest.mark.parametrize(("prior", "share"), [(25, 0.25), (100, 1.0), (1000, 1.0)])
def test_counts_are_cut_to_what_the_prior_is_worth(prior, share):
    first = trained()
    second = cache_of(SHAPE, 8, "blend")
    prime(second, saved(first, **{"sum.tokens": np.array([100.0])}), prior)
    np.testing.assert_allclose(second.state.followed, share * first.state.followed)
    np.testing.assert_allclose(second.state.follows, share * first.state.follows, rtol=1e-6)
    np.testing.assert_array_equal(second.state.shared, first.state.shared)  # a mean does not grow with tokens
    assert second.recalled_tokens == 100 * share


def test_what_was_recalled_counts_on():
    controller = cache_of(SHAPE, 8, "blend")
    prime(controller, saved(trained(), **{"sum.tokens": np.array([100.0])}), 40)
    for _ in range(5):
        ask(controller, 0, 1, 2)
    assert learnt(controller)["sum.tokens"].tolist() == [45.0]


def primed_with(**changes):
    controller = cache_of(SHAPE, 8, "blend")
    prime(controller, saved(trained(), **changes), 10_000)
    return controller


@pytest.mark.parametrize(
    "broken",
    [np.zeros((3, 8)), np.zeros(0), np.full((2, 8), np.nan), np.full((2, 8), np.inf), np.zeros((2, 8, 1))],
    ids=["more layers", "empty", "not a number", "infinite", "deeper"],
)
def test_an_array_that_does_not_fit_is_ignored_and_the_others_are_not(broken):
    controller = primed_with(**{"sum.followed": broken})
    assert not controller.state.followed.any()
    np.testing.assert_array_equal(controller.state.shared, trained().state.shared)
    ask(controller, 0, 1, 2)
    assert np.isfinite(controller.state.worth).all()


@pytest.mark.parametrize("weight", [[0.0], [-5.0], [1.0, 2.0], []])
def test_learning_of_no_known_worth_is_ignored(weight):
    controller = primed_with(**{"sum.tokens": np.array(weight)})
    assert_same(arrays_of(controller), arrays_of(cache_of(SHAPE, 8, "blend")), but=["table.last"])
    assert controller.recalled_tokens == 0


@pytest.mark.parametrize("weight", [np.inf, np.nan])
def test_learning_worth_infinitely_much_is_ignored(weight):
    assert primed_with(**{"sum.tokens": np.array([weight])}).recalled_tokens == 0


def test_counts_below_nothing_are_ignored():
    controller = primed_with(**{"sum.followed": np.full((2, 8), -4.0)})
    for _ in range(4):
        ask(controller, 0, 1, 2)
    assert np.isfinite(controller.state.worth).all()


def test_what_another_policy_learnt_is_not_taken():
    controller, fresh = cache_of(SHAPE, 8, "blend"), cache_of(SHAPE, 8, "blend")
    prime(controller, replace(saved(trained()), policy="lfu"), 10_000)
    assert_same(arrays_of(controller), arrays_of(fresh), but=["table.last"])

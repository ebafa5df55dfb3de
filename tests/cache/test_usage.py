"""The live statistics against a slow count in plain Python, written from the words and not from the code."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_samples import ONLINE, SCOPES, arrays_of, ask, assert_same, cache_of, long_workloads, serve_all

from hotset.cache.counters import Count
from hotset.cache.statistics import phase_tokens, statistics_of
from hotset.cache.usage import HITS, MISSES, USES, ages, rates, window_counts
from hotset.profile.statistics import History
from hotset.shape import ModelShape
from hotset.trace import Phase

SMALL = ModelShape(1, 6, 1)


class SlowUsage:
    """Remembers every event, and works everything out when asked."""

    def __init__(self):
        self.uses, self.hits, self.misses = Counter(), Counter(), Counter()
        self.now = Counter()  # tokens seen, by layer
        self.past = defaultdict(list)  # by layer: the first and last token of an event, and its counts

    def take(self, event, residents):
        first = self.now[event.layer] + 1
        self.now[event.layer] += event.tokens
        counts = dict(zip(event.experts, event.counts, strict=True))
        self.past[event.layer].append((first, self.now[event.layer], counts))
        for expert, count in counts.items():
            key = (event.phase, event.layer, expert)
            self.uses[key] += count
            (self.hits if (event.layer, expert) in residents else self.misses)[key] += 1

    def rate(self, layer, expert):
        """Each token counts for half of what a token 64 later does; an event's uses are spread over its tokens."""
        now = self.now[layer]
        weight = 0.5 ** ((now - np.arange(1, now + 1)) / 64)  # of the tokens 1, 2, ... now
        used = sum(
            counts.get(expert, 0) / (last - first + 1) * weight[first - 1 : last].sum()
            for first, last, counts in self.past[layer]
        )
        return used / weight.sum() if now else 0.0

    def window(self, layer, expert):
        """Uses in the eight buckets of 32 tokens that end with the present one; an event is in that of its end."""
        present = (self.now[layer] - 1) // 32
        inside = [counts for _, last, counts in self.past[layer] if (last - 1) // 32 > present - 8]
        return sum(counts.get(expert, 0) for counts in inside)

    def age(self, layer, expert):
        """Tokens since the last event that used it, or -1."""
        ends = [last for _, last, counts in self.past[layer] if expert in counts]
        return self.now[layer] - ends[-1] if ends else -1

    def grid(self, shape, function):
        return np.array([[function(layer, e) for e in range(shape.experts)] for layer in range(shape.layers)])


def follow(controller, events):
    """Serve events, and let a slow count see the same."""
    slow = SlowUsage()
    for event in events:
        residents = set(controller.residents())
        controller.serve(event)
        slow.take(event, residents)
    return slow


@settings(max_examples=120, deadline=None)
@given(workload=long_workloads(), policy=st.sampled_from(ONLINE), scope=st.sampled_from(SCOPES))
def test_the_statistics_are_those_of_a_slow_count(workload, policy, scope):
    events, slots = workload
    controller = cache_of(events.shape, slots, policy, scope)
    slow, usage, shape = follow(controller, events), controller.usage, events.shape
    for kind, counts in ((USES, slow.uses), (HITS, slow.hits), (MISSES, slow.misses)):
        for phase in Phase:
            expected = slow.grid(shape, lambda layer, e: counts[phase, layer, e])  # noqa: B023 - used at once
            np.testing.assert_array_equal(usage.counts[kind, phase], expected)
    np.testing.assert_array_equal(window_counts(usage), slow.grid(shape, slow.window))
    np.testing.assert_array_equal(ages(usage), slow.grid(shape, slow.age))
    np.testing.assert_allclose(rates(usage), slow.grid(shape, slow.rate), rtol=1e-9, atol=1e-15)


@settings(max_examples=60, deadline=None)
@given(workload=long_workloads(), policy=st.sampled_from(ONLINE), scope=st.sampled_from(SCOPES))
def test_hits_and_misses_are_the_experts_asked_for(workload, policy, scope):
    events, slots = workload
    controller = cache_of(events.shape, slots, policy, scope)
    serve_all(controller, events)
    hits, misses = controller.usage.counts[HITS], controller.usage.counts[MISSES]
    np.testing.assert_array_equal(hits.sum(axis=2), controller.table.counters[:, Count.HITS])
    np.testing.assert_array_equal(misses.sum(axis=2), controller.table.counters[:, Count.MISSES])
    assert int(hits.sum() + misses.sum()) == events.accesses
    assert (hits >= 0).all()


@settings(max_examples=60, deadline=None)
@given(workload=long_workloads(), policy=st.sampled_from(ONLINE), scope=st.sampled_from(SCOPES))
def test_the_statistics_do_not_change_what_the_cache_does(workload, policy, scope):
    events, slots = workload
    live, replayed = (cache_of(events.shape, slots, policy, scope) for _ in range(2))
    misses = serve_all(live, events)  # with statistics
    assert replayed.replay(events).misses.tolist() == misses  # without
    assert not replayed.usage.counts.any()
    rest = len(events) and misses[-1]
    live.table.loads[rest:], replayed.table.loads[rest:] = -1, -1  # scratch
    live.table.worth[:], replayed.table.worth[:] = 0, 0
    assert_same(arrays_of(live), arrays_of(replayed))


def test_nothing_is_known_of_a_cache_that_served_nothing():
    usage = cache_of(SMALL, 3).usage
    assert not rates(usage).any()
    assert not window_counts(usage).any()
    assert (ages(usage) == -1).all()


def test_a_use_leaves_the_window_with_its_bucket():
    controller = cache_of(SMALL, 3)
    ask(controller, 0, 5)
    for _ in range(255):
        ask(controller, 0, 1)
    assert window_counts(controller.usage)[0].tolist() == [0, 255, 0, 0, 0, 1]  # 256 tokens, the first bucket included
    ask(controller, 0, 1)
    assert window_counts(controller.usage)[0].tolist() == [0, 225, 0, 0, 0, 0]  # tokens 33 to 257


def test_a_use_is_worth_half_after_64_tokens():
    controller = cache_of(SMALL, 3)
    ask(controller, 0, 5)
    for _ in range(63):
        ask(controller, 0, 1)
    ask(controller, 0, 2)
    rate = rates(controller.usage)[0]
    assert rate[5] == pytest.approx(rate[2] / 2)
    assert ages(controller.usage)[0].tolist() == [-1, 1, 0, -1, -1, 64]


def test_an_expert_that_every_token_uses_has_rate_one_whatever_the_passes():
    controller = cache_of(SMALL, 3)
    for tokens in (1, 40, 1, 700, 3):
        controller.route(0, np.array([4], np.int32), np.array([tokens], np.int32), tokens, Phase.PREFILL)
        assert rates(controller.usage)[0, 4] == pytest.approx(1.0)


def test_loads_are_demand_and_background_together():
    controller = cache_of(ModelShape(2, 4, 1), 4)
    ask(controller, 0, 1)
    ask(controller, 0, 1, tokens=5, phase=Phase.PREFILL)
    ask(controller, 1, 3)
    warmed = np.zeros((2, 4), np.int64)
    warmed[0, 1], warmed[1, 0] = 2, 1
    each_bytes = np.array([[10] * 4, [100] * 4])
    found = statistics_of(controller, warmed, each_bytes, History.empty())
    assert found.loads.tolist() == [[0, 3, 0, 0], [1, 0, 0, 1]]
    assert found.loaded_bytes.tolist() == [[0, 30, 0, 0], [100, 0, 0, 100]]
    assert phase_tokens(controller).tolist() == found.tokens.tolist() == [5, 1]
    assert found.resident.tolist() == [[False, True, False, False], [False, False, False, True]]

"""What is noted between passes: hits over time, marks where they belong, and little work while there is nothing new."""

import numpy as np
import pytest
from live_samples import (
    TWO_LAYERS,
    ask,
    by_pass,
    cache_of,
    make_events,
    random_events,
    serve_all,
    skewed_passes,
)

from hotset.cache import monitor as monitor_module
from hotset.cache.counters import Count
from hotset.cache.monitor import CacheMonitor
from hotset.shape import ModelShape
from hotset.trace import Phase

SMALL = ModelShape(2, 8, 2)
LOG_PASSES = 32


def monitored(policy="lru", shape=TWO_LAYERS, slots=16, **options):
    live = cache_of(shape, slots, policy)
    said = []
    return live, CacheMonitor(live, said.append, **options), said


def run(live, monitor, passes):
    for events in passes:
        serve_all(live, events)
        if monitor.is_due:
            monitor.poll()


def tokens(number, shape=SMALL, seed=0):
    """So many decode passes of one token each."""
    rng = np.random.default_rng(seed)
    hot = list(range(shape.experts // 2))
    return by_pass(skewed_passes(rng, shape, hot, number))


@pytest.mark.parametrize("policy", ["lru", "blend"])
def test_the_spans_add_up_to_the_counters(policy):
    rng = np.random.default_rng(3)
    live, monitor, _ = monitored(policy, SMALL, 8)
    for _ in range(40):
        run(live, monitor, tokens(int(rng.integers(1, 12)), seed=int(rng.integers(99))))
        prompt = {int(expert): 20 for expert in rng.choice(8, 5, replace=False)}
        run(live, monitor, [make_events(SMALL, [(layer, prompt, 40, Phase.PREFILL) for layer in (0, 1)])])
        if rng.random() < 0.3:
            monitor.poll()
    monitor.poll()
    spans, decode = monitor.history().spans, live.table.counters[Phase.DECODE]
    assert len(spans) > 5
    expected = [decode[Count.TOKENS].max(), decode[Count.HITS].sum(), decode[Count.MISSES].sum()]
    assert spans.sum(axis=0).tolist() == expected
    assert (spans[:, 0] > 0).all()


def test_a_span_holds_what_was_hit_in_its_tokens():
    live, monitor, _ = monitored(shape=SMALL, slots=8)
    for experts in ((0, 1), (0, 1)):
        for layer in (0, 1):
            ask(live, layer, *experts)
        monitor.poll()
    assert monitor.history().spans.tolist() == [[1, 0, 4], [1, 4, 0]]


def test_prompts_alone_make_no_span():
    live, monitor, _ = monitored(shape=SMALL, slots=8)
    ask(live, 0, 1, 2, tokens=30, phase=Phase.PREFILL)
    monitor.poll()
    assert len(monitor.history().spans) == 0


def test_marks_lie_at_the_tokens_at_which_they_were_set():
    live, monitor, _ = monitored(shape=SMALL, slots=8)
    monitor.mark("begin")
    run(live, monitor, tokens(10))
    monitor.mark("italian")
    monitor.mark("of rome")
    run(live, monitor, tokens(70, seed=1))
    monitor.mark("end")
    assert monitor.history().marks == ((0, "begin"), (10, "italian"), (10, "of rome"), (80, "end"))
    assert monitor.history().tokens.tolist() == [10, 42, 74, 80]


def test_history_has_no_more_spans_than_the_most_and_keeps_the_latest(monkeypatch):
    monkeypatch.setattr(monitor_module, "MAX_SPANS", 4)
    live, monitor, _ = monitored(shape=SMALL, slots=8)
    for number in range(1, 11):
        run(live, monitor, tokens(number))
        monitor.mark(f"after {number}")
    history = monitor.history()
    assert history.spans[:, 0].tolist() == [7, 8, 9, 10]
    assert history.marks == ((7, "after 7"), (15, "after 8"), (24, "after 9"), (34, "after 10"))


def test_a_mark_is_forgotten_with_its_tokens(monkeypatch):
    monkeypatch.setattr(monitor_module, "MAX_SPANS", 3)
    live, monitor, _ = monitored(shape=SMALL, slots=8)
    run(live, monitor, tokens(2))
    monitor.mark("early")
    for _ in range(4):
        run(live, monitor, tokens(5))
        monitor.poll()
    assert monitor.history().spans[:, 0].tolist() == [5, 5, 5]
    assert monitor.history().marks == ()


def test_nothing_is_done_while_the_log_is_not_full(monkeypatch):
    live, monitor, _ = monitored("blend", SMALL, 8, warm_pin_tokens=16)
    looks = []
    monkeypatch.setattr(monitor, "poll", lambda: looks.append(live.usage.log[0]))
    run(live, monitor, tokens(LOG_PASSES - 1))
    assert looks == []
    assert live.usage.log[0] == (LOG_PASSES - 1) * SMALL.layers
    run(live, monitor, tokens(1))
    assert looks == [LOG_PASSES * SMALL.layers]


def test_the_log_is_empty_after_a_poll():
    live, monitor, _ = monitored(shape=SMALL, slots=8)
    run(live, monitor, tokens(LOG_PASSES))
    assert live.usage.log[0] == 0
    assert monitor.history().tokens.tolist() == [LOG_PASSES]


def test_a_poll_without_news_changes_nothing():
    live, monitor, _ = monitored(shape=SMALL, slots=8)
    run(live, monitor, tokens(5))
    for _ in range(3):
        monitor.poll()
    assert monitor.history().tokens.tolist() == [5]


def test_plain_lru_has_no_comparison():
    assert monitored("lru")[1].comparison is None
    assert monitored("lru:admit=score")[1].comparison is not None


def test_the_comparison_sees_every_event():
    live, monitor, _ = monitored("lfu", SMALL, 8)
    events = random_events(np.random.default_rng(1), SMALL, 500)
    for number, event in enumerate(events):
        live.serve(event)
        if number % 2 and monitor.is_due:
            monitor.poll()
    monitor.poll()
    alone = cache_of(SMALL, 8, "lru")
    alone.replay(events)
    np.testing.assert_array_equal(monitor.comparison.shadow.counters().array, alone.counters().array)


def test_the_monitor_does_not_change_what_the_cache_does():
    watched, monitor, _ = monitored("blend", SMALL, 8, warm_pin_tokens=4096)
    alone = cache_of(SMALL, 8, "blend")
    passes = tokens(200)
    run(watched, monitor, passes)
    for events in passes:
        serve_all(alone, events)
    np.testing.assert_array_equal(watched.counters().array, alone.counters().array)
    assert watched.residents() == alone.residents()


def test_polls_in_the_middle_of_a_pass_lose_nothing():
    live, monitor, _ = monitored(shape=SMALL, slots=8)
    for layer in (0, 1):
        ask(live, layer, 0, 1)
        monitor.poll()
    assert monitor.history().spans.sum(axis=0).tolist() == [1, 0, 4]

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

from hotset.cache import supervisor as supervisor_module
from hotset.cache.counters import Count
from hotset.cache.supervisor import SHIFT, Supervisor
from hotset.shape import ModelShape
from hotset.trace import Phase

SMALL = ModelShape(2, 8, 2)
LOG_PASSES = 32


def supervised(policy="lru", shape=TWO_LAYERS, slots=16, **options):
    live = cache_of(shape, slots, policy)
    said = []
    return live, Supervisor(live, said.append, **options), said


def run(live, supervisor, passes):
    for events in passes:
        serve_all(live, events)
        supervisor.after_pass()


def tokens(number, shape=SMALL, seed=0):
    """So many decode passes of one token each."""
    rng = np.random.default_rng(seed)
    hot = list(range(shape.experts // 2))
    return by_pass(skewed_passes(rng, shape, hot, number))


@pytest.mark.parametrize("policy", ["lru", "blend"])
def test_the_spans_add_up_to_the_counters(policy):
    rng = np.random.default_rng(3)
    live, supervisor, _ = supervised(policy, SMALL, 8)
    for _ in range(40):
        run(live, supervisor, tokens(int(rng.integers(1, 12)), seed=int(rng.integers(99))))
        prompt = {int(expert): 20 for expert in rng.choice(8, 5, replace=False)}
        run(live, supervisor, [make_events(SMALL, [(layer, prompt, 40, Phase.PREFILL) for layer in (0, 1)])])
        if rng.random() < 0.3:
            supervisor.look()
    supervisor.look()
    spans, decode = supervisor.history().spans, live.table.counters[Phase.DECODE]
    assert len(spans) > 5
    expected = [decode[Count.TOKENS].max(), decode[Count.HITS].sum(), decode[Count.MISSES].sum()]
    assert spans.sum(axis=0).tolist() == expected
    assert (spans[:, 0] > 0).all()


def test_a_span_holds_what_was_hit_in_its_tokens():
    live, supervisor, _ = supervised(shape=SMALL, slots=8)
    for experts in ((0, 1), (0, 1)):
        for layer in (0, 1):
            ask(live, layer, *experts)
        supervisor.look()
    assert supervisor.history().spans.tolist() == [[1, 0, 4], [1, 4, 0]]


def test_prompts_alone_make_no_span():
    live, supervisor, _ = supervised(shape=SMALL, slots=8)
    ask(live, 0, 1, 2, tokens=30, phase=Phase.PREFILL)
    supervisor.look()
    assert len(supervisor.history().spans) == 0


def test_marks_lie_at_the_tokens_at_which_they_were_set():
    live, supervisor, _ = supervised(shape=SMALL, slots=8)
    supervisor.mark("begin")
    run(live, supervisor, tokens(10))
    supervisor.mark("italian")
    supervisor.mark("of rome")
    run(live, supervisor, tokens(70, seed=1))
    supervisor.mark("end")
    assert supervisor.history().marks == ((0, "begin"), (10, "italian"), (10, "of rome"), (80, "end"))
    assert supervisor.history().tokens.tolist() == [10, 42, 74, 80]


def test_history_has_no_more_spans_than_the_most_and_keeps_the_latest(monkeypatch):
    monkeypatch.setattr(supervisor_module, "MAX_SPANS", 4)
    live, supervisor, _ = supervised(shape=SMALL, slots=8)
    for number in range(1, 11):
        run(live, supervisor, tokens(number))
        supervisor.mark(f"after {number}")
    history = supervisor.history()
    assert history.spans[:, 0].tolist() == [7, 8, 9, 10]
    assert history.marks == ((7, "after 7"), (15, "after 8"), (24, "after 9"), (34, "after 10"))


def test_a_mark_is_forgotten_with_its_tokens(monkeypatch):
    monkeypatch.setattr(supervisor_module, "MAX_SPANS", 3)
    live, supervisor, _ = supervised(shape=SMALL, slots=8)
    run(live, supervisor, tokens(2))
    supervisor.mark("early")
    for _ in range(4):
        run(live, supervisor, tokens(5))
        supervisor.look()
    assert supervisor.history().spans[:, 0].tolist() == [5, 5, 5]
    assert supervisor.history().marks == ()


def test_nothing_is_done_while_the_log_is_not_full(monkeypatch):
    live, supervisor, _ = supervised("blend", SMALL, 8, warm_pin_tokens=16)
    looks = []
    monkeypatch.setattr(supervisor, "look", lambda: looks.append(live.usage.log[0]))
    run(live, supervisor, tokens(LOG_PASSES - 1))
    assert looks == []
    assert live.usage.log[0] == (LOG_PASSES - 1) * SMALL.layers
    run(live, supervisor, tokens(1))
    assert looks == [LOG_PASSES * SMALL.layers]


def test_the_log_is_empty_after_a_look():
    live, supervisor, _ = supervised(shape=SMALL, slots=8)
    run(live, supervisor, tokens(LOG_PASSES))
    assert live.usage.log[0] == 0
    assert supervisor.history().tokens.tolist() == [LOG_PASSES]


def test_a_look_without_news_changes_nothing():
    live, supervisor, _ = supervised(shape=SMALL, slots=8)
    run(live, supervisor, tokens(5))
    for _ in range(3):
        supervisor.look()
    assert supervisor.history().tokens.tolist() == [5]


def test_plain_lru_has_no_rival():
    assert supervised("lru")[1].rival is None
    assert supervised("lru:admit=score")[1].rival is not None


def test_the_rival_sees_every_event():
    live, supervisor, _ = supervised("lfu", SMALL, 8)
    events = random_events(np.random.default_rng(1), SMALL, 500)
    for number, event in enumerate(events):
        live.serve(event)
        if number % 2:
            supervisor.after_pass()
    supervisor.look()
    alone = cache_of(SMALL, 8, "lru")
    alone.replay(events)
    np.testing.assert_array_equal(supervisor.rival.shadow.counters().array, alone.counters().array)


def test_a_change_of_workload_is_marked_where_the_span_began_that_shows_it():
    rng = np.random.default_rng(0)
    live, supervisor, _ = supervised()
    for hot in ([0, 1, 2, 3], [20, 21, 22, 23]):
        run(live, supervisor, by_pass(skewed_passes(rng, TWO_LAYERS, hot, 8 * LOG_PASSES)))
    assert supervisor.history().marks == ((8 * LOG_PASSES, SHIFT),)


def test_a_change_of_workload_lets_warm_pins_try_again():
    rng = np.random.default_rng(0)
    live, supervisor, said = supervised("lfu", warm_pin_tokens=64)
    for hot in ([0, 1, 2, 3], [20, 21, 22, 23]):
        run(live, supervisor, by_pass(skewed_passes(rng, TWO_LAYERS, hot, 8 * LOG_PASSES)))
    assert [one["protected"] for one in supervisor.warm_pin.rounds] == [False, True]
    assert len(said) == 2


def test_one_workload_is_not_marked():
    live, supervisor, _ = supervised()
    run(live, supervisor, by_pass(skewed_passes(np.random.default_rng(0), TWO_LAYERS, [0, 1, 2, 3], 640)))
    assert supervisor.history().marks == ()


def test_few_tokens_at_a_time_are_judged_together():
    rng = np.random.default_rng(0)
    live, supervisor, _ = supervised()
    for hot in ([0, 1, 2, 3], [20, 21, 22, 23]):
        for _ in range(60):
            run(live, supervisor, by_pass(skewed_passes(rng, TWO_LAYERS, hot, 5)))
            supervisor.look()
    assert [mark.label for mark in supervisor.history().marks] == [SHIFT]
    assert supervisor.history().marks[0].tokens in (300, 275, 325)


def test_the_supervisor_does_not_change_what_the_cache_does():
    watched, supervisor, _ = supervised("blend", SMALL, 8, warm_pin_tokens=4096)
    alone = cache_of(SMALL, 8, "blend")
    passes = tokens(200)
    run(watched, supervisor, passes)
    for events in passes:
        serve_all(alone, events)
    np.testing.assert_array_equal(watched.counters().array, alone.counters().array)
    assert watched.residents() == alone.residents()


def test_looks_in_the_middle_of_a_pass_lose_nothing():
    live, supervisor, _ = supervised(shape=SMALL, slots=8)
    for layer in (0, 1):
        ask(live, layer, 0, 1)
        supervisor.look()
    assert supervisor.history().spans.sum(axis=0).tolist() == [1, 0, 4]

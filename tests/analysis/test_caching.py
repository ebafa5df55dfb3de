"""What a cache did: precision, recall and residency against a slow lru, and hit rates as the simulator has them."""

from __future__ import annotations

import numpy as np
import pytest
from routed_samples import by_hand, drawn, without

from hotset.analysis import caching
from hotset.analysis.caching import CacheQuestion, Kept, count_replays, measure_caching
from hotset.analysis.lookahead import measure_lookahead
from hotset.errors import BudgetError, HotsetError, PolicyError
from hotset.trace import Phase, Trace
from hotset.trace.run import Run

LRU = CacheQuestion(policies=["lru"], budgets=["4 slots"])


def only(found: list[Kept], policy: str) -> Kept:
    (one,) = (each for each in found if each.policy == policy)
    return one


def answers(trace: Trace) -> Trace:
    return trace.take(trace.phase == Phase.DECODE)


def test_by_hand() -> None:
    """Two slots, one expert per step: 0 0 1 2 0 1. Residents before: none, 0, 0, 01, 12, 20."""
    trace = by_hand([[[0]], [[0]], [[1]], [[2]], [[0]], [[1]]], 4)
    found = measure_caching(trace, CacheQuestion(policies=["lru"], budgets=["2 slots"]))
    kept = only(found.kept, "lru")
    assert (int(kept.hits[0]), int(kept.misses[0]), int(kept.resident[0])) == (1, 5, 8)
    assert kept.precision[0] == pytest.approx(1 / 8)
    assert kept.recall[0] == pytest.approx(1 / 6)
    before = [np.flatnonzero(row).tolist() for row in kept.watched.resident]
    assert before == [[], [0], [0], [0, 1], [1, 2], [0, 2]]
    assert [np.flatnonzero(row).tolist() for row in kept.watched.used] == [[0], [0], [1], [2], [0], [1]]


def slow_lru(trace: Trace, slots: int) -> tuple[list[int], list[int], list[int], dict[int, list[list[int]]]]:
    """Hits, misses and residents of each layer by a list per layer, most recent first, and residents before events."""
    layers = trace.shape.layers
    hits, misses, resident = [0] * layers, [0] * layers, [0] * layers
    stacks: list[list[int]] = [[] for _ in range(layers)]
    before: dict[int, list[list[int]]] = {layer: [] for layer in range(layers)}
    for event in trace:
        stack = stacks[event.layer]
        before[event.layer].append(sorted(stack))
        resident[event.layer] += len(stack)
        hits[event.layer] += len(set(event.experts) & set(stack))
        misses[event.layer] += len(set(event.experts) - set(stack))
        for expert in event.experts:
            stack = [expert, *(other for other in stack if other != expert)]
        stacks[event.layer] = stack[:slots]
    return hits, misses, resident, before


@pytest.mark.parametrize("at_once", [1 << 18, 7])
def test_as_a_slow_lru(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the replay is cut into pieces."""
    monkeypatch.setattr(caching, "_EVENTS_AT_ONCE", at_once)
    trace = answers(drawn(1))
    found = measure_caching(trace, CacheQuestion(policies=["lru"], budgets=["12 slots"], layer=1, request=2))
    kept = only(found.kept, "lru")
    hits, misses, resident, before = slow_lru(trace, 4)
    assert kept.hits.tolist() == hits
    assert kept.misses.tolist() == misses
    assert kept.resident.tolist() == resident
    own = [
        i
        for i, event in enumerate(event for event in trace if event.layer == 1)
        if (trace.request[trace.step == event.step] == 2).any()
    ]
    assert found.steps == len(own) == len(kept.watched.used)
    assert [np.flatnonzero(row).tolist() for row in kept.watched.resident] == [before[1][i] for i in own]


def test_hit_rates_are_the_simulators() -> None:
    trace = drawn(2)
    question = CacheQuestion(policies=["lfu", "blend"], budgets=["50%", "30%"])
    calls: list[None] = []
    found = measure_caching(trace, question, advance=lambda: calls.append(None))
    assert len(calls) == count_replays(trace, question)
    assert {row.policy for row in found.rows} == {"lfu", "blend", "belady"}  # lru is replayed, as a baseline
    for row in found.rows:
        if row.phase == "decode":
            (kept,) = (k for k in found.kept if (k.policy, k.budget) == (row.policy, row.budget))
            assert kept.as_dict()["recall"] == pytest.approx(row.hit_rate)
    best = {(row.budget, row.phase): row.hit_rate for row in found.rows if row.policy == "belady"}
    assert all(row.hit_rate <= best[row.budget, row.phase] + 1e-12 for row in found.rows)


def ran_with(trace: Trace, policy: str, slots: int, staging: int = 0) -> Trace:
    """The trace as a recording of a run with this cache."""
    return without(trace, meta={**trace.meta, **Run(policy, "layer", slots, staging, 0).to_meta()})


@pytest.mark.parametrize("staging", [1, 2, 4])
def test_all_rows_are_what_was_kept(staging: int) -> None:
    """Rows of staging limit what a live policy swaps, and not the optimum; neither side knows better than the other."""
    trace = ran_with(drawn(3, requests=12, experts=24, top_k=6), "nextuse", 20, staging)
    found = measure_caching(trace, CacheQuestion())
    kept = {(each.policy, each.budget): each.as_dict()["recall"] for each in found.kept}
    rows = {(row.policy, row.budget): row.hit_rate for row in found.rows if row.phase == "decode"}
    assert kept == pytest.approx(rows)
    assert {policy for policy, _ in rows} == {"lru", "lfu", "blend", "nextuse", "belady"}
    free = measure_caching(ran_with(trace, "nextuse", 20, 0), CacheQuestion(policies=["lru"]))
    for each in free.kept:
        if each.policy == "belady":
            assert each.as_dict()["recall"] == kept["belady", each.budget]


def test_what_a_run_was_recorded_with_is_replayed_too() -> None:
    trace = drawn(0)
    recorded = ran_with(trace, "lfru", 18)
    sweep = CacheQuestion().sweep(recorded)
    assert (sweep.policies, sweep.budgets) == (("lru", "lfu", "blend", "nextuse", "lfru"), ("25%", "18 slots"))
    assert CacheQuestion().sweep(ran_with(trace, "lru", 9)).budgets == ("25%",)
    mine = CacheQuestion(policies=["lru"], budgets=["40%"]).sweep(recorded)
    assert (mine.policies, mine.budgets) == (("lru",), ("40%",))
    for policy, slots in (("./gone.py", 18), ("lru", 36)):  # what is not here, and a cache that held everything
        assert CacheQuestion().sweep(ran_with(trace, policy, slots)) == CacheQuestion().sweep(trace)


def test_the_cache_of_the_run_is_named_where_it_was_replayed() -> None:
    recorded = ran_with(drawn(0), "lfru", 18)
    assert measure_caching(recorded, CacheQuestion()).recorded == ("lfru", "18 slots", 18)
    assert measure_caching(recorded, CacheQuestion(policies=["lfru"], budgets=["50%"])).recorded == ("lfru", "50%", 18)
    assert measure_caching(recorded, CacheQuestion(budgets=["40%"])).recorded is None
    assert measure_caching(drawn(0), LRU).recorded is None


def test_prompts_alone_have_no_decode_figures() -> None:
    trace = drawn(0)
    found = measure_caching(trace.take(trace.phase == Phase.PREFILL), CacheQuestion(policies=["lru"], budgets=["50%"]))
    assert found.kept[0].as_dict()["precision"] is None
    assert {row.phase for row in found.rows} == {"prefill"}
    assert found.steps > 0


def test_what_cannot_be_is_refused() -> None:
    trace = drawn(0)
    with pytest.raises(HotsetError, match="no layer 3 to draw: the trace has 0 to 2"):
        measure_caching(trace, CacheQuestion(layer=3))
    with pytest.raises(HotsetError, match="no request 6 to draw"):
        measure_caching(trace, CacheQuestion(request=6))
    with pytest.raises(PolicyError, match="no policy is called"):
        measure_caching(trace, CacheQuestion(policies=["lrru"]))
    with pytest.raises(BudgetError, match="cannot hold one event"):
        measure_caching(trace, CacheQuestion(budgets=["2 slots"]))


def test_look_ahead() -> None:
    """Predictions that are what was used have a recall of one, at every distance."""
    found = measure_lookahead(drawn(0, predictions=True))
    assert found is not None
    assert [score.distance for score in found.scores] == [1, 2]
    assert all(score.recall == pytest.approx(1.0) for score in found.scores)
    assert "us_per_event" not in found.as_dict()["scores"][0]
    assert measure_lookahead(drawn(0)) is None
    assert measure_lookahead(drawn(0, layers=1, predictions=True)) is None

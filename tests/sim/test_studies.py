"""Studies on tiny traces: one schema for all, and figures that plain replays give, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from hotset.cache import Controller, SlotPlan
from hotset.errors import HotsetError
from hotset.policies import parse
from hotset.prefetch import Driver, prefetch_rows
from hotset.shape import ModelShape
from hotset.sim import studies
from hotset.sim.forecasting import evaluate
from hotset.sim.prefetch import PrefetchResult
from hotset.sim.studies import bytes as equal_bytes
from hotset.sim.studies import capacity, policies, sensitivity, shift, users
from hotset.sim.studies._runs import LINK, Layout, drive, layout, minus, warmed
from hotset.sim.studies._traces import EXPERT_BYTES, Mix, mixes
from hotset.trace import Phase, Trace
from hotset.trace.combine import concat
from hotset.trace.synth import SynthConfig, synthesise

NAMES = ["bytes", "capacity", "policies", "sensitivity", "shift", "users"]


def tiny(seed: int = 0, prompt: int = 4, requests: int = 8) -> Trace:
    """A trace with token ids, and with predictions of which two in three tokens are right."""
    trace = synthesise(
        SynthConfig(layers=4, experts=16, top_k=2, requests=requests, prompt_tokens=prompt, new_tokens=16, seed=seed)
    )
    predictions = np.repeat(trace.experts[:, :, None, :], 3, axis=2)
    predictions[::3] = (predictions[::3] + 1) % 16
    ids = np.random.default_rng(seed).integers(0, 20, trace.tokens).astype(np.int32)
    return replace(trace, predictions=predictions, token_ids=ids)


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    return {"it": tiny(1), "es": tiny(2), "python": tiny(3)}


@pytest.fixture(scope="module")
def mix(traces: dict[str, Trace]) -> Mix:
    return mixes(traces, 100_000)[0]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SynthConfig(layers=3, experts=8, top_k=2, requests=4, prompt_tokens=0, new_tokens=12)
    monkeypatch.setattr(policies, "MIXTRAL", config)
    monkeypatch.setattr(shift, "ORDERS", 2)
    monkeypatch.setattr(capacity, "_EVENTS", 50)


def run(name: str, traces: dict[str, Trace]) -> studies.StudyResult:
    """Carry a study out, and see that it tells of each of its steps."""
    steps: list[int] = []
    study = studies.find(name)
    plan = study.plan(traces)
    result = studies.carry_out(study, plan, lambda: steps.append(1))
    assert len(steps) == len(plan.jobs)
    return result


@pytest.fixture(scope="module")
def results(traces: dict[str, Trace]) -> Callable[[str], studies.StudyResult]:
    """Each study of these traces, carried out once; it is asked for within a test, where studies are small."""
    return cache(lambda name: run(name, traces))


def test_all_are_found_by_name() -> None:
    assert studies.names() == NAMES
    with pytest.raises(HotsetError, match='no study is called "nonsense"; there are bytes, capacity'):
        studies.find("nonsense")


@pytest.mark.parametrize("name", NAMES)
def test_every_study_has_one_schema(name: str, results: Callable[[str], studies.StudyResult]) -> None:
    result = results(name)
    assert result.rows
    assert result.ran_on
    assert result.notes
    keys = {column.key for column in result.study.columns}
    for row in result.rows:
        assert keys <= set(row)
    for chart in result.study.charts:
        assert {chart.x, chart.y, chart.by, *chart.where, *(chart.ends or ())} <= set(result.rows[0])
    document = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert set(document) == {"title", "question", "ran_on", "split", "columns", "rows", "notes"}
    for row in result.rows:
        for column in result.study.columns:
            if column.kind == "share" and column.key in ("hit_rate", "recall", "precision"):
                assert row[column.key] is None or 0 <= row[column.key] <= 1


def test_a_mix_is_split_by_request_and_loses_nothing(traces: dict[str, Trace], mix: Mix) -> None:
    everything = concat(list(traces.values()))
    assert (mix.fit.requests, mix.test.requests) == (12, 12)
    assert mix.whole.tokens == everything.tokens
    assert mix.fit.shape.expert_bytes == EXPERT_BYTES
    rows = sorted(map(bytes, everything.experts.reshape(everything.tokens, -1)))
    assert sorted(map(bytes, mix.whole.experts.reshape(mix.whole.tokens, -1))) == rows


def test_a_mix_is_cut_to_so_many_events_and_needs_two_requests(traces: dict[str, Trace]) -> None:
    small = mixes(traces, 300, new_tokens=5)[0]
    assert 2 <= small.whole.requests < 24
    new = small.whole.request[small.whole.phase == Phase.DECODE]
    assert np.bincount(new).max() <= 5
    with pytest.raises(HotsetError, match="at least two requests"):
        mixes({"one": tiny(requests=1)}, 1000)


@pytest.mark.parametrize("policy", ["lru", "blend", "eam"])
def test_the_judged_half_is_what_a_warm_replay_sees(mix: Mix, policy: str) -> None:
    room = layout(mix.fit.shape)
    found = drive(mix, policy, "off", room)
    events = mix.judged_events()
    done = warmed(mix, policy, room.cached).replay(events)
    times = LINK.times(events, done.misses, Phase.DECODE)
    new = events.phase == Phase.DECODE
    asked, missed = np.diff(events.start)[new].sum(), done.misses[new].sum()
    assert found.hit_rate == pytest.approx(1 - missed / asked)
    assert found.stall_ms == pytest.approx(1000 * times.stall_s / mix.tokens)
    assert found.tokens_per_s == pytest.approx(mix.tokens / times.total_s)
    assert found.demand_bytes == pytest.approx(missed * EXPERT_BYTES / mix.tokens)


def test_capacity_reconciles_with_replay_and_evaluation(mix: Mix) -> None:
    (row,) = capacity.measure(mix, "eam:capacity=3", "eam:capacity=3", 3)
    done = warmed(mix, "eam:capacity=3", layout(mix.fit.shape).cached).replay(mix.judged_events())
    assert row["hit_rate"] == pytest.approx(done.counters.hit_rate(Phase.DECODE))
    assert row["recall"] == evaluate(mix.whole, ["eam:capacity=3"], (1,), 0.5).scores[0].recall
    assert row["held"] == 3
    assert row["match_us"] > 0


def test_bytes_are_equal_and_add_up() -> None:
    """Without prompts every load is one of a new token: on demand, or prefetched and not wasted."""
    result = run("bytes", {"a": tiny(1, prompt=0), "b": tiny(2, prompt=0)})
    assert len({row["memory_bytes"] for row in result.rows}) == 1
    by = {(row["link_gb_per_s"], row["forecast"], row["auto"]): row for row in result.rows}
    for row in result.rows:
        assert (row["cached_slots"] + row["prefetch_rows"]) * EXPERT_BYTES == row["memory_bytes"]
        assert 0 <= row["wasted_bytes"] <= row["prefetched_bytes"]
        if row["forecast"] == "demand only":
            assert row["prefetch_rows"] == row["prefetched_bytes"] == row["stall_saved"] == 0
            continue
        if row["forecast"] == equal_bytes.MORE:
            assert row["prefetch_rows"] == 8
            continue
        off = by[row["link_gb_per_s"], "off", "-"]
        assert row["cached_slots"] == off["cached_slots"]
        loaded = row["demand_bytes"] + row["prefetched_bytes"] - row["wasted_bytes"]
        assert loaded == pytest.approx(off["demand_bytes"], rel=1e-4)
        assert row["stall_ms"] <= off["stall_ms"] * 1.0001
        assert row["hit_rate"] == off["hit_rate"]


def test_the_oracle_stalls_least(results: Callable[[str], studies.StudyResult]) -> None:
    rows = results("bytes").rows
    for speed in equal_bytes.SPEEDS_GB:
        stall = {(r["forecast"], r["auto"]): r["stall_ms"] for r in rows if r["link_gb_per_s"] == speed}
        predicted = [value for (forecast, _), value in stall.items() if forecast != "demand only"]
        assert stall["oracle", "off"] <= min(predicted) * 1.0001


def test_notes_name_where_auto_wins_and_loses() -> None:
    setting = {"trace": "t", "link_gb_per_s": 3, "cached_slots": 9}
    rows = [
        setting | {"forecast": name, "auto": auto, "stall_ms": stall, "tokens_per_s": speed}
        for name, auto, stall, speed in (
            ("demand only", "-", 8.0, 50.0), ("off", "-", 10.0, 48.0), ("gate", "on", 5.0, 60.0),
            ("gate", "off", 4.0, 62.0), ("eam", "on", 11.0, 47.0), ("eam", "off", 11.0, 46.0),
        )
    ]  # fmt: skip
    notes = equal_bytes.conclude(rows)
    assert "auto more than 2 % slower than off: t, 3 GB/s (eam -2.1 %)" in notes
    assert "auto slower than off by at most 2 %: nowhere" in notes
    assert "auto saves 25 % of off's stall: t, 3 GB/s (gate +50.0 %)" in notes
    assert "auto saves 25 % of demand only's stall: t, 3 GB/s (gate +37.5 %)" in notes
    assert "auto slower than the same without auto: in 1 of 2 settings, at most by 3.2 %" in notes


@pytest.mark.parametrize("policy", ["lru", "blend", "window"])
def test_precision_counts_residents_as_one_by_one(mix: Mix, policy: str) -> None:
    slots = 5 * mix.fit.shape.layers
    (row,) = policies.measure(mix, policy, 5)
    cache = Controller(SlotPlan(mix.fit.shape, slots), parse(policy))
    cache.replay(mix.fit.events())
    hits = resident_sum = used = 0
    events = mix.test.events()
    for i in range(len(events)):
        experts = events.expert[events.start[i] : events.start[i + 1]]
        counts = events.count[events.start[i] : events.start[i + 1]]
        resident = int((cache.table.slot_of[events.layer[i]] >= 0).sum())
        phase = Phase(int(events.phase[i]))
        missing = cache.route(
            int(events.layer[i]), experts, counts, int(events.tokens[i]), phase, int(events.request[i])
        )
        if phase == Phase.DECODE:
            hits, resident_sum, used = hits + len(experts) - missing, resident_sum + resident, used + len(experts)
    assert row["precision"] == pytest.approx(hits / resident_sum)
    assert row["recall"] == row["hit_rate"] == pytest.approx(hits / used)


def test_policies_at_2_to_6_of_8_and_the_bound_on_top(results: Callable[[str], studies.StudyResult]) -> None:
    rows = results("policies").rows
    small = [row for row in rows if row["trace"].startswith("synthetic")]
    assert {row["slots"] for row in small} == {2, 3, 4, 5, 6}
    assert {row["slots"] for row in rows if row["what"] == "caching"} == {2, 3, 4, 5, 6, 8}
    for row in small:
        best = next(r for r in small if r["slots"] == row["slots"] and r["by"] == "belady")
        assert row["hit_rate"] <= best["hit_rate"]
    (prediction,) = [row for row in rows if row["what"] == "predicting"]
    assert prediction["precision"] == prediction["recall"]


def test_recovery_is_the_first_small_mean() -> None:
    assert shift.first_recovered(np.array([0.3, 0.0, 0.0, 0.0, 0.2])) == 1
    assert shift.first_recovered(np.array([0.0, 0.0, 0.0])) == 0
    assert shift.first_recovered(np.array([0.3, 0.1, 0.2, 0.1])) is None


def test_rates_by_request_add_up_to_the_whole(mix: Mix) -> None:
    parts = [mix.whole.select([number]) for number in range(mix.whole.requests)]
    whole = concat(parts)
    tokens = np.bincount(whole.request[whole.phase == Phase.DECODE])
    cache = Controller(SlotPlan(whole.shape, layout(whole.shape, rows=0).cached), parse("lru"))
    expected = cache.replay(whole.events()).counters.hit_rate(Phase.DECODE)
    assert np.average(shift.hit_rates("lru", parts), weights=tokens) == pytest.approx(expected)
    for spec in ("gate", "eam", "best"):
        score = evaluate(whole, [spec], (1,), 0.0).scores[0]
        assert np.average(shift.recalls(spec, parts), weights=tokens) == pytest.approx(score.recall), spec


def test_shift_tells_families_apart_and_needs_two_tasks(
    traces: dict[str, Trace], results: Callable[[str], studies.StudyResult]
) -> None:
    rows = results("shift").rows
    assert {row["switch"] for row in rows} == {"within a family", "between families"}
    for row in rows:
        assert row["least"] <= row["mean"] <= row["most"] <= 4
        assert 0 <= row["not_recovered"] <= row["switches"]
    with pytest.raises(HotsetError, match="at least two traces"):
        run("shift", {"it": traces["it"]})


def test_one_user_is_the_plain_replay(mix: Mix) -> None:
    rows = {mode: users.measure(mix, mode, 1, "lru") for mode in users.MODES}
    plain = drive(mix, "lru", "gate", layout(mix.fit.shape))
    assert rows["batch"][1]["forecast"] == "gate"
    for own in rows.values():
        assert own[1]["stall_ms"] == pytest.approx(plain.stall_ms)
        assert own[1]["hit_rate"] == pytest.approx(plain.hit_rate)


def test_knobs_are_sorted_by_what_they_change(results: Callable[[str], studies.StudyResult], mix: Mix) -> None:
    rows = results("sensitivity").rows
    assert [row["range"] for row in rows] == sorted((row["range"] for row in rows), reverse=True)
    for row in rows:
        assert row["least_stall_ms"] <= row["base_stall_ms"] <= row["most_stall_ms"]
    base = drive(mix, "decay:half_life=16", "best", layout(mix.fit.shape), auto=False)
    cache = next(row for row in rows if row["knob"] == "cache size")
    assert cache["base_stall_ms"] == pytest.approx(base.stall_ms, rel=1e-4)
    assert {row["knob"] for row in rows} == {knob.name for knob in sensitivity.knobs(mix.test)}


def test_slots_for_predictions_come_out_of_the_same_memory(mix: Mix) -> None:
    shape = mix.fit.shape
    assert layout(shape) == Layout(14, 2)
    assert layout(shape, rows=0) == Layout(16, 0)


def test_slots_for_predictions_are_as_many_everywhere() -> None:
    for top_k, slots in ((1, 1), (2, 2), (4, 4), (8, 4)):
        shape = ModelShape(8, 64, top_k)
        assert (
            prefetch_rows(Driver.CPU, shape)
            == prefetch_rows(Driver.HOST, shape)
            == layout(shape).prefetch_rows
            == slots
        )


def test_judged_requests_are_none_of_the_first_half(mix: Mix) -> None:
    first, second = mix.fit.events(), mix.judged_events()
    assert not set(first.request.tolist()) & set(second.request.tolist())
    assert mix.whole.events().request.tolist() == [*first.request.tolist(), *second.request.tolist()]


def test_the_rest_of_a_journey_ends_as_the_whole() -> None:
    whole = PrefetchResult(5.0, 9.0, 7, 3, 2, 50.0, 40.0, 10.0, 8, 3, switched_off=True)
    first = PrefetchResult(2.0, 4.0, 3, 1, 1, 20.0, 10.0, 5.0, 5, 1, switched_off=True)
    assert minus(whole, first) == PrefetchResult(3.0, 5.0, 4, 2, 1, 30.0, 30.0, 5.0, 3, 3, switched_off=True)

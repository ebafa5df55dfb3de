"""Plans: more memory is never slower, a target is the inverse of the table, and what cannot be is one line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plan_samples import HITS, MODEL, PRECISION, RATES, SIZE, planner

from hotset.analysis.planner.hits import BOUND, HitCurve, replay_hits, shortened, sizes_of
from hotset.analysis.planner.intervals import GPU_MODEL_SPREAD, MODEL_SPREAD, interval, share_of
from hotset.analysis.planner.rates import Engine
from hotset.analysis.planner.tiers import Memory, bytes_for, least_bytes, least_ram_bytes, staging_rows
from hotset.analysis.planner.times import TokenTimes
from hotset.cache import Controller, SlotPlan
from hotset.errors import BudgetError, HotsetError
from hotset.policies import parse
from hotset.shape import ModelShape
from hotset.sim import Sweep, simulate
from hotset.trace import Phase, Trace
from hotset.trace.synth import SynthConfig, synthesise


@pytest.mark.parametrize("gpu", [False, True])
def test_more_memory_is_never_slower(gpu: bool) -> None:
    found = planner(gpu_bytes=1 << 20 if gpu else None)
    sizes = np.linspace(least_bytes(MODEL, PRECISION), MODEL.rest_bytes + 14 * SIZE, 200)
    speeds = found.speeds(PRECISION, sizes)
    assert np.isfinite(speeds).all()
    assert (np.diff(speeds) >= -1e-9).all()
    assert speeds[-1] > 1.2 * speeds[0]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 1.0])
def test_a_target_is_the_inverse_of_the_table(share: float) -> None:
    found = planner()
    slow, fast = found.speeds(PRECISION, np.array([least_bytes(MODEL, PRECISION), MODEL.rest_bytes + 20 * SIZE]))
    wanted = float(slow + share * (fast - slow))
    row = found.target(PRECISION, wanted)
    assert row.reached
    assert row.memory_bytes is not None
    at, less = found.speeds(PRECISION, np.array([row.memory_bytes, row.memory_bytes - SIZE]))
    assert at >= wanted * (1 - 1e-9)
    assert at == pytest.approx(row.tokens_per_s)
    assert np.isnan(less) or less < wanted


def test_a_target_beyond_everything_names_the_bound() -> None:
    row = planner().target(PRECISION, 1e5)
    assert not row.reached
    assert row.memory_bytes is None
    assert row.tokens_per_s < row.bound_tokens_per_s < 1e5


def test_a_row_tells_what_it_should() -> None:
    memory = bytes_for(MODEL, PRECISION, 4, Engine.CPU)
    (row, *others) = planner(memory, more_bytes=20 * SIZE).rows()
    assert [other.precision for other in others] == ["int8", "int4", "mxfp4"]
    assert (row.slots, row.resident, row.policy) == (4, 0.5, "blend")
    assert row.hit_rate == pytest.approx(0.5)
    assert row.bound_hit_rate == pytest.approx(0.75)
    assert row.low_tokens_per_s < row.tokens_per_s < row.high_tokens_per_s
    assert row.tokens_per_s < row.more_tokens_per_s <= row.bound_tokens_per_s
    everything = planner(1 << 30).row(PRECISION)
    assert everything is not None
    assert row.more_tokens_per_s == pytest.approx(everything.tokens_per_s)
    assert everything.more_share == 0
    assert everything.commands == ["hotset run ./tiny --memory 100% --device cpu -p ..."]


def test_what_fits_nowhere_names_the_least() -> None:
    with pytest.raises(BudgetError, match=r"does not fit in any precision: the least that works is \d+ MiB of RAM"):
        planner(MODEL.rest_bytes).rows()
    lines = planner(least_bytes(MODEL, PRECISION) - SIZE).left_out()
    assert lines
    assert re.fullmatch(r"bfloat16 does not fit: the least is \d+ MiB of RAM", lines[0])
    small = planner(1 << 30, gpu_bytes=least_bytes(MODEL, PRECISION) - SIZE).left_out()
    assert re.fullmatch(r"bfloat16 does not fit: the least is \d+ MiB of GPU memory", small[0])
    ram = least_ram_bytes(MODEL, PRECISION)
    assert planner(ram, gpu_bytes=least_bytes(MODEL, PRECISION)).left_out() == []
    behind = planner(ram - SIZE, gpu_bytes=least_bytes(MODEL, PRECISION)).left_out()
    assert re.fullmatch(r"bfloat16 does not fit: the least is \d+ MiB of RAM behind the GPU", behind[0])


def test_the_interval_has_a_term_for_the_model_itself() -> None:
    times = TokenTimes(MODEL, PRECISION, replace(RATES, spread=0.0))
    curve = replace(HITS.curves["blend"], tokens=np.ones(1))
    assert share_of(times, curve, 8, times.resident_s, 0.4) == pytest.approx(MODEL_SPREAD)
    low_s, high_s = interval(times, curve, 8, times.resident_s)
    assert high_s / times.resident_s == pytest.approx(times.resident_s / low_s) == pytest.approx(1 + MODEL_SPREAD)
    of_gpu = replace(times, rates=replace(times.rates, engine=Engine.DEVICE))  # the model is less sure of these
    assert share_of(of_gpu, curve, 8, times.resident_s, 0.4) == pytest.approx(GPU_MODEL_SPREAD)


def test_the_interval_grows_with_what_is_not_known() -> None:
    found = planner(least_bytes(MODEL, PRECISION))
    sure, unsure = (planner(found.memory.ram_bytes, misses_spread=spread).row(PRECISION) for spread in (0.0, 0.4))
    assert sure is not None
    assert unsure is not None
    assert unsure.low_tokens_per_s < sure.low_tokens_per_s
    assert unsure.tokens_per_s == sure.tokens_per_s


def test_hits_of_a_trace_by_hand() -> None:
    # One layer of four experts, one per token: 0 1 0 1 2 0; with two slots lru misses 0, 1, 2 and 0 again.
    experts = np.array([0, 1, 0, 1, 2, 0, 1, 1] * 4, np.int16)[:, None, None]
    tokens = len(experts)
    trace = Trace(
        shape=ModelShape(1, 4, 1), experts=experts, request=np.repeat(np.arange(4, dtype=np.int32), 8),
        step=np.arange(tokens, dtype=np.int32), phase=np.full(tokens, Phase.DECODE, np.uint8),
    )  # fmt: skip
    hits = replay_hits(trace, ("lru",))
    lru = hits.curves["lru"]
    assert lru.slots.tolist() == [1, 2, 3, 4]
    assert lru.tokens.tolist() == [0, 8, 8, 8]  # the first request fills the cache
    # By request, from 1 in a warm cache (1, 0): 0 1 0 1 hit, 2 misses, 0 misses, 1 misses, 1 hits.
    assert lru.events[1, 1:].tolist() == [[5, 3]] * 3
    assert lru.events[-1, 1:].tolist() == [[8, 0]] * 3
    assert lru.hit_rate(2) == pytest.approx(5 / 8)
    assert hits.curves[BOUND].hit_rate(2) >= lru.hit_rate(2)


def test_curves_never_fall_and_survive_being_kept() -> None:
    trace = synthesise(SynthConfig(layers=3, experts=16, top_k=2, requests=8, prompt_tokens=4, new_tokens=12))
    hits = replay_hits(trace)
    kept = HitCurve.from_dict(hits.curves["blend"].as_dict())
    for curve in (*hits.curves.values(), kept):
        rates = [curve.hit_rate(slots) for slots in range(3, 49)]
        assert (np.diff(rates) >= -1e-9).all()
        assert rates[-1] == pytest.approx(1)
    assert kept.hit_rate(20) == pytest.approx(hits.curves["blend"].hit_rate(20), abs=1e-4)
    assert hits.best(20) in ("blend", "lru")
    with pytest.raises(HotsetError, match="damaged"):
        HitCurve.from_dict(kept.as_dict() | {"slots": [1, 2]})


def test_the_bound_is_the_simulators(monkeypatch: pytest.MonkeyPatch) -> None:
    """No row of staging limits what the optimum admits, nor do prompts."""
    trace = synthesise(SynthConfig(layers=3, experts=16, top_k=4, requests=8, prompt_tokens=4, new_tokens=12))
    monkeypatch.setattr("hotset.analysis.planner.hits._counted", lambda events: events.phase == Phase.DECODE)
    bound = replay_hits(trace, ("lru",)).curves[BOUND]
    budgets = [f"{slots} slots" for slots in bound.slots]
    rows = simulate({"": trace}, Sweep(policies=["lru"], budgets=budgets, fit=0.0)).rows
    found = [row.hit_rate for row in rows if row.policy == BOUND and row.phase == "decode"]
    asked = bound.per_token()[0].sum() * trace.shape.top_k
    assert (1 - bound.misses_per_token() / asked)[:-1] == pytest.approx(found[:-1])


def test_a_late_policy_has_the_swaps_of_a_live_run() -> None:
    trace = synthesise(SynthConfig(layers=2, experts=16, top_k=4, requests=8, prompt_tokens=4, new_tokens=40))
    curve, events, slots = replay_hits(trace, ("nextuse",)).curves["nextuse"], trace.events(), 8
    counted = (events.phase == Phase.DECODE) & (events.request >= 2)
    plans = [SlotPlan(trace.shape, slots, staging=rows) for rows in (staging_rows(trace.shape, Engine.CPU), 1)]
    by_staging = [int(Controller(plan, parse("nextuse")).replay(events).misses[counted].sum()) for plan in plans]
    live = int(curve.events[curve.slots.tolist().index(slots)].sum(axis=0) @ np.arange(5))
    assert live == by_staging[0] != by_staging[1]


def test_long_traces_are_shortened_by_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = synthesise(SynthConfig(layers=2, experts=8, top_k=2, requests=6, prompt_tokens=0, new_tokens=10))
    monkeypatch.setattr("hotset.analysis.planner.hits.MAX_ACCESSES", 4 * 30)
    found = shortened(trace)
    assert 15 <= found.tokens <= 30
    assert found.requests < trace.requests
    assert sizes_of(trace.shape)[0] == 2


def test_prompts_alone_are_no_workload() -> None:
    trace = synthesise(SynthConfig(layers=2, experts=8, top_k=2, requests=2, prompt_tokens=9, new_tokens=1))
    with pytest.raises(HotsetError, match="no decode tokens"):
        replay_hits(trace.take(trace.phase == Phase.PREFILL))


def test_memory_of_a_gpu_is_the_fast_one() -> None:
    assert Memory(5, 7).with_fast(9) == Memory(5, 9)
    assert Memory(5).with_fast(9) == Memory(9)
    assert HITS.best(8) == "blend"


def test_the_committed_coverage_is_that_of_the_committed_settings() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "planner.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    found = document["summary"]["intervals"]
    assert found["model_spread"] == MODEL_SPREAD
    assert found["gpu_model_spread"] == GPU_MODEL_SPREAD
    assert found["needed_by_what_it_is_fitted_to"] <= MODEL_SPREAD
    assert found["needed_by_what_the_gpu_is_fitted_to"] <= GPU_MODEL_SPREAD
    inside = [
        row["expected_low"] <= row["measured_tokens_per_s"] <= row["expected_high"]
        for row in document["rows"]
        if row["judged"]
    ]
    parts = [each for each in found.values() if isinstance(each, dict)]
    assert (sum(inside), len(inside)) == (sum(p["inside"] for p in parts), sum(p["settings"] for p in parts))
    told = {name: f"{part['inside']} of {part['settings']}" for name, part in found.items() if isinstance(part, dict)}
    page = (path.parents[2] / "docs" / "results" / "planner.md").read_text(encoding="utf-8")
    assert all(words in " ".join(page.split()) for words in told.values())

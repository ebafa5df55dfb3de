"""A sweep: its rows add up, the bound bounds, warm is warm, and what a person should know is said."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from sim_samples import random_trace, replay, trace_of

from hotset.cache import Scope
from hotset.cache.counters import Count
from hotset.errors import BudgetError, HotsetError
from hotset.policies import Admit
from hotset.prefetch import plan_prefetch
from hotset.shape import ModelShape
from hotset.sim import Link, Sweep, count_jobs, simulate
from hotset.sim.prefetch import follow_replay
from hotset.sim.rows import Times
from hotset.sim.simulate import _setting
from hotset.trace import Phase
from hotset.trace.combine import interleave

BUDGETS = ("25%", "12 slots")
SMALL = Sweep(policies=("lru", "lfu"), budgets=BUDGETS)


def rows_of(trace, sweep=SMALL):
    return simulate({"t": trace}, sweep).rows


def find(rows, **wanted):
    found = [row for row in rows if all(getattr(row, key) == value for key, value in wanted.items())]
    assert len(found) == 1
    return found[0]


def without_size(trace):
    return replace(trace, shape=replace(trace.shape, expert_bytes=None))


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("streams", [1, 3])
def test_rows_reconcile(scope, streams):
    trace = random_trace(prompt=4)
    rows = rows_of(trace, Sweep(budgets=BUDGETS, scope=scope, streams=streams))
    asked = {}
    for row in rows:
        assert row.hit_rate == row.hits / (row.hits + row.misses)
        assert row.misses_per_token == row.misses / row.tokens
        assert row.bytes_per_token == pytest.approx(row.misses_per_token * 1000)
        assert 0 <= row.staged <= row.misses
        assert 0 <= row.evictions <= row.misses - row.staged
        assert row.budget_fraction == row.budget_slots / 24
        assert row.budget_cycles == row.budget_slots / 6
        assert (row.scope, row.streams, row.staging_slots) == (scope, streams, 0)
        totals = (row.hits + row.misses, row.events, row.tokens)
        assert asked.setdefault((row.phase, row.start), totals) == totals
    assert asked["decode", "cold"][2] == trace.count(Phase.DECODE)
    assert asked["prefill", "cold"][2] == trace.count(Phase.PREFILL)


def test_a_row_is_a_replay():
    trace = random_trace(prompt=3)
    row = find(rows_of(trace), policy="lfu", start="cold", phase="decode", budget="12 slots")
    counters = replay("lfu", trace.events(), 12)[1].counters
    assert row.hits == counters.total(Count.HITS, Phase.DECODE)
    assert row.staged == counters.total(Count.STAGED, Phase.DECODE)
    assert row.evictions == counters.total(Count.EVICTED, Phase.DECODE)


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("streams", [1, 2])
def test_belady_is_never_below_another(scope, streams):
    for seed in range(3):
        rows = rows_of(random_trace(seed), Sweep(budgets=BUDGETS, scope=scope, streams=streams))
        best = {_setting(row): row.hits for row in rows if row.policy == "belady"}
        assert all(row.hits <= best[_setting(row)] for row in rows)


def test_belady_is_never_below_another_over_both_phases():
    for seed in range(3):
        hits = {}
        for row in rows_of(random_trace(seed, prompt=5), Sweep(budgets=BUDGETS)):
            key = (row.budget, row.start, row.policy)
            hits[key] = hits.get(key, 0) + row.hits
        assert all(total <= hits[budget, start, "belady"] for (budget, start, _), total in hits.items())


def test_belady_bounds_decode_also_beside_prompts():
    # One slot. 0 is next asked for by a prompt, 1 later by a decode: belady keeps 0, and lru has the decode hit.
    shape = ModelShape(1, 3, 1)
    first = [(Phase.DECODE, [[[0]]]), (Phase.DECODE, [[[1]]])]
    second = [(Phase.PREFILL, [[[0]]]), (Phase.DECODE, [[[1]]])]
    rows = rows_of(trace_of(shape, [first, second]), Sweep(policies=("lru",), budgets=("1 slots",)))
    cold = {row.policy: row.hits for row in rows if row.start == "cold" and row.phase == "decode"}
    assert cold["lru"] <= cold["belady"]


def test_gap_closed_runs_from_lru_to_belady():
    for row in (rows := rows_of(random_trace(prompt=2), Sweep(policies=("lru", "lfu", "blend"), budgets=BUDGETS))):
        lru = find(rows, policy="lru", budget=row.budget, start=row.start, phase=row.phase).hit_rate
        best = find(rows, policy="belady", budget=row.budget, start=row.start, phase=row.phase).hit_rate
        if best <= lru:
            assert row.gap_closed is None
        else:
            assert row.gap_closed == pytest.approx((row.hit_rate - lru) / (best - lru))
            assert row.policy != "belady" or row.gap_closed == 1
            assert row.policy != "lru" or row.gap_closed == 0


def test_no_gap_where_everything_fits():
    rows = rows_of(random_trace(), Sweep(policies=("lru",), budgets=("100%",)))
    assert {row.gap_closed for row in rows if row.start == "cold"} == {None}


def test_the_baseline_is_replayed_but_not_shown_unless_asked_for():
    rows = rows_of(random_trace(), Sweep(policies=("lfu", "lfu"), budgets=BUDGETS))
    assert {row.policy for row in rows} == {"lfu", "belady"}
    assert len(rows) == 2 * len(BUDGETS) * 2
    assert all(row.gap_closed is not None for row in rows)


def test_warm_rows_are_judged_on_requests_not_seen():
    trace = random_trace(prompt=2)
    fit, judged = trace.split(0.5, seed=3)
    rows = rows_of(trace, Sweep(policies=("lfu",), budgets=("12 slots",), seed=3))
    row = find(rows, policy="lfu", start="warm", phase="decode")
    assert row.tokens == judged.count(Phase.DECODE)
    controller, _ = replay("lfu", fit.events(), 12)
    expected = controller.replay(judged.events()).counters
    assert row.hits == expected.total(Count.HITS, Phase.DECODE)
    assert row.cold_hit_rate == replay("lfu", judged.events(), 12)[1].counters.hit_rate(Phase.DECODE)
    assert find(rows, policy="lfu", start="cold", phase="decode").cold_hit_rate is None


@pytest.mark.parametrize("policy", ["lru", "static", "belady"])
def test_warm_rows_prefetch_too(policy):
    # An idle link: the oracle's predictions come in time, but for those of the first layer after a prompt.
    trace, link = random_trace(prompt=2), Link(bytes_per_s=1e7, compute_s=30e-3, expert_share=0.0)
    sweep = Sweep(policies=(policy,), budgets=("12 slots",), link=link)
    plain = find(rows_of(trace, sweep), policy=policy, start="warm", phase="decode")
    row = find(rows_of(trace, replace(sweep, prefetch="oracle")), policy=policy, start="warm", phase="decode")
    assert (row.prefetch, row.prefetch_slots, row.wasted) == ("oracle", 2, 0)
    assert row.in_time + row.late <= row.misses == plain.misses
    assert row.stall_s_per_token < 0.1 * plain.stall_s_per_token
    assert row.time_s_per_token - row.stall_s_per_token == pytest.approx(30e-3)


def test_warm_forecasts_have_learnt_from_the_fit_requests():
    trace = random_trace(requests=8)
    fit, judged = trace.split(0.5, seed=0)
    link = Link(bytes_per_s=1e6, compute_s=3e-3)
    sweep = Sweep(policies=("lfu",), budgets=("12 slots",), link=link, prefetch="transition")
    row = find(rows_of(trace, sweep), policy="lfu", start="warm", phase="decode")
    controller, _ = replay("lfu", fit.events(), 12)
    resident = controller.table.slot_of >= 0
    done = controller.replay(judged.events(), log=True)
    expected = follow_replay(
        judged, done, link, "transition", plan_prefetch("cpu", judged.shape, rows=2, trial=False), resident=resident,
        training_trace=fit,
    )  # fmt: skip
    assert (row.in_time, row.late, row.wasted) == (expected.in_time, expected.late, expected.wasted)
    assert row.stall_s_per_token == pytest.approx(expected.stall_s / row.tokens)


@pytest.mark.parametrize(("predictions", "forecast"), [(False, "best"), (True, "gate")])
def test_auto_is_the_routers_predictions_where_there_are_any(predictions, forecast):
    trace = random_trace()
    if predictions:
        trace = replace(trace, predictions=np.repeat(trace.experts[:, :, None], 3, axis=2))
    sweep = Sweep(policies=("lru",), budgets=("12 slots",), link=Link(1e6, 3e-3), prefetch="auto")
    rows = [row for row in rows_of(trace, sweep) if row.phase == "decode"]
    assert {row.prefetch for row in rows} == {f"{forecast} (auto)"}
    assert {row.start for row in rows} == {"cold", "warm"}


def test_nothing_is_learnt_from_requests_that_share_no_expert():
    # Every request has experts of its own and the cache holds all: had the judged ones been seen, they would be hit.
    shape = ModelShape(1, 8, 1)
    requests = [[(Phase.DECODE, [[[expert]]])] * 3 for expert in range(8)]
    rows = rows_of(trace_of(shape, requests), Sweep(policies=("lru", "blend"), budgets=("8 slots",)))
    for policy in ("lru", "blend"):
        row = find(rows, policy=policy, start="warm")
        assert row.misses == 4
        assert row.hit_rate == row.cold_hit_rate


def test_a_warm_belady_starts_with_the_best_contents():
    trace = random_trace()
    warm = find(rows_of(trace), policy="belady", start="warm", budget="12 slots")
    assert warm.hit_rate > warm.cold_hit_rate


def test_static_keeps_the_favourites_of_the_fit_requests():
    # Requests ask for 0 and 1 most; 2 and 3 come once. Two slots hold 0 and 1 from the start, so only 2 and 3 miss.
    shape = ModelShape(1, 6, 1)
    passes = [(Phase.DECODE, [[[expert]]]) for expert in (2, 0, 1, 0, 1, 3)]
    rows = rows_of(trace_of(shape, [passes] * 4), Sweep(policies=("static",), budgets=("2 slots",)))
    assert {row.start for row in rows if row.policy == "static"} == {"warm"}
    row = find(rows, policy="static", start="warm")
    assert (row.hits, row.misses, row.evictions, row.staged) == (8, 4, 0, 4)
    assert row.cold_hit_rate < row.hit_rate


def test_streams_are_an_interleaved_trace():
    trace = random_trace(prompt=3)
    row = find(
        rows_of(trace, Sweep(policies=("lru",), budgets=("12 slots",), streams=3)),
        policy="lru", start="cold", phase="decode",
    )  # fmt: skip
    counters = replay("lru", interleave(trace, 3).events(), 12)[1].counters
    assert row.hits == counters.total(Count.HITS, Phase.DECODE)
    assert row.events < 3 * trace.count(Phase.DECODE)  # tokens of several streams share passes
    assert row.tokens == trace.count(Phase.DECODE)


def test_modes_differ_in_passes_not_in_tokens():
    trace = random_trace()
    batch, turns = (
        find(
            rows_of(trace, Sweep(policies=("lru",), budgets=("12 slots",), streams=3, mode=mode)),
            policy="lru", start="cold",
        )
        for mode in ("batch", "turns")
    )  # fmt: skip
    assert batch.tokens == turns.tokens
    assert batch.events < turns.events == 3 * trace.tokens


def test_prefill_rows_are_apart_from_decode_rows():
    with_prompts, without = rows_of(random_trace(prompt=4)), rows_of(random_trace())
    assert {row.phase for row in with_prompts} == {"prefill", "decode"}
    assert {row.phase for row in without} == {"decode"}


def test_prompts_evict_nothing_unless_asked_to():
    trace = random_trace(prompt=4)
    sweep = Sweep(policies=("lru",), budgets=("6 slots",))
    free = find(rows_of(trace, sweep), policy="lru", start="cold", phase="prefill")
    always = find(rows_of(trace, replace(sweep, prefill=Admit.ALWAYS)), policy="lru", start="cold", phase="prefill")
    assert free.evictions == 0 < always.evictions
    assert always.staged < free.staged


def test_token_cycle_warning():
    # 3 layers x 2 experts are one cycle of 6.
    sweep = Sweep(policies=("lru", "blend"), budgets=("5 slots", "6 slots"), scope=Scope.POOL)
    notes = simulate({"t": random_trace()}, sweep).notes
    assert len(notes) == 1
    assert notes[0].startswith("t: a pool of 5 slots is less than one token's cycle (6 = layers x top_k)")
    assert "--scope layer" in notes[0]
    assert simulate({"t": random_trace()}, replace(sweep, scope=Scope.LAYER)).notes == []
    assert simulate({"t": random_trace()}, replace(sweep, policies=("blend",))).notes == []


def test_static_and_single_request_notes():
    sweep = Sweep(policies=("static", "lru"), budgets=BUDGETS)
    single = simulate({"one": random_trace(requests=1)}, sweep)
    assert any(note.startswith("one: static needs counts") for note in single.notes)
    assert any(note.startswith("one: one request cannot be split") for note in single.notes)
    assert {row.start for row in single.rows} == {"cold"}
    several = simulate({"many": random_trace()}, sweep)
    assert [note for note in several.notes if "one request" in note] == []


@pytest.mark.parametrize("scope", Scope)
def test_a_budget_too_small_names_the_smallest_that_works(scope):
    trace = random_trace()
    with pytest.raises(BudgetError, match="cannot hold one event") as caught:
        rows_of(trace, replace(SMALL, budgets=("1 slots",), scope=scope))
    smallest = int(re.search(r"smallest that works is (\d+) slots", str(caught.value))[1])
    assert smallest == 2
    assert rows_of(trace, replace(SMALL, budgets=(f"{smallest} slots",), scope=scope))


def test_a_budget_too_small_beside_staging_names_the_smallest_that_works():
    sweep = replace(SMALL, budgets=("1 slots",), staging=3)
    assert rows_of(random_trace(), replace(sweep, budgets=("2 slots",)))
    with pytest.raises(BudgetError, match="smallest that works is 2 slots"):
        rows_of(random_trace(), sweep)


def test_default_budgets_that_are_too_small_are_left_out():
    shape = ModelShape(2, 10, 3)  # 5 % and 10 % of 20 experts are less than one event
    rows = rows_of(random_trace(shape=shape), Sweep(policies=("lru",)))
    assert {row.budget for row in rows} == {"25%", "40%", "50%"}


def test_what_is_left_out_is_said():
    trace = random_trace(shape=ModelShape(2, 10, 3))
    notes = simulate({"t": trace}, Sweep(policies=("lru",))).notes
    assert "t: 5%, 10% of the experts cannot hold one event, so they are left out" in notes


def test_no_default_budget_works():
    shape = ModelShape(1, 3, 3)
    with pytest.raises(BudgetError, match="every default budget is too small"):
        rows_of(random_trace(shape=shape), Sweep(policies=("lru",)))


def test_byte_budgets_need_the_size_of_an_expert():
    sweep = replace(SMALL, budgets=("12kB",))
    assert {row.budget_slots for row in rows_of(random_trace(), sweep)} == {12}
    with pytest.raises(BudgetError, match="needs the size of an expert"):
        rows_of(without_size(random_trace()), sweep)


def test_bytes_pay_for_staging_and_slots_do_not():
    sweep = Sweep(policies=("lru",), budgets=("12kB", "12 slots", "50%"), staging=2)
    rows = rows_of(random_trace(), sweep)
    assert {row.budget: row.budget_slots for row in rows} == {"11.7 KiB": 10, "12 slots": 12, "50%": 12}
    assert {row.staging_slots for row in rows} == {2}


def test_bytes_for_all_experts_and_staging_cache_all_experts():
    rows = rows_of(random_trace(), Sweep(policies=("lru",), budgets=("1MB",), staging=2))
    assert {row.budget_slots for row in rows} == {24}


def test_link_columns():
    link = Link(bytes_per_s=1e6, compute_s=3e-3)
    trace = random_trace(prompt=2)
    rows = rows_of(trace, replace(SMALL, link=link))
    row = find(rows, policy="lfu", start="cold", phase="decode", budget="12 slots")
    times = link.times(trace.events(), replay("lfu", trace.events(), 12)[1].misses, Phase.DECODE)
    assert row.stall_s_per_token == pytest.approx(times.stall_s / row.tokens)
    assert row.time_s_per_token == pytest.approx(row.stall_s_per_token + 3e-3)
    assert row.tokens_per_s == pytest.approx(1 / row.time_s_per_token)
    assert all(row.tokens_per_s is None for row in rows_of(trace))


def test_the_bound_is_the_compute_or_the_transfers_of_the_optimum():
    trace = random_trace(prompt=2)
    for bytes_per_s, limit in ((1e9, "compute"), (1e5, "transfers")):
        link = Link(bytes_per_s=bytes_per_s, compute_s=3e-3, latency_s=1e-3)
        for row in (rows := rows_of(trace, replace(SMALL, link=link))):
            best = find(rows, policy="belady", budget=row.budget, start=row.start, phase=row.phase)
            compute_s, transfer_s = 1e-3 * row.events, best.misses * 1000 / bytes_per_s
            assert (compute_s < transfer_s) == (limit == "transfers")
            assert row.bound_s_per_token == pytest.approx(max(compute_s, transfer_s) / row.tokens)
            assert row.bound_share == pytest.approx(row.bound_s_per_token / row.time_s_per_token)
    assert {row.bound_share for row in rows_of(trace)} == {None}


@pytest.mark.parametrize("prefetch", ["off", "oracle"])
def test_over_an_endless_link_the_bound_is_reached_and_rounding_lifts_no_row_above_it(prefetch):
    sweep = Sweep(policies=("lru",), budgets=("12 slots",), link=Link(math.inf, 3.3e-3), prefetch=prefetch)
    shares = [row.bound_share for row in rows_of(random_trace(prompt=2, tokens=200), sweep)]
    assert 1 - 1e-9 < min(shares) <= max(shares) <= 1


def timed_case(seed, scope, prefetch):
    """A trace and a sweep with a link, drawn from a seed: from compute to transfers as the limit."""
    rng = np.random.default_rng(seed)
    shape = ModelShape(int(rng.integers(1, 5)), int(rng.integers(4, 10)), int(rng.integers(1, 4)), 1000)
    trace = random_trace(seed, 5, int(rng.integers(2, 24)), int(rng.integers(0, 4)), shape)
    layer_s = float(rng.uniform(1e-4, 1e-3))
    return trace, Sweep(
        budgets=(f"{4 * shape.layers} slots",), scope=scope, staging=int(rng.integers(4)),
        prefill=list(Admit)[int(rng.integers(len(Admit)))], prefetch=prefetch, prefetch_slots=int(rng.integers(1, 9)),
        driver=None if prefetch == "auto" else str(rng.choice(["cpu", "host"])),
        link=Link(1000 / (layer_s * 10 ** rng.uniform(-1, 1)), layer_s * shape.layers, expert_share=rng.random()),
    )  # fmt: skip


@pytest.mark.parametrize("prefetch", ["off", "auto", "oracle", "previous"])
@pytest.mark.parametrize("scope", Scope)
def test_no_row_takes_less_than_its_bound(scope, prefetch):
    nearest = 0.0
    for seed in range(12):
        for row in rows_of(*timed_case(seed, scope, prefetch)):
            assert row.bound_s_per_token <= row.time_s_per_token * (1 + 1e-12)
            assert 0 < row.bound_share <= 1
            nearest = max(nearest, row.bound_share)
    assert nearest > 0.97


def test_prefetch_comes_nearer_to_a_bound_that_it_does_not_change():
    sweep = Sweep(policies=("lru",), budgets=("12 slots",), link=Link(bytes_per_s=0.2e6, compute_s=3e-3))
    plain, prefetched = (rows_of(random_trace(), replace(sweep, prefetch=how)) for how in ("off", "oracle"))
    for before, after in zip(plain, prefetched, strict=True):
        assert before.bound_s_per_token == after.bound_s_per_token > 3e-3
        assert before.bound_share < after.bound_share < 1


def test_only_rounding_is_set_to_the_bound():
    times = Times(0.0, 1.0, 1.0)
    assert times.with_bound(0.5).bound_share == 0.5
    assert times.with_bound(1 + 1e-12).bound_share == 1
    assert times.with_bound(1.01).bound_share == 1.01


def test_rows_of_staging_do_not_limit_the_optimum():
    trace = random_trace(prompt=3)
    for start in ("cold", "warm"):
        free, tight = (
            find(rows_of(trace, replace(SMALL, staging=staging)), policy="belady", start=start, phase="decode",
                 budget="12 slots")
            for staging in (0, 1)
        )  # fmt: skip
        assert (free.hits, tight.staging_slots) == (tight.hits, 1)


def test_a_link_needs_the_size_of_an_expert():
    with pytest.raises(HotsetError, match="a modelled link needs the size of an expert"):
        rows_of(without_size(random_trace()), replace(SMALL, link=Link(bytes_per_s=1e6, compute_s=3e-3)))
    assert {row.bytes_per_token for row in rows_of(without_size(random_trace()))} == {None}


def test_several_traces_and_progress():
    traces = {"a": random_trace(0), "b": random_trace(1, requests=1)}
    steps = []
    rows = simulate(traces, SMALL, advance=lambda: steps.append(1)).rows
    assert len(steps) == count_jobs(traces, SMALL) == 3 * 2 * (2 + 1)
    assert {row.trace for row in rows} == {"a", "b"}


def test_a_sweep_is_deterministic():
    sweep = Sweep(budgets=BUDGETS, scope=Scope.POOL, streams=2)
    one, two = (simulate({"t": random_trace(prompt=2)}, sweep) for _ in range(2))
    assert one.as_dict() == two.as_dict()
    assert one.as_dict()["rows"] == [row.as_dict() for row in one.rows]


def test_belady_bounds_answers_that_take_turns_with_prompts():
    # Two slots. A prompt brings 1 anyway, so until then a slot is better used for 0: hits of 2, 1 and 0.
    shape = ModelShape(1, 3, 1)
    turns = [
        (Phase.PREFILL if number == 4 else Phase.DECODE, [[[expert]]])
        for number, expert in enumerate([0, 1, 2, 2, 1, 1, 0])
    ]
    rows = rows_of(trace_of(shape, [turns]), Sweep(policies=("lru",), budgets=("2 slots",)))
    assert find(rows, policy="belady", phase="decode").hits == 3

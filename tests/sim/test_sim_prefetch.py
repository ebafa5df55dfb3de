"""Prefetch over a modelled link, held against a slow model that walks a trace with lists and two clocks."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from sim_samples import random_trace, trace_of

sys.path.insert(0, str(Path(__file__).parents[1] / "forecasts"))
sys.path.insert(0, str(Path(__file__).parents[1] / "prefetch"))

from forecast_samples import Live, events_of
from forecast_samples import random_trace as told_trace
from test_trial import SlowTrial

from hotset.cache import Controller, Scope, SlotPlan
from hotset.errors import HotsetError
from hotset.forecasts import parse as parse_forecast
from hotset.policies import parse
from hotset.prefetch import Claim, PrefetchPlan, plan_prefetch
from hotset.prefetch.times import MissAdjustedTimes
from hotset.shape import ModelShape
from hotset.sim import Link
from hotset.sim.prefetch import PrefetchResult, driver_for, follow_replay, simulate_prefetch
from hotset.trace import Phase, Trace

SIZE = 1000
OFTEN = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass
class Sent:
    """One prediction: for whom, and what of it has not arrived."""

    layer: int
    expert: int
    left: float
    event: int  # after which it was sent
    step: int
    turn: int


TURNS = count()


@dataclass(frozen=True)
class Case:
    """A small trace, a cache and a link, all drawn from a seed."""

    trace: Trace
    link: Link
    cached: int
    policy: str
    scope: Scope
    preloaded: int | None = None  # the seed of what is resident at the start

    def cache(self) -> Controller:
        cache = Controller(SlotPlan(self.trace.shape, self.cached, self.scope), parse(self.policy))
        if self.preloaded is not None:
            shape = (self.trace.shape.layers, self.trace.shape.experts)
            cache.preload(np.random.default_rng(self.preloaded).random(shape))
        return cache

    def fast(self, forecast: str, *, link: Link | None = None, **options: Any) -> PrefetchResult:
        return simulate_prefetch(
            self.trace, self.cache(), link or self.link, forecast, plan_of(self.trace.shape, **options)
        )


def case_of(seed: int, **options: Any) -> Case:
    """Speeds are drawn, not round: no prediction arrives at the very moment at which it is asked for."""
    rng = np.random.default_rng(seed)
    layers, experts, top_k = int(rng.integers(1, 5)), int(rng.integers(3, 10)), int(rng.integers(1, 4))
    shape = ModelShape(layers, experts, min(top_k, experts - 1), SIZE)
    prompt, tokens, requests = int(rng.integers(0, 4)), int(rng.integers(2, 24)), int(rng.integers(1, 4))
    trace = random_trace(seed, requests, tokens, prompt, shape)
    if rng.random() < 0.3:
        trace = leave_layers_out(trace, rng)
    scope = Scope(rng.choice(list(Scope)))
    least = shape.top_k if scope is Scope.POOL else max(shape.top_k, layers)
    cached = int(rng.integers(least, max(least, shape.total_experts // 2) + 1))
    layer_s = 1e-3 * rng.random() + 1e-4
    link = Link(
        bytes_per_s=SIZE / (layer_s * 10 ** rng.uniform(-1.0, 1.0)),
        compute_s=layer_s * layers,
        latency_s=layer_s * rng.random() if rng.random() < 0.5 else 0.0,
        expert_share=float(rng.random()),
    )
    return replace(Case(trace, link, cached, str(rng.choice(["lru", "lfu"])), scope), **options)


def leave_layers_out(trace: Trace, rng: np.random.Generator) -> Trace:
    """Some tokens do not run through all layers, as where a model routes around them."""
    experts = trace.experts.copy()
    experts[rng.random(experts.shape[:2]) < 0.15] = -1
    experts[:, 0] = trace.experts[:, 0]
    return replace(trace, experts=experts)


def plan_of(
    shape: ModelShape, driver: str = "cpu", *, slots: int = 4, auto: bool = True, distances: int | None = None,
    min_probability: float = 0.3,
) -> PrefetchPlan:  # fmt: skip
    plan = plan_prefetch(driver, shape, rows=slots, trial=auto)
    return replace(plan, layers_ahead=distances or plan.layers_ahead, min_probability=min_probability)


def slow(case: Case, forecast: str, plan: PrefetchPlan) -> dict[str, float]:  # noqa: C901 - one loop, in order
    """The same from the words, one event after the other, with a cache that is asked and not replayed."""
    trace, link, cache = case.trace, case.link, case.cache()
    layers, experts = trace.shape.layers, trace.shape.experts
    layer_s = link.compute_s / layers
    trial = SlowTrial(layers, auto=plan.trial and forecast != "off", most=plan.rows_per_part)
    if not plan.adaptive:
        trial.most = [plan.rows_per_part] * (layers + 1)
    live = None if forecast in ("off", "oracle") else Live(parse_forecast(forecast), trace.shape)
    events, told = list(trace), events_of(trace)
    times = MissAdjustedTimes()
    underway: list[Sent] = []  # in the order of departure
    draining: list[Sent] = []  # of no use, and still on their way
    sums = dict.fromkeys(asdict(NOTHING), 0.0)
    now = link_free = step_s = 0.0
    missed = 0
    for number, event in enumerate(events):
        layer, step, decode = event.layer, event.step, event.phase == Phase.DECODE
        # All that the link could carry since it was last free: first come first served, or the nearest layer first.
        idle_bytes = (now - link_free) * link.bytes_per_s
        order = sorted(underway, key=lambda sent: sent.layer) if plan.requeues else underway + draining
        for sent in order if plan.requeues else sorted(order, key=lambda sent: sent.turn):
            moved = max(0.0, min(idle_bytes, sent.left))
            sent.left -= moved
            idle_bytes -= moved
        served = cache.serve(event)
        missing = {load.key.expert for load in served.loads}
        missed += len(missing)
        mine = [sent for sent in underway if sent.layer == layer]
        others = [sent for sent in underway if sent.layer != layer]
        if plan.requeues:  # what only stood in the queue was never sent
            mine = [sent for sent in mine if sent.left < SIZE]
        true = [sent for sent in mine if sent.expert in missing and (plan.wraps or sent.step == step)]
        wrong = [sent for sent in mine if sent not in true]
        batch_bytes = 0.0
        if plan.claim is Claim.BATCH:
            everything = underway + draining
            late = [s for s in true if any(o.left > 0 and o.event <= s.event for o in everything)]
            last = max((sent.event for sent in late), default=-1)
            waited = [sent for sent in everything if sent.event <= last and sent not in true]
            batch_bytes = sum(sent.left for sent in waited)
        else:
            late, waited = [sent for sent in true if sent.left > 0.0], []
        in_time = [sent for sent in true if sent not in late]
        moved = [SIZE if not plan.cancels else SIZE - sent.left for sent in wrong]
        sums["prefetched_bytes"] += sum(moved) + sum(SIZE - sent.left for sent in true)
        sums["wasted_bytes"] += sum(moved)
        sums["wasted"] += len(wrong)
        unasked = missing - {sent.expert for sent in true}
        load = len(unasked) * SIZE + sum(sent.left for sent in late)
        for sent in waited:
            sent.left = 0.0
        underway = others
        draining = [sent for sent in draining + ([] if plan.cancels else wrong) if sent.left > 0.0]
        waits = len(unasked) + len(late)
        transfer = (load + batch_bytes) / link.bytes_per_s + (link.latency_s if waits else 0.0)
        computes = layer_s * link.expert_share * (len(event.experts) - waits) / len(event.experts)
        stall = max(0.0, transfer - computes)
        if decode:
            sums["stall_s"] += stall
            sums["total_s"] += layer_s + stall
            sums["in_time"] += len(in_time)
            sums["late"] += len(late)
            sums["demand_bytes"] += load
            if plan.layer_trial:
                trial.note_event(layer, step, stall, len(in_time), len(late))
        is_idle = decode and trial.auto and trial.is_off(-1, step)
        seen = told[number]
        if not decode or trial.is_control_step(-1, step):
            seen = seen._replace(predictions=seen.predictions[:, :0])
        if live is not None and not is_idle:
            live.observe(seen)
        for distance in range(1, plan.reach + 1):
            if not decode or forecast == "off" or is_idle:
                break
            steps, target = divmod(layer + distance, layers)
            if steps and not plan.wraps:
                break
            budget = min(trial.predictions(target, step + steps), plan.max_ranks)
            if not budget:
                continue
            if plan.requeues:
                underway = [sent for sent in underway if sent.layer != target or sent.left < SIZE]
                budget -= sum(sent.layer == target for sent in underway)
            if live is not None:
                probability = live.probabilities(seen, distance).tolist()
            else:
                probability = truth(events, number, distance, layers, experts)
            candidates = list(range(experts))
            if plan.predicted_only and live is not None:
                candidates = [e for e in seen.predictions[distance - 1, : plan.max_ranks].tolist() if e >= 0]
            wanted = [expert for expert in candidates if probability[expert] >= plan.min_probability]
            wanted = sorted(wanted, key=lambda expert: -probability[expert])
            near = {key.expert for key in cache.residents() if key.layer == target}
            near |= {sent.expert for sent in underway if sent.layer == target}
            new = [expert for expert in wanted if expert not in near][: max(budget, 0)]
            part = [s for s in underway + draining if s.layer % plan.parts == target % plan.parts]
            for expert in new[: max(plan.rows_per_part - len(part), 0)]:
                underway.append(Sent(target, expert, SIZE, number, step, next(TURNS)))
        link_free = now + transfer
        now += layer_s + stall
        step_s += layer_s + stall
        if number + 1 == len(events) or events[number + 1].step != step:
            if decode:
                sums["steps_with"] += forecast != "off" and not trial.is_control_step(-1, step)
                seconds = times(step_s, missed) if plan.adjusts_times else step_s
                if seconds is not None:
                    trial.note_step(step, seconds)
            step_s, missed = 0.0, 0
    sums["layers_switched_off"] = sum(until > events[-1].step + 1 for until in trial.off_until[:-1])
    sums["switched_off"] = trial.off_until[-1] > events[-1].step + 1
    sums["margin"] = trial.margin
    sums["on_board_bytes"] = sum(SIZE - sent.left for sent in underway)
    return sums


def truth(events: list[Any], number: int, distance: int, layers: int, experts: int) -> list[float]:
    """Certainty for the experts that the layer so many layers later uses, if it and all before it run."""
    here, later = events[number], number + distance
    if later >= len(events):
        return [0.0] * experts
    passes, target = divmod(here.layer + distance, layers)
    found = events[later]
    is_it = (found.step, found.layer) == (here.step + passes, target)
    return [float(is_it and expert in found.experts) for expert in range(experts)]


NOTHING = PrefetchResult(0.0, 0.0, 0, 0, 0, 0.0, 0.0, 0.0, 0, 0, False)


def assert_equal(fast: PrefetchResult, slow: dict[str, float]) -> None:
    for name, value in asdict(fast).items():
        assert value == pytest.approx(slow[name], rel=1e-9, abs=1e-9 * (SIZE if "bytes" in name else 1.0)), name


def at_a_tie(slow: dict[str, float]) -> bool:
    """Whether a trial was right on one of its limits, as stalls that are all alike bring it: rounding decides there."""
    return slow["margin"] < 1e-9


@OFTEN
@given(
    st.integers(0, 10**6), st.sampled_from(["off", "oracle", "previous"]), st.integers(0, 8), st.booleans(),
    st.integers(1, 3), st.sampled_from([0.0, 0.1, 0.3, 0.6]), st.sampled_from([None, 1, 2]),
)  # fmt: skip
def test_the_compiled_loop_does_what_the_slow_model_does(
    seed: int, forecast: str, slots: int, auto: bool, distances: int, min_probability: float, preloaded: int | None
) -> None:
    case = case_of(seed, preloaded=preloaded)
    wish: dict[str, Any] = {"auto": auto, "distances": min(distances, case.trace.shape.layers)}
    wish["min_probability"] = min_probability
    expected = slow(case, forecast, plan_of(case.trace.shape, slots=slots, **wish))
    assume(not at_a_tie(expected))
    assert_equal(case.fast(forecast, slots=slots, **wish), expected)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("forecast", ["gate", "token"])
def test_forecasts_are_told_of_predictions_and_tokens(forecast: str, batch: int) -> None:
    shape = ModelShape(4, 10, 3, SIZE)
    trace = told_trace(shape, requests=6, new=24, batch=batch)
    case = Case(trace, Link(bytes_per_s=2e6, compute_s=4e-3), 16, "lru", Scope.LAYER)
    found = case.fast(forecast, slots=6, distances=2)
    assert found.in_time + found.late > 0
    assert_equal(found, slow(case, forecast, plan_of(shape, slots=6, distances=2)))


@OFTEN
@given(
    st.integers(0, 10**6), st.sampled_from(["host", "device"]), st.integers(0, 8), st.booleans(),
    st.sampled_from([None, 1]),
)  # fmt: skip
def test_the_rules_of_other_drivers_are_followed_with_an_oracle(
    seed: int, driver: str, slots: int, auto: bool, preloaded: int | None
) -> None:
    case = case_of(seed, preloaded=preloaded)
    plan = plan_of(case.trace.shape, driver, slots=slots, auto=auto)
    found = simulate_prefetch(case.trace, case.cache(), case.link, "oracle", plan)
    expected = slow(case, "oracle", plan)
    assume(not at_a_tie(expected))
    assert_equal(found, expected)


@pytest.mark.parametrize("speed", [0.6e6, 2e6, 8e6])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("driver", ["host", "device"])
def test_the_rules_of_other_drivers_are_followed_with_the_routers(driver: str, batch: int, speed: float) -> None:
    shape = ModelShape(5, 10, 3, SIZE)
    trace = told_trace(shape, requests=6, new=24, batch=batch, seed=3)
    case = Case(trace, Link(bytes_per_s=speed, compute_s=4e-3), 16, "lru", Scope.LAYER)
    for auto in (True, False):
        plan = plan_prefetch(driver, shape, trial=auto)
        found = simulate_prefetch(trace, case.cache(), case.link, "gate", plan)
        assert found.in_time + found.late > 0
        assert_equal(found, slow(case, "gate", plan))


def test_what_is_fetched_by_the_device_is_only_what_routers_predicted_and_never_for_the_first_layer() -> None:
    shape = ModelShape(2, 8, 1, SIZE)
    steps = [[[number % 8], [(number + 3) % 8]] for number in range(30)]
    trace = trace_of(shape, [[(Phase.DECODE, [step]) for step in steps]])
    link, plan = Link(bytes_per_s=1e9, compute_s=4e-3), plan_prefetch("device", shape, trial=False)
    cache = Controller(SlotPlan(shape, 2), parse("lru"))
    found = simulate_prefetch(trace, cache, link, "oracle", plan)
    assert (found.in_time, found.late) == (30, 0)  # of 60 misses those of the second layer
    wrapped = simulate_prefetch(
        trace, Controller(SlotPlan(shape, 2), parse("lru")), link, "oracle", plan_prefetch("cpu", shape, trial=False)
    )
    assert wrapped.in_time == 59
    blind = np.full((trace.tokens, 2, 2, 1), -1, np.int16)
    unpredicted = replace(trace, predictions=blind)
    cache = Controller(SlotPlan(shape, 2), parse("lru"))
    assert simulate_prefetch(unpredicted, cache, link, "gate", plan).prefetched_bytes == 0


def test_a_device_prefetches_by_the_routers_alone() -> None:
    case = case_of(3)
    plan = plan_prefetch("device", case.trace.shape)
    with pytest.raises(HotsetError, match="best is made by a host"):
        simulate_prefetch(case.trace, case.cache(), case.link, "best", plan)
    with pytest.raises(HotsetError, match="--record-lookahead 2"):
        simulate_prefetch(case.trace, case.cache(), case.link, "gate", plan)


def test_the_driver_is_the_device_where_the_trace_holds_what_it_predicts_by() -> None:
    told = told_trace(ModelShape(4, 10, 3, SIZE), requests=2)
    near = replace(told, predictions=None if told.predictions is None else told.predictions[:, :, :1])
    bare = replace(told, predictions=None)
    assert [str(driver_for(told, asked)) for asked in ("auto", "gate", "oracle", "best")] == ["device"] * 3 + ["cpu"]
    assert {str(driver_for(trace, asked)) for trace in (near, bare) for asked in ("auto", "oracle")} == {"cpu"}


def test_a_long_trace_is_followed_through_pauses_too() -> None:
    case = Case(random_trace(11, 1, 700), Link(1.3e6, 3e-3, 1e-4), 8, "lru", Scope.LAYER)
    pays = case.fast("previous")
    assert_equal(pays, slow(case, "previous", plan_of(case.trace.shape)))
    assert pays.steps_with > 300
    # Nothing is as likely as that, so that nothing is sent for and there is nothing to gain.
    blind = case.fast("previous", min_probability=2.0)
    assert_equal(blind, slow(case, "previous", plan_of(case.trace.shape, min_probability=2.0)))
    assert blind.steps_with < 100


def test_what_pays_is_switched_on_and_what_does_not_is_off_at_the_end() -> None:
    case = Case(random_trace(2, 1, 200), Link(1.3e6, 3e-3, 1e-4), 8, "lru", Scope.LAYER)
    oracle = case.fast("oracle")
    assert 150 < oracle.steps_with < 200 - 200 // 16
    assert not oracle.switched_off
    assert case.fast("oracle", auto=False).steps_with == 200
    # Nothing is as likely as that, so that nothing is sent for and there is nothing to gain.
    blind = case.fast("previous", min_probability=2.0)
    assert (blind.prefetched_bytes, blind.switched_off) == (0.0, True)
    assert 8 <= blind.steps_with <= 32 + 1
    off = case.fast("off")
    assert (off.steps_with, off.switched_off, off.layers_switched_off) == (0, False, 0)


def test_what_is_resident_from_the_start_is_not_sent_for() -> None:
    # All that is ever used sits there already: without knowing that, the oracle would fetch it again.
    trace = trace_of(ModelShape(2, 4, 1, SIZE), [[(Phase.DECODE, [[[0], [1]]])] * 40])
    scores = np.zeros((2, 4))
    scores[0, 0] = scores[1, 1] = 1.0
    cache = Controller(SlotPlan(trace.shape, 2), parse("lru"))
    cache.preload(scores)
    link = Link(1e6, 4e-3)
    found = simulate_prefetch(trace, cache, link, "oracle", plan_of(trace.shape, slots=2, auto=False))
    assert (found.prefetched_bytes, found.stall_s) == (0.0, 0.0)
    unaware = follow_replay(
        trace, cache.replay(trace.events(), log=True), link, "oracle", plan_of(trace.shape, slots=2, auto=False)
    )
    assert unaware.wasted_bytes > 0


def test_a_forecast_may_have_learnt_from_earlier_requests() -> None:
    trace = told_trace(ModelShape(4, 10, 3, SIZE), requests=8, new=24)
    fit, test = trace.split(0.5, 0)
    link, plan = Link(bytes_per_s=2e6, compute_s=4e-3), SlotPlan(trace.shape, 16)
    for forecast in ("token", "eam", "best"):
        done = Controller(plan, parse("lru")).replay(test.events(), log=True)
        fresh, taught = (
            follow_replay(test, done, link, forecast, plan_of(trace.shape, auto=False), training_trace=past)
            for past in (None, fit)
        )
        assert taught.in_time + taught.late > fresh.in_time + fresh.late, forecast


def test_a_prediction_in_time_by_hand() -> None:
    # One layer of two is cold: an expert takes 1 ms, a layer 2 ms, half of it experts; one expert per token.
    shape = ModelShape(2, 4, 1, SIZE)
    steps = [[[0], [expert]] for expert in (1, 2, 3, 1)]
    trace = trace_of(shape, [[(Phase.DECODE, [step]) for step in steps]])
    case = Case(trace, Link(bytes_per_s=1e6, compute_s=4e-3), 2, "lru", Scope.LAYER)
    off = case.fast("off")
    # Layer 0 misses once, layer 1 always; nothing computes meanwhile: 1 ms each.
    assert off.stall_s == pytest.approx(5e-3)
    assert (off.demand_bytes, off.prefetched_bytes) == (5 * SIZE, 0)
    oracle = case.fast("oracle", auto=False)
    # The first event's expert keeps the link busy for the 1 ms it stalls, then it is free for 2 ms: all come in time.
    assert oracle.stall_s == pytest.approx(1e-3)
    assert (oracle.in_time, oracle.late, oracle.wasted) == (4, 0, 0)
    assert (oracle.demand_bytes, oracle.prefetched_bytes, oracle.wasted_bytes) == (SIZE, 4 * SIZE, 0)
    assert oracle.total_s == pytest.approx(8 * 2e-3 + 1e-3)
    # With auto, every other pass is a control pass to begin with: layer 1 of passes 0 and 2 stalls, too.
    assert case.fast("oracle").stall_s == pytest.approx(3e-3)


def test_a_prediction_too_late_saves_what_has_arrived_by_then() -> None:
    # As above, but an expert takes 3 ms: while layer 0 computes for 2 ms, two thirds of the prediction arrive.
    shape = ModelShape(2, 4, 1, SIZE)
    trace = trace_of(shape, [[(Phase.DECODE, [[[0], [expert]]]) for expert in (1, 2, 3, 1)]])
    case = Case(trace, Link(bytes_per_s=SIZE / 3e-3, compute_s=4e-3), 2, "lru", Scope.LAYER)
    oracle = case.fast("oracle", auto=False)
    assert oracle.stall_s == pytest.approx(3e-3 + 4 * 1e-3)
    assert (oracle.in_time, oracle.late, oracle.wasted) == (0, 4, 0)
    assert oracle.prefetched_bytes == pytest.approx(4 * SIZE * 2 / 3)
    assert oracle.demand_bytes == pytest.approx(SIZE + 4 * SIZE / 3)


@OFTEN
@given(st.integers(0, 10**6))
def test_off_is_what_the_link_says_of_the_same_misses(seed: int) -> None:
    case = case_of(seed)
    events = case.trace.events()
    times = case.link.times(events, case.cache().replay(events).misses, Phase.DECODE)
    found = case.fast("off")
    assert (found.stall_s, found.total_s) == pytest.approx(times)
    assert (found.in_time, found.late, found.wasted, found.prefetched_bytes, found.wasted_bytes) == (0, 0, 0, 0, 0)


@OFTEN
@given(st.integers(0, 10**6), st.sampled_from(["oracle", "previous"]), st.integers(0, 8), st.booleans())
def test_predictions_never_cost_time_and_what_they_save_reconciles(
    seed: int, forecast: str, slots: int, auto: bool
) -> None:
    case = case_of(seed)
    events = case.trace.events()
    misses = int(case.cache().replay(events).misses[events.phase == Phase.DECODE].sum())
    off, found = case.fast("off"), case.fast(forecast, slots=slots, auto=auto)
    assert found.stall_s <= off.stall_s * (1 + 1e-9)
    assert found.total_s - found.stall_s == pytest.approx(off.total_s - off.stall_s)
    assert found.in_time + found.late <= misses
    assert found.demand_bytes <= (misses - found.in_time) * SIZE + 1e-6
    assert off.demand_bytes == misses * SIZE
    # What demand was spared, and what was wasted, is what moved; a prompt may have claimed some.
    spared = off.demand_bytes - found.demand_bytes
    assert spared + found.wasted_bytes <= found.prefetched_bytes + 1e-6
    if not (events.phase == Phase.PREFILL).any():
        assert spared + found.wasted_bytes == pytest.approx(found.prefetched_bytes, abs=1e-6)


@OFTEN
@given(st.integers(0, 10**6), st.sampled_from(["off", "oracle", "previous"]))
def test_a_link_of_infinite_speed_never_stalls(seed: int, forecast: str) -> None:
    case = case_of(seed)
    fast = replace(case.link, bytes_per_s=float("inf"), latency_s=0.0)
    found = case.fast(forecast, link=fast, auto=False)
    assert (found.stall_s, found.late) == (0.0, 0)
    assert found.total_s > 0


@pytest.mark.parametrize("forecast", ["off", "oracle", "previous"])
def test_predictions_leave_the_cache_as_a_plain_replay_does(forecast: str) -> None:
    case = case_of(11)
    plain, predicted = case.cache(), case.cache()
    plain.replay(case.trace.events())
    simulate_prefetch(case.trace, predicted, case.link, forecast, plan_of(case.trace.shape, slots=6))
    assert np.array_equal(plain.table.counters, predicted.table.counters)
    assert plain.residents() == predicted.residents()


@OFTEN
@given(st.integers(0, 10**6))
def test_no_slots_are_as_good_as_off(seed: int) -> None:
    case = case_of(seed)
    nothing = {"steps_with": 0, "layers_switched_off": 0, "switched_off": False}
    assert replace(case.fast("oracle", slots=0), **nothing) == case.fast("off")


@pytest.mark.parametrize("auto", [True, False])
def test_more_slots_hardly_ever_hurt_who_knows_the_future(auto: bool) -> None:
    # They can, by a little: experts that came in time compute while the link is busy with the others, so it is free
    # for a shorter while, and a prediction for the next layer may just be late. It then waits for the latency, too.
    for seed in [*range(80), 243]:
        case = case_of(seed)
        stalls = [case.fast("oracle", slots=slots, auto=auto).stall_s for slots in range(8)]
        assert all(more <= 1.01 * few + 1e-12 for few, more in pairwise(stalls))
        assert stalls[-1] <= stalls[1] + 1e-12


def test_two_experts_are_enough() -> None:
    trace = random_trace(0, 1, 30, shape=ModelShape(3, 2, 1, SIZE))
    case = Case(trace, Link(1.7e6, 3.1e-3), 3, "lru", Scope.LAYER)
    assert_equal(case.fast("previous"), slow(case, "previous", plan_of(case.trace.shape)))


def test_distances_may_go_around_all_layers() -> None:
    for seed in (6, 24, 36, 61):
        assert_equal(
            case_of(seed).fast("previous", distances=3),
            slow(case_of(seed), "previous", plan_of(case_of(seed).trace.shape, distances=3)),
        )


@pytest.mark.parametrize("distances", [4, -1])
def test_distances_beyond_those_known_are_refused(distances: int) -> None:
    # In a process of its own, for it may not survive.
    lines = [
        "import sys", f"sys.path[:0] = {[str(Path(__file__).parent)]}",
        "from test_sim_prefetch import HotsetError, case_of",
        f"try: case_of(5).fast('oracle', distances={distances})",
        "except HotsetError as error: print('refused:', error)",
    ]  # fmt: skip
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert "refused: the layers that prefetch reaches ahead must be a whole number from 1 to 3" in ended.stdout


@pytest.mark.parametrize("forecast", ["off", "oracle", "previous"])
def test_a_trace_without_the_size_of_an_expert_is_refused(forecast: str) -> None:
    case = case_of(1)
    nameless = replace(case.trace, shape=replace(case.trace.shape, expert_bytes=None))
    with pytest.raises(HotsetError, match="--expert-bytes"):
        simulate_prefetch(nameless, case.cache(), case.link, forecast, plan_of(nameless.shape))


def test_an_unknown_forecast_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(HotsetError, match=r"no forecast is called.*previous"):
        case_of(1).fast("crystal ball")

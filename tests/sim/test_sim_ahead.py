"""Fetching ahead over a modelled link, held against a slow model that walks a trace with lists and two clocks."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
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
from hotset.shape import ModelShape
from hotset.sim import Link
from hotset.sim.ahead import Journey, follow_replay, simulate_ahead
from hotset.trace import Phase, Trace

SIZE = 1000
OFTEN = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass
class Sent:
    """One guess: for whom, and what of it has not arrived."""

    layer: int
    expert: int
    left: float


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

    def fast(self, forecast: str, *, link: Link | None = None, **options: Any) -> Journey:
        return simulate_ahead(self.trace, self.cache(), link or self.link, forecast, **{"slots": 4} | options)


def case_of(seed: int, **options: Any) -> Case:
    """Speeds are drawn, not round: no guess arrives at the very moment at which it is asked for."""
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


def slow(
    case: Case, forecast: str, slots: int, *, auto: bool = True, distances: int = 1, least_chance: float = 0.3
) -> dict[str, float]:
    """The same from the words, one event after the other, with a cache that is asked and not replayed."""
    trace, link, cache = case.trace, case.link, case.cache()
    layers, experts = trace.shape.layers, trace.shape.experts
    layer_s = link.compute_s / layers
    payoff = SlowTrial(layers, auto=auto and forecast != "off", most=slots)
    live = None if forecast in ("off", "oracle") else Live(parse_forecast(forecast), trace.shape)
    events, told = list(trace), events_of(trace)
    underway: list[Sent] = []  # in the order of departure
    sums = dict.fromkeys(asdict(NOTHING), 0.0)
    now = link_free = pass_s = 0.0
    for number, event in enumerate(events):
        layer, step = event.layer, event.step
        # All that the link could carry since it was last free, first come first served.
        idle_bytes = (now - link_free) * link.bytes_per_s
        for guess in underway:
            moved = max(0.0, min(idle_bytes, guess.left))
            guess.left -= moved
            idle_bytes -= moved
        served = cache.serve(event)
        missing = {load.key.expert for load in served.loads}
        mine = [guess for guess in underway if guess.layer == layer]
        underway = [guess for guess in underway if guess.layer != layer]
        true = [guess for guess in mine if guess.expert in missing]
        wrong = [guess for guess in mine if guess.expert not in missing]
        sums["guessed_bytes"] += sum(SIZE - guess.left for guess in mine)
        sums["wasted_bytes"] += sum(SIZE - guess.left for guess in wrong)
        sums["wasted"] += len(wrong)
        in_time = [guess for guess in true if guess.left == 0.0]
        late = [guess for guess in true if guess.left > 0.0]
        unguessed = missing - {guess.expert for guess in true}
        load = len(unguessed) * SIZE + sum(guess.left for guess in late)
        waits = len(unguessed) + len(late)
        transfer = load / link.bytes_per_s + (link.latency_s if waits else 0.0)
        computes = layer_s * link.expert_share * (len(event.experts) - waits) / len(event.experts)
        stall = max(0.0, transfer - computes)
        if event.phase == Phase.DECODE:
            sums["stall_s"] += stall
            sums["total_s"] += layer_s + stall
            sums["in_time"] += len(in_time)
            sums["late"] += len(late)
            sums["demand_bytes"] += load
            payoff.note(layer, step, stall, len(in_time), len(late))
        if live is not None:
            live.observe(told[number])
        for distance in range(1, distances + 1):
            if event.phase != Phase.DECODE or forecast == "off":
                break
            passes, target = divmod(layer + distance, layers)
            if live is not None:
                chance = live.chances(told[number], distance).tolist()
            else:
                chance = truth(events, number, distance, layers, experts)
            wanted = [expert for expert in range(experts) if chance[expert] >= least_chance]
            wanted = sorted(wanted, key=lambda expert: (-chance[expert], expert))
            near = {key.expert for key in cache.residents() if key.layer == target}
            near |= {guess.expert for guess in underway if guess.layer == target}
            new = [expert for expert in wanted if expert not in near][: payoff.guesses(target, step + passes)]
            underway += [Sent(target, expert, SIZE) for expert in new[: slots - len(underway)]]
        link_free = now + transfer
        now += layer_s + stall
        pass_s += layer_s + stall
        if number + 1 == len(events) or events[number + 1].step != step:
            if event.phase == Phase.DECODE:
                sums["passes_with"] += forecast != "off" and not payoff.goes_without(-1, step)
                payoff.note_pass(step, pass_s)
            pass_s = 0.0
    sums["layers_switched_off"] = sum(until > events[-1].step + 1 for until in payoff.off_until[:-1])
    sums["switched_off"] = payoff.off_until[-1] > events[-1].step + 1
    sums["on_board_bytes"] = sum(SIZE - guess.left for guess in underway)
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


NOTHING = Journey(0.0, 0.0, 0, 0, 0, 0.0, 0.0, 0.0, 0, 0, False)


def assert_equal(fast: Journey, slow: dict[str, float]) -> None:
    for name, value in asdict(fast).items():
        assert value == pytest.approx(slow[name], rel=1e-9, abs=1e-9 * (SIZE if "bytes" in name else 1.0)), name


@OFTEN
@given(
    st.integers(0, 10**6), st.sampled_from(["off", "oracle", "previous"]), st.integers(0, 8), st.booleans(),
    st.integers(1, 3), st.sampled_from([0.0, 0.1, 0.3, 0.6]), st.sampled_from([None, 1, 2]),
)  # fmt: skip
def test_the_compiled_loop_does_what_the_slow_model_does(
    seed: int, forecast: str, slots: int, auto: bool, distances: int, least_chance: float, preloaded: int | None
) -> None:
    case = case_of(seed, preloaded=preloaded)
    wish: dict[str, Any] = {"auto": auto, "distances": min(distances, case.trace.shape.layers)}
    wish["least_chance"] = least_chance
    assert_equal(case.fast(forecast, slots=slots, **wish), slow(case, forecast, slots, **wish))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("forecast", ["gate", "token"])
def test_forecasts_are_told_of_guesses_and_tokens(forecast: str, batch: int) -> None:
    shape = ModelShape(4, 10, 3, SIZE)
    trace = told_trace(shape, requests=6, new=24, batch=batch)
    case = Case(trace, Link(bytes_per_s=2e6, compute_s=4e-3), 16, "lru", Scope.LAYER)
    found = case.fast(forecast, slots=6, distances=2)
    assert found.in_time + found.late > 0
    assert_equal(found, slow(case, forecast, 6, distances=2))


def test_a_long_trace_is_followed_through_pauses_too() -> None:
    case = Case(random_trace(11, 1, 700), Link(1.3e6, 3e-3, 1e-4), 8, "lru", Scope.LAYER)
    pays = case.fast("previous")
    assert_equal(pays, slow(case, "previous", 4))
    assert pays.passes_with > 300
    # Nothing is as likely as that, so that nothing is sent for and there is nothing to gain.
    blind = case.fast("previous", least_chance=2.0)
    assert_equal(blind, slow(case, "previous", 4, least_chance=2.0))
    assert blind.passes_with < 100


def test_what_pays_is_switched_on_and_what_does_not_is_off_at_the_end() -> None:
    case = Case(random_trace(2, 1, 200), Link(1.3e6, 3e-3, 1e-4), 8, "lru", Scope.LAYER)
    oracle = case.fast("oracle")
    assert 150 < oracle.passes_with < 200 - 200 // 16
    assert not oracle.switched_off
    assert case.fast("oracle", auto=False).passes_with == 200
    # Nothing is as likely as that, so that nothing is sent for and there is nothing to gain.
    blind = case.fast("previous", least_chance=2.0)
    assert (blind.guessed_bytes, blind.switched_off) == (0.0, True)
    assert 8 <= blind.passes_with <= 32 + 1
    off = case.fast("off")
    assert (off.passes_with, off.switched_off, off.layers_switched_off) == (0, False, 0)


def test_what_is_resident_from_the_start_is_not_sent_for() -> None:
    # All that is ever used sits there already: without knowing that, the oracle would fetch it again.
    trace = trace_of(ModelShape(2, 4, 1, SIZE), [[(Phase.DECODE, [[[0], [1]]])] * 40])
    scores = np.zeros((2, 4))
    scores[0, 0] = scores[1, 1] = 1.0
    cache = Controller(SlotPlan(trace.shape, 2), parse("lru"))
    cache.preload(scores)
    link = Link(1e6, 4e-3)
    found = simulate_ahead(trace, cache, link, "oracle", slots=2, auto=False)
    assert (found.guessed_bytes, found.stall_s) == (0.0, 0.0)
    unaware = follow_replay(trace, cache.replay(trace.events(), log=True), link, "oracle", slots=2, auto=False)
    assert unaware.wasted_bytes > 0


def test_a_forecast_may_have_learnt_from_earlier_requests() -> None:
    trace = told_trace(ModelShape(4, 10, 3, SIZE), requests=8, new=24)
    fit, test = trace.split(0.5, 0)
    link, plan = Link(bytes_per_s=2e6, compute_s=4e-3), SlotPlan(trace.shape, 16)
    for forecast in ("token", "eam", "best"):
        done = Controller(plan, parse("lru")).replay(test.events(), log=True)
        fresh, taught = (
            follow_replay(test, done, link, forecast, slots=4, auto=False, taught=past) for past in (None, fit)
        )
        assert taught.in_time + taught.late > fresh.in_time + fresh.late, forecast


def test_a_guess_in_time_by_hand() -> None:
    # One layer of two is cold: an expert takes 1 ms, a layer 2 ms, half of it experts; one expert per token.
    shape = ModelShape(2, 4, 1, SIZE)
    steps = [[[0], [expert]] for expert in (1, 2, 3, 1)]
    trace = trace_of(shape, [[(Phase.DECODE, [step]) for step in steps]])
    case = Case(trace, Link(bytes_per_s=1e6, compute_s=4e-3), 2, "lru", Scope.LAYER)
    off = case.fast("off")
    # Layer 0 misses once, layer 1 always; nobody is there to compute meanwhile: 1 ms each.
    assert off.stall_s == pytest.approx(5e-3)
    assert (off.demand_bytes, off.guessed_bytes) == (5 * SIZE, 0)
    oracle = case.fast("oracle", auto=False)
    # The first event's expert keeps the link busy for the 1 ms it stalls, then it is free for 2 ms: all come in time.
    assert oracle.stall_s == pytest.approx(1e-3)
    assert (oracle.in_time, oracle.late, oracle.wasted) == (4, 0, 0)
    assert (oracle.demand_bytes, oracle.guessed_bytes, oracle.wasted_bytes) == (SIZE, 4 * SIZE, 0)
    assert oracle.total_s == pytest.approx(8 * 2e-3 + 1e-3)
    # With auto, every other pass is a control pass to begin with: layer 1 of passes 0 and 2 stalls, too.
    assert case.fast("oracle").stall_s == pytest.approx(3e-3)


def test_a_guess_too_late_saves_what_has_arrived_by_then() -> None:
    # As above, but an expert takes 3 ms: while layer 0 computes for 2 ms, two thirds of the guess arrive.
    shape = ModelShape(2, 4, 1, SIZE)
    trace = trace_of(shape, [[(Phase.DECODE, [[[0], [expert]]]) for expert in (1, 2, 3, 1)]])
    case = Case(trace, Link(bytes_per_s=SIZE / 3e-3, compute_s=4e-3), 2, "lru", Scope.LAYER)
    oracle = case.fast("oracle", auto=False)
    assert oracle.stall_s == pytest.approx(3e-3 + 4 * 1e-3)
    assert (oracle.in_time, oracle.late, oracle.wasted) == (0, 4, 0)
    assert oracle.guessed_bytes == pytest.approx(4 * SIZE * 2 / 3)
    assert oracle.demand_bytes == pytest.approx(SIZE + 4 * SIZE / 3)


@OFTEN
@given(st.integers(0, 10**6))
def test_off_is_what_the_link_says_of_the_same_misses(seed: int) -> None:
    case = case_of(seed)
    events = case.trace.events()
    times = case.link.times(events, case.cache().replay(events).misses, Phase.DECODE)
    found = case.fast("off")
    assert (found.stall_s, found.total_s) == pytest.approx(times)
    assert (found.in_time, found.late, found.wasted, found.guessed_bytes, found.wasted_bytes) == (0, 0, 0, 0, 0)


@OFTEN
@given(st.integers(0, 10**6), st.sampled_from(["oracle", "previous"]), st.integers(0, 8), st.booleans())
def test_guesses_never_cost_time_and_what_they_save_reconciles(
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
    # What demand was spared, and what was in vain, is what travelled; a prompt may have claimed some.
    spared = off.demand_bytes - found.demand_bytes
    assert spared + found.wasted_bytes <= found.guessed_bytes + 1e-6
    if not (events.phase == Phase.PREFILL).any():
        assert spared + found.wasted_bytes == pytest.approx(found.guessed_bytes, abs=1e-6)


@OFTEN
@given(st.integers(0, 10**6), st.sampled_from(["off", "oracle", "previous"]))
def test_a_link_of_infinite_speed_never_stalls(seed: int, forecast: str) -> None:
    case = case_of(seed)
    fast = replace(case.link, bytes_per_s=float("inf"), latency_s=0.0)
    found = case.fast(forecast, link=fast, auto=False)
    assert (found.stall_s, found.late) == (0.0, 0)
    assert found.total_s > 0


@pytest.mark.parametrize("forecast", ["off", "oracle", "previous"])
def test_guesses_leave_the_cache_as_a_plain_replay_does(forecast: str) -> None:
    case = case_of(11)
    plain, guessed = case.cache(), case.cache()
    plain.replay(case.trace.events())
    simulate_ahead(case.trace, guessed, case.link, forecast, slots=6)
    assert np.array_equal(plain.table.counters, guessed.table.counters)
    assert plain.residents() == guessed.residents()


@OFTEN
@given(st.integers(0, 10**6))
def test_no_slots_are_as_good_as_off(seed: int) -> None:
    case = case_of(seed)
    nothing = {"passes_with": 0, "layers_switched_off": 0, "switched_off": False}
    assert replace(case.fast("oracle", slots=0), **nothing) == case.fast("off")


@pytest.mark.parametrize("auto", [True, False])
def test_more_slots_hardly_ever_hurt_who_knows_the_future(auto: bool) -> None:
    # They can, by a little: experts that came in time compute while the link is busy with the others, so it is free
    # for a shorter while, and a guess for the next layer may be late by a hair. It then waits for the latency, too.
    for seed in [*range(80), 243]:
        case = case_of(seed)
        stalls = [case.fast("oracle", slots=slots, auto=auto).stall_s for slots in range(8)]
        assert all(more <= 1.01 * few + 1e-12 for few, more in pairwise(stalls))
        assert stalls[-1] <= stalls[1] + 1e-12


def test_two_experts_are_enough() -> None:
    trace = random_trace(0, 1, 30, shape=ModelShape(3, 2, 1, SIZE))
    case = Case(trace, Link(1.7e6, 3.1e-3), 3, "lru", Scope.LAYER)
    assert_equal(case.fast("previous"), slow(case, "previous", 4))


def test_distances_may_go_around_all_layers() -> None:
    for seed in (6, 24, 36, 61):
        assert_equal(case_of(seed).fast("previous", distances=3), slow(case_of(seed), "previous", 4, distances=3))


@pytest.mark.parametrize("distances", [4, -1])
def test_distances_beyond_those_known_are_refused(distances: int) -> None:
    # In a process of its own, for it may not survive.
    lines = [
        "import sys", f"sys.path[:0] = {[str(Path(__file__).parent)]}",
        "from test_sim_ahead import HotsetError, case_of",
        f"try: case_of(5).fast('oracle', distances={distances})",
        "except HotsetError as error: print('refused:', error)",
    ]  # fmt: skip
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert "refused: the layers that guesses reach ahead must be a whole number from 1 to 3" in ended.stdout


@pytest.mark.parametrize("forecast", ["off", "oracle", "previous"])
def test_a_trace_without_the_size_of_an_expert_is_refused(forecast: str) -> None:
    case = case_of(1)
    nameless = replace(case.trace, shape=replace(case.trace.shape, expert_bytes=None))
    with pytest.raises(HotsetError, match="--expert-bytes"):
        simulate_ahead(nameless, case.cache(), case.link, forecast, slots=4)


def test_an_unknown_forecast_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(HotsetError, match=r"no forecast is called.*previous"):
        case_of(1).fast("crystal ball")

"""The device-driven engine among all that changes a cache: prefetch, pins, policies, recordings, prompts and failures.

Without a GPU the kernels run in Triton's interpreter, and a step is run again instead of being captured.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton")

import tiny_device  # noqa: E402
from tiny_device import DEVICE  # noqa: E402

from hotset import policies  # noqa: E402
from hotset.cache import warm_pin  # noqa: E402
from hotset.cache.controller import Controller  # noqa: E402
from hotset.cache.monitor import CacheMonitor  # noqa: E402
from hotset.cache.plan import Scope, SlotPlan  # noqa: E402
from hotset.cache.table import WARM  # noqa: E402
from hotset.engine import build  # noqa: E402
from hotset.engine.build import stock_engine  # noqa: E402
from hotset.engine.device import capture  # noqa: E402
from hotset.engine.device.capture import Capture, WarmUp  # noqa: E402
from hotset.engine.device.variant import lookahead_key  # noqa: E402
from hotset.engine.engine import Engine  # noqa: E402
from hotset.engine.host.forecasting import ForecastPredictor  # noqa: E402
from hotset.engine.step import Step  # noqa: E402
from hotset.errors import HotsetError  # noqa: E402
from hotset.forecasts import parse as parse_forecast  # noqa: E402
from hotset.models.static_caches import GenerateArguments, static_cache  # noqa: E402
from hotset.models.tracker import StepTracker  # noqa: E402
from hotset.prefetch import Driver, PrefetchPlan, plan_prefetch  # noqa: E402
from hotset.shape import ExpertKey, ModelShape  # noqa: E402
from hotset.trace import Phase  # noqa: E402

pytestmark = [
    pytest.mark.skipif(tiny_device.LATE, reason="the interpreter came too late"),
    pytest.mark.filterwarnings("ignore"),
]
IDS = torch.tensor([[5, 90, 31]], device=DEVICE)
OTHER = torch.tensor([[9, 8]], device=DEVICE)
NEW = 16 if CUDA else 4
LAYERS, EXPERTS, TOP_K, SLOTS = 2, 8, 2, 8


@pytest.fixture(autouse=True)
def _no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_TUNE", "0")
    tiny_device.go_without_graphs(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_device.make(tmp_path_factory.mktemp("graph") / "tiny", LAYERS, EXPERTS, TOP_K)


@pytest.fixture(scope="module")
def stock(folder: Path) -> Any:
    return tiny_device.stock_of(folder)


def load(folder: Path, policy: str = "blend", **options: Any) -> Any:
    return tiny_device.load(folder, SLOTS, policy, TOP_K, **options)


def greedy(model: Any, tokens: int = NEW, ids: Any = IDS, **options: Any) -> list[list[int]]:
    return tiny_device.greedy(model, tokens, ids, **options)


def predictor_for(engine: Engine, *, auto: bool) -> ForecastPredictor:
    assert engine.prefetcher is not None
    plan, slot_of = replace(engine.prefetcher.plan, trial=auto), engine.controller.table.slot_of
    return ForecastPredictor(parse_forecast("gate"), engine.shape, plan, slot_of=slot_of)


# What is plain Python.


def a_controller(policy: str = "lru") -> Controller:
    return Controller(SlotPlan(ModelShape(2, 4, 2), 6, Scope.LAYER, 2), policies.parse(policy))


def test_every_change_but_an_event_is_counted_and_announced_before_it_is_made() -> None:
    live, seen = a_controller(), []

    class Holder:
        def give_back(self) -> None:
            seen.append((live.table.slot_of.copy(), live.table.last.copy(), live.policy))

    holder = Holder()
    live.residency.lease.take(holder.give_back)
    live.route(0, np.array([1, 2], np.int32))
    assert (live.residency.version, seen) == (0, [])
    key = ExpertKey(0, 1)
    for change in (
        lambda: live.seed_from_rates(np.ones((2, 4)), 8),
        lambda: live.pin([key]),
        lambda: live.unpin([key]),
        lambda: live.residency.drop([key]),
        lambda: live.preload(np.ones((2, 4))),
        lambda: live.restore(live.save()),
        lambda: live.adopt(a_controller("lfu")),
        live.residency.changing,
    ):
        live.residency.lease.take(holder.give_back)
        version, first = live.residency.version, len(seen)
        before = live.table.slot_of.copy(), live.table.last.copy(), live.policy
        change()
        assert live.residency.version > version
        found = seen[first]
        assert all(np.array_equal(a, b) for a, b in zip(found[:2], before[:2], strict=True))
        assert found[2] is before[2]
        assert not live.residency.lease.held


def test_a_static_cache_is_not_asked_for_its_length_at_every_token(stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, phases, asked = stock_engine(a_controller(), []), [], []
    monkeypatch.setattr(engine, "end", lambda step, _: phases.append(step.phase))
    monkeypatch.setattr(engine, "abandon", lambda step: phases.append(step.phase))
    detach = StepTracker(engine).attach(stock)
    cache = static_cache(stock.config, 16)
    plain = type(cache).get_seq_length
    one = torch.tensor([[7]], device=DEVICE)

    def run(tokens: Any) -> Phase:
        with torch.no_grad():
            stock(input_ids=tokens, past_key_values=cache)
        found: Phase = phases[-1]
        return found

    from hotset.models import tracker

    def seen(found: Any) -> int:
        asked.append(found)
        return int(plain(found))

    monkeypatch.setattr(tracker, "_seen_tokens", seen)
    assert run(one) is Phase.PREFILL  # a fresh prompt of one token
    first = len(asked)
    assert [run(one), run(one)] == [Phase.DECODE, Phase.DECODE]
    assert len(asked) == first
    cache.reset()
    assert run(one) is Phase.PREFILL
    assert len(asked) == first + 1
    assert run(one) is Phase.DECODE
    cache = static_cache(stock.config, 16)
    assert run(one) is Phase.PREFILL
    with monkeypatch.context() as patch:
        patch.setattr(stock.model, "forward", fails)
        with pytest.raises(RuntimeError, match="stream is capturing"):
            run(one)
    first = len(asked)
    assert run(one) is Phase.DECODE
    assert len(asked) == first + 1  # nobody knows what a pass that failed has done
    detach()


def test_wishes_of_a_generate_are_read_from_all_places() -> None:
    config = SimpleNamespace(num_beams=1, max_new_tokens=None, max_length=20, num_return_sequences=1)
    ids = torch.zeros(1, 3)
    assert GenerateArguments((), {}, config).length(ids) == 20
    assert not GenerateArguments((), {}, config).other_cache
    assert GenerateArguments((), {"max_new_tokens": 4, "num_return_sequences": 3}, config).length(ids) == 7
    assert GenerateArguments((), {"num_return_sequences": 3}, config).answers == 3
    assert GenerateArguments((ids, SimpleNamespace(num_beams=2)), {}, config).reorders_cache
    assert GenerateArguments((), {"num_beams": 2}, config).other_cache
    assert GenerateArguments((), {"use_cache": False}, config).other_cache
    assert GenerateArguments((), {"prompt_lookup_num_tokens": 3}, config).reorders_cache
    own = SimpleNamespace(num_beams=None, max_new_tokens=None)  # what it leaves open, the model's own says
    usual = SimpleNamespace(num_beams=4, max_new_tokens=2048)
    assert GenerateArguments((), {"generation_config": own}, usual).length(ids) == 2051
    assert GenerateArguments((), {"generation_config": own}, usual).reorders_cache


def test_a_forecast_that_the_host_makes_keeps_the_device_from_driving(folder: Path) -> None:
    model = load(folder, ahead=4, install=False)
    engine = model.hotset.engine
    for name, auto, expected in (("best", False, "forecast best"), ("best", True, None), ("gate", False, None)):
        plan = replace(engine.offload.prefetcher.plan, trial=auto)
        engine.offload.prefetcher.predictor = ForecastPredictor(parse_forecast(name), engine.shape, plan)
        reasons = engine.device_decode.unsupported_reasons()
        assert (not reasons) if expected is None else (expected in reasons[0])
    model.hotset.close()


def test_passes_with_predictions_are_those_that_the_payoff_names(folder: Path) -> None:
    model = load(folder, ahead=4, install=False)
    engine = model.hotset.engine
    runs = [Step(number, 1, 1, Phase.DECODE, 0, engine.driver) for number in range(32)]
    assert all(engine.device_decode.prefetches_in(run) for run in runs)  # nobody compares
    engine.offload.prefetcher.predictor = predictor_for(engine, auto=True)
    found = [engine.device_decode.prefetches_in(run) for run in runs]
    assert found == [not engine.offload.prefetcher.predictor.trial.is_control_step(run.number) for run in runs]
    assert sum(found) == 16  # one of every two goes without
    engine.offload.prefetcher.predictor = predictor_for(engine, auto=False)
    assert all(engine.device_decode.prefetches_in(run) for run in runs)
    model.hotset.close()
    model = load(folder, ahead=1, install=False)  # one row cannot be shared by two layers
    assert not any(model.hotset.engine.device_decode.prefetches_in(run) for run in runs)
    model.hotset.close()


def test_the_device_waits_until_nothing_is_on_its_way(folder: Path) -> None:
    model = load(folder)
    engine = model.hotset.engine
    assert engine.device_decode.ready
    engine.offload.preloader.running = SimpleNamespace(busy=True, stop=lambda: None)
    assert not engine.device_decode.ready
    engine.offload.preloader.running = SimpleNamespace(busy=False, stop=lambda: None)
    assert engine.device_decode.ready
    engine.controller.residency.reserved[ExpertKey(0, 0)] = 0
    assert not engine.device_decode.ready
    engine.controller.residency.reserved.clear()
    model.hotset.close()


# What runs.


def test_predictions_come_and_go_with_the_passes_and_are_counted(stock: Any, folder: Path) -> None:
    model = load(folder, ahead=4)
    engine = model.hotset.engine
    engine.offload.prefetcher.predictor = predictor = predictor_for(engine, auto=True)
    expected = greedy(stock, NEW + 1)
    assert greedy(model, NEW + 1) == expected
    assert {one.variant.prefetch for one in model.graphs.held} == {True, False}
    stats = model.hotset.stats()
    assert engine.device_decode.steps.differences() == 0
    state = engine.device_decode.steps.state.prefetch
    assert state.tallies.tolist() == list(vars(engine.offload.prefetcher.counts).values())
    assert stats["prefetch_hits"] == engine.offload.prefetcher.counts.in_time
    assert stats["prefetch"]["most"] == state.max_queued.tolist()
    assert stats["prefetch"]["decision"] in ("trial", "on", "off")
    assert predictor.trial.state.seen.sum() > 0 or not CUDA
    assert stats["driven_by"] == "device"
    assert greedy(model, 2, OTHER) == greedy(stock, 2, OTHER)  # the host takes over, exchanged rows included
    model.hotset.close()


@pytest.mark.parametrize(
    "rules", [{}, {"rows": 3}, {"layers_ahead": 1}, {"min_probability": 1.5}, {"max_ranks": 3}], ids=str
)
def test_a_model_driven_by_the_device_prefetches_by_its_plan(
    folder: Path, stock: Any, rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(driver: Driver, shape: ModelShape, *, rows: int) -> PrefetchPlan:
        plan = plan_prefetch(driver, shape, rows=rows)
        return replace(plan, **rules) if driver is Driver.DEVICE else plan

    with monkeypatch.context() as patch:
        patch.setattr(build, "plan_prefetch", other)
        model = load(folder, ahead=6)
    steps, plan = model.hotset.engine.device_decode.steps, model.hotset.engine.device_decode.steps.parts.prefetch
    assert rules.items() <= {name: getattr(plan, name) for name in rules}.items()
    assert greedy(model) == greedy(stock)
    parts, per_part = steps.state.prefetch.queued_expert.shape
    assert (parts, per_part) == (plan.parts, plan.rows_per_part)
    assert steps.state.prefetch.ranked.shape[2] == plan.max_ranks
    assert (steps.state.prefetch.tallies.sum().item() > 0) == ("min_probability" not in rules)
    model.hotset.close()


def test_the_device_stages_where_nothing_else_lies_after_a_prompt_was_interrupted(
    folder: Path, stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots lie in rows that were for prefetch, so that other rows are spare than at the start."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    model = load(folder, ahead=6)
    engine = model.hotset.engine
    greedy(model)
    engine.cache.reclaim()
    plan, memory = engine.cache.controller.plan, engine.offload.arena.memory.view(engine.offload.arena.slots, -1)
    for slot in (0, 2, 3):  # as where prefetched experts were claimed
        row, before = engine.cache.take_row(), int(engine.cache.rows[slot])
        memory[row] = memory[before]
        engine.cache.claim(slot, row)
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.offload.driver.kernels[0]), "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=OTHER)
    assert greedy(model, NEW, OTHER) == greedy(stock, NEW, OTHER)
    assert model.hotset.stats()["driven_by"] == "device"
    state = engine.device_decode.steps.state
    rows = [*state.row_of.tolist(), *state.prefetch.prefetch_row.flatten().tolist()]
    assert not {*range(plan.cached, plan.cached + plan.staging)} & {*rows}
    model.hotset.close()


def test_a_pass_is_timed_by_the_device_and_counted_once(folder: Path) -> None:
    model = load(folder, ahead=4)
    engine = model.hotset.engine
    greedy(model)
    model.hotset.reset_stats()
    engine.offload.prefetcher.predictor = noted = SimpleNamespace(passes=[], needs_tokens=False)
    noted.note_step = lambda run, seconds: noted.passes.append((run.number, seconds))
    noted.ask_device = noted.observe = lambda *_: None
    engine.device_decode.steps.follower._adjusted = lambda seconds, _: seconds
    greedy(model)
    engine.offload.prefetcher.predictor = None
    stats = model.hotset.stats()
    assert stats["passes"] == NEW
    assert stats["tokens"] == IDS.shape[1] + NEW - 1
    assert stats["decode"]["pass_tokens"] == NEW - 1
    assert len(noted.passes) >= NEW - 2  # the last is read when somebody asks
    assert len({number for number, _ in noted.passes}) == len(noted.passes)
    assert all(0 < seconds < 60 for _, seconds in noted.passes)
    assert stats["pass_s"] >= sum(seconds for _, seconds in noted.passes)
    model.hotset.close()


@pytest.mark.parametrize("policy", ["decay", "lru"])
def test_pins_and_prompts_between_answers_reach_the_device(stock: Any, folder: Path, policy: str) -> None:
    model = load(folder, policy)
    handle, engine = model.hotset, model.hotset.engine
    assert greedy(model, 3) == greedy(stock, 3)
    with engine.paused():
        key = next(ExpertKey(*k) for k in np.argwhere(engine.controller.table.slot_of < 0).tolist())
    handle.pin([key])
    engine.device_decode.lease.recall()  # nothing is left to give back
    assert not engine.device_decode.lease.held
    assert greedy(model, 3, OTHER) == greedy(stock, 3, OTHER)
    assert handle.pins() == [key]
    assert engine.device_decode.steps.state.table.table.slot_of.cpu()[tuple(key)] >= 0
    handle.unpin()
    assert greedy(model, 3) == greedy(stock, 3)
    handle.stats()
    assert engine.device_decode.steps.differences() == 0
    table = engine.device_decode.steps.state.table
    engine.device_decode.lease.recall()
    for mine, theirs in zip(table.state, engine.controller.state, strict=True):
        assert np.array_equal(mine.cpu().numpy(), theirs)
    handle.close()


def test_the_host_takes_the_table_of_the_device_and_not_of_its_own_replay(stock: Any, folder: Path) -> None:
    """As if a replay had come to another end: the host goes on from what the slots hold."""
    model = load(folder)
    engine = model.hotset.engine
    greedy(model, 3)
    engine.catch_up()
    table = engine.controller.table
    a, b = (int(e) for e in np.flatnonzero(table.slot_of[0] >= 0)[:2])
    table.slot_of[0, [a, b]] = table.slot_of[0, [b, a]]
    assert engine.device_decode.steps.differences() == 2
    assert greedy(model, 3, OTHER) == greedy(stock, 3, OTHER)
    model.hotset.stats()
    assert engine.device_decode.steps.differences() == 0
    model.hotset.close()


def test_a_plain_look_at_the_statistics_downloads_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(folder)
    greedy(model, 3)
    monkeypatch.setattr(
        type(model.hotset.engine.device_decode.steps.state.table), "download", lambda *_: pytest.fail("downloaded")
    )
    model.hotset.stats()
    model.hotset.statistics()
    model.hotset.pins()
    monkeypatch.undo()
    model.hotset.close()


def test_warm_pins_reach_the_device(stock: Any, folder: Path) -> None:
    model = load(folder)
    engine = model.hotset.engine
    engine.monitor = CacheMonitor(engine.controller, lambda _: None, warm_pin_tokens=64)
    layers = engine.shape.layers
    assert engine.monitor.warm_pin is not None
    assert greedy(model, 3) == greedy(stock, 3)
    with engine.paused():
        assert engine.device_decode.lease.held
        chosen = engine.controller.residents()[:1]
        warm_pin.pin_residents(engine.controller, chosen)
        assert not engine.device_decode.lease.held
    assert greedy(model, 3) == greedy(stock, 3)
    assert engine.device_decode.lease.held
    assert engine.device_decode.steps.state.table.table.last[chosen[0]].item() == WARM
    assert engine.device_decode.steps.state.table.table.num_pinned.cpu().tolist() == [1, *[0] * (layers - 1)]
    model.hotset.close()


def test_another_policy_gets_other_kernels_or_the_host(stock: Any, folder: Path) -> None:
    model = load(folder)
    engine, graphs = model.hotset.engine, model.graphs
    assert greedy(model, 3) == greedy(stock, 3)
    side = engine.device_decode.steps.kernels_for(1)
    with engine.paused():
        engine.controller.adopt(Controller(engine.controller.plan, policies.parse("lru")))
    assert engine.device_decode.steps.is_outdated
    assert greedy(model, 3) == greedy(stock, 3)
    assert engine.device_decode.steps.kernels_for(1) is not side
    assert len(graphs.held) == 1
    model.hotset.stats()
    assert engine.device_decode.steps.differences() == 0
    with engine.paused():
        engine.controller.adopt(Controller(engine.controller.plan, policies.parse("window")))
    assert greedy(model, 3) == greedy(stock, 3)
    assert greedy(model, 3, OTHER) == greedy(stock, 3, OTHER)
    assert [note for note in model.hotset.notes if "the host drives the GPU, for window" in note] == model.hotset.notes
    assert len(model.hotset.notes) == 1
    assert model.hotset.stats()["driven_by"] == "host"
    assert not graphs.held
    model.hotset.close()


def test_a_recording_is_that_of_the_host(folder: Path) -> None:
    traces = []
    for install in (True, False):
        model = load(folder, install=install)
        greedy(model, 2)  # not part of it
        with model.hotset.trace(lookahead=1) as recording:
            greedy(model, 3)
            assert len(recording.blocks) == 3  # whoever records looks between passes
            greedy(model, 2, OTHER)
        greedy(model, 2)
        if install:
            assert model.hotset.stats()["driven_by"] == "device"
            assert {one.variant.recording for one in model.graphs.held} == {True, False}
        traces.append(recording.finish())
        model.hotset.close()
    mine, theirs = traces
    for name in ("experts", "request", "step", "phase", "token_ids", "predictions"):
        assert np.array_equal(getattr(mine, name), getattr(theirs, name)), name
    assert mine.weights.dtype == theirs.weights.dtype == np.float16
    assert np.allclose(mine.weights, theirs.weights, atol=2e-3)


def test_recordings_of_other_gates_have_graphs_of_their_own(folder: Path) -> None:
    model = load(folder)
    for predictions in (0, 1, 2, 1):
        with model.hotset.trace(lookahead=predictions) as recording:
            greedy(model, 2)
        found = recording.finish().predictions
        assert (found is None) if not predictions else (found.shape[2] == predictions)
    assert len(model.graphs.held) == 3
    model.hotset.close()


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("operation not permitted when stream is capturing\nmore")


def test_what_cannot_be_captured_goes_the_hosts_way(stock: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(folder)
    engine, tries = model.hotset.engine, []
    monkeypatch.setattr(capture, "recorded", lambda step, _: tries.append(step) or fails())
    assert greedy(model) == greedy(stock)
    assert greedy(model, 3, OTHER) == greedy(stock, 3, OTHER)
    assert len(tries) == 1
    assert engine.device_decode.steps.state is None
    assert not model.hotset.static_caches.is_open  # chats learn of it, too
    assert model.hotset.notes == [
        "the host drives the GPU, for its decode could not be captured: "
        "operation not permitted when stream is capturing"
    ]
    assert model.hotset.stats()["driven_by"] == "host"
    model.hotset.close()


def test_what_was_demanded_and_cannot_be_captured_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(folder, demanded=True)
    monkeypatch.setattr(capture, "recorded", fails)
    with pytest.raises(HotsetError, match="could not be captured: operation not permitted when"):
        greedy(model)
    model.hotset.close()


def test_a_second_graph_that_fails_leaves_the_first_ones_state_to_the_host(
    stock: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder)
    assert greedy(model, 3) == greedy(stock, 3)
    assert model.hotset.engine.device_decode.lease.held
    monkeypatch.setattr(capture, "recorded", fails)
    assert greedy(model, 2, max_length=1100) == greedy(stock, 2)
    with model.hotset.trace():
        assert greedy(model, 3) == greedy(stock, 3)
    assert len(model.hotset.notes) == 1
    assert model.hotset.stats()["driven_by"] == "host"
    model.hotset.close()


def test_an_error_of_the_device_is_told_once_and_breaks_the_engine(folder: Path) -> None:
    model = load(folder)
    greedy(model, 2)
    (captured,) = model.graphs.held
    captured.graph = SimpleNamespace(replay=lambda: fails())
    with pytest.raises(HotsetError, match=r"the GPU reported an error: .* when stream .*load the model"):
        greedy(model, 3)
    with pytest.raises(HotsetError, match="load the model again"):
        greedy(model, 3)
    model.hotset.close()


def test_an_interrupt_right_after_the_launch_loses_no_pass(stock: Any, folder: Path) -> None:
    model = load(folder)
    greedy(model, 3)
    (captured,) = model.graphs.held
    graph = captured.graph
    model.hotset.reset_stats()

    def replay() -> None:
        graph.replay()
        raise KeyboardInterrupt

    captured.graph = SimpleNamespace(replay=replay)
    with pytest.raises(KeyboardInterrupt):
        greedy(model, 3)
    captured.graph = graph
    assert model.hotset.stats()["decode"]["hits"] + model.hotset.stats()["decode"]["misses"] == LAYERS * TOP_K
    assert greedy(model, 3) == greedy(stock, 3)
    model.hotset.stats()
    assert model.hotset.engine.device_decode.steps.differences() == 0
    model.hotset.close()


def test_unusual_calls_go_the_hosts_way(stock: Any, folder: Path) -> None:
    model = load(folder)
    one = torch.tensor([[7]], device=DEVICE)

    def steps(who: Any, **options: Any) -> Any:
        cache = static_cache(who.config, 16)
        with torch.no_grad():
            who(input_ids=IDS, past_key_values=cache)
            return who(input_ids=one, past_key_values=cache, **options)

    for options in ({"output_hidden_states": True}, {"output_router_logits": True}, {"return_dict": False}):
        mine, theirs = steps(model, **options), steps(stock, **options)
        assert type(mine) is type(theirs)
        logits = [found[0] if isinstance(found, tuple) else found.logits for found in (mine, theirs)]
        assert torch.allclose(*logits, atol=1e-4)
        assert not model.graphs.held
    cache = static_cache(model.config, 16)
    assert greedy(model, 3, num_beams=2, past_key_values=cache) == greedy(stock, 3, num_beams=2)
    assert not model.graphs.held
    assert greedy(model, 3, num_return_sequences=1) == greedy(stock, 3)
    out = steps(model)
    assert out.logits.shape == (1, 1, 128)
    assert out.past_key_values.layers
    assert len(model.graphs.held) == 2
    model.hotset.close()


def test_a_cache_that_is_gone_is_not_kept_alive_by_its_graph(folder: Path) -> None:
    model = load(folder)
    cache = static_cache(model.config, 16)
    greedy(model, 2, past_key_values=cache)
    (captured,) = model.graphs.held
    assert captured.cache() is cache
    if CUDA:  # where a step is run again, it knows its cache
        del cache
        assert captured.cache() is None
    model.hotset.close()


def test_requests_end_with_their_last_pass(folder: Path) -> None:
    model = load(folder)
    for ids in (IDS, OTHER):
        greedy(model, 3, ids)
    found = [request.as_dict() for request in model.hotset.requests()]
    assert [each["decode_tokens"] for each in found] == [2, 2]
    model.hotset.close()


def test_gates_of_a_recording_are_told_apart_by_what_they_say() -> None:
    def gate(*_: Any, **__: Any) -> None:
        pass

    assert lookahead_key(None) is None
    assert lookahead_key(partial(gate, distances=1, width=4)) == lookahead_key(partial(gate, width=4, distances=1))
    assert lookahead_key(partial(gate, distances=1, width=4)) != lookahead_key(partial(gate, distances=2, width=4))
    assert lookahead_key(gate) is gate


def call_a_layer(model: Any) -> Any:
    """One MoE layer, called outside of any step."""
    hidden, index = torch.randn(1, model.config.hidden_size, device=DEVICE), torch.tensor([[0, 1]], device=DEVICE)
    with torch.no_grad():
        return model.hotset.moe_layers[0].module(hidden, index, torch.ones(1, TOP_K, device=DEVICE))


def test_another_thread_is_not_served_by_a_step_that_is_being_captured(
    stock: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the lock, and is served by the host."""
    model, found, plain = load(folder), [], capture.recorded
    thread = threading.Thread(target=lambda: found.append(call_a_layer(model)))

    def recorded(step: Capture, pool: Any) -> Any:
        thread.start()
        thread.join(0.3)
        assert not found
        assert isinstance(step, Capture)
        return plain(step, pool)

    monkeypatch.setattr(capture, "recorded", recorded)
    before = model.hotset.stats()["asked"]
    assert greedy(model, 3) == greedy(stock, 3)
    thread.join(60)
    assert found[0].shape == (1, model.config.hidden_size)
    assert model.hotset.stats()["asked"] >= before + 2
    model.hotset.close()


@pytest.mark.parametrize("where", ["warm-up", "capture"])
def test_a_capture_that_was_broken_off_serves_nothing_any_more(
    stock: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """An interrupt strikes inside of it, and what is called next is the host's."""
    model = load(folder)
    served: list[int] = []
    kind = WarmUp if where == "warm-up" else Capture

    def serve(*_: Any) -> Any:
        served.append(1)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kind, "serve", serve)
        with pytest.raises(KeyboardInterrupt):
            greedy(model, 3)
        assert model.hotset.tracker.current().driver.serve == model.hotset.engine.driver.serve
        assert call_a_layer(model).shape == (1, model.config.hidden_size)
        assert served == [1]
    assert greedy(model, 3) == greedy(stock, 3)
    model.hotset.stats()
    assert model.hotset.engine.device_decode.steps.differences() == 0
    model.hotset.close()


def test_drafts_and_beams_go_the_hosts_way_and_a_line_says_so_once(folder: Path, stock: Any) -> None:
    model = load(folder)
    drafted = [greedy(model, 4, prompt_lookup_num_tokens=2) for _ in range(2)]
    assert drafted[0] == drafted[1] == greedy(stock, 4)
    assert greedy(model, 3, num_beams=2) == greedy(stock, 3, num_beams=2)
    assert model.hotset.stats()["driven_by"] == "host"
    told = [note for note in model.hotset.notes if "the host drives calls with" in note]
    assert [note.partition("with ")[2].partition(":")[0] for note in told] == ["drafts by prompt lookup", "beam search"]
    greedy(model, 3)
    assert model.hotset.stats()["driven_by"] == "device"
    model.hotset.close()


def test_a_batch_that_staging_is_too_small_for_names_both_ways_to_set_it(folder: Path) -> None:
    model = load(folder)
    greedy(model, 2, torch.cat([IDS] * 4))
    (told,) = (note for note in model.hotset.notes if "batches of 4" in note)
    assert "staging=8 or more" in told
    assert "--staging 8" in told
    model.hotset.close()


def test_a_search_in_one_thread_leaves_the_device_to_another(folder: Path) -> None:
    model = load(folder)
    found: list[Any] = []
    with model.graphs.hook.reordering.one_more():
        greedy(model, 2)
        assert not model.graphs.held
        thread = threading.Thread(target=lambda: found.append(greedy(model, 3)))
        thread.start()
        thread.join(120)
    assert found
    assert len(model.graphs.held) == 1
    model.hotset.close()


def test_threads_that_the_device_serves_are_counted_and_recorded_each_for_itself(folder: Path, stock: Any) -> None:
    model, texts = load(folder), {}
    prompts = {0: IDS, 1: OTHER}

    def work(number: int) -> None:
        texts[number] = greedy(model, 4, prompts[number])

    with model.hotset.trace() as recorder:
        threads = [threading.Thread(target=work, args=(number,)) for number in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    trace, stats, requests = recorder.finish(), model.hotset.stats(), model.hotset.requests()
    model.hotset.close()
    assert texts == {number: greedy(stock, 4, ids) for number, ids in prompts.items()}
    assert stats["driven_by"] == "device"
    assert stats["passes"] == trace.steps == 8
    assert (trace.experts >= 0).all()
    lengths = sorted(ids.shape[1] for ids in prompts.values())
    assert sorted(int((trace.request == request).sum()) for request in range(2)) == [length + 3 for length in lengths]
    assert sorted(request.tokens.tolist() for request in requests) == [[length, 3] for length in lengths]
    assert sum(request.counters.as_dict()["misses"] for request in requests) == stats["misses"]
    assert sum(request.loaded_bytes for request in requests) == stats["loaded_bytes"]

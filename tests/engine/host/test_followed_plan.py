"""A plan of prefetch is followed: the live host and the simulator send for the same experts, whatever it says."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hotset  # noqa: E402
from hotset import reference  # noqa: E402
from hotset.cache.controller import Controller  # noqa: E402
from hotset.cache.plan import SlotPlan  # noqa: E402
from hotset.engine.batch import ExpertBatch  # noqa: E402
from hotset.engine.host.forecasting import ForecastPredictor  # noqa: E402
from hotset.engine.host.prefetcher import Prefetcher  # noqa: E402
from hotset.engine.slots import SlotCache  # noqa: E402
from hotset.engine.step import Step  # noqa: E402
from hotset.forecasts import parse as parse_forecast  # noqa: E402
from hotset.models import memory_plan  # noqa: E402
from hotset.policies import parse  # noqa: E402
from hotset.prefetch import PrefetchPlan, plan_prefetch  # noqa: E402
from hotset.sim import Link  # noqa: E402
from hotset.sim.prefetch import simulate_prefetch  # noqa: E402
from hotset.trace import Phase, Trace  # noqa: E402

SLOTS, STEPS = 128, 16  # so few steps that no trial is over
IDS = torch.tensor([[5, 900, 31, 7, 410, 77]])
INSTANT = SimpleNamespace(done=True, cancel=lambda: None)


class InstantSource:
    """A source from which everything arrives at once, as over a link without end."""

    def has(self, *_: int) -> bool:
        return True

    def size_bytes(self, *_: int) -> int:
        return 1

    def start(self, loads: Any) -> Any:
        return [INSTANT] * len(loads)

    def failed(self, *_: Any) -> bool:
        return False


class LiveHost:
    """The host's own cache, prefetcher and predictor, fed with a recorded routing instead of a model's."""

    def __init__(self, trace: Trace, forecast: str, plan: PrefetchPlan) -> None:
        self.trace, shape = trace, trace.shape
        self.cache = SlotCache(Controller(SlotPlan(shape, SLOTS, prefetch_rows=plan.rows), parse("lru")))
        slot_of = self.cache.table.slot_of
        self.predictor = ForecastPredictor(parse_forecast(forecast), shape, plan, gate=self._gate, slot_of=slot_of)
        self.prefetcher = Prefetcher(plan, self.cache, cast("Any", InstantSource()), self.predictor)

    def _gate(self, layer: int, hidden: Any, distances: int, width: int) -> Any:
        """What the routers ahead were recorded to predict of the tokens whose numbers `hidden` holds."""
        tokens, layers = hidden[:, 0].long().numpy(), self.trace.shape.layers
        assert self.trace.predictions is not None
        ahead = [self.trace.predictions[tokens, (layer + d) % layers, d - 1, :width] for d in range(1, distances + 1)]
        return torch.from_numpy(np.stack(ahead, axis=1).astype(np.int64))

    def run(self) -> None:
        for number in range(STEPS):
            tokens = np.flatnonzero(self.trace.step == number)
            phase = Phase(int(self.trace.phase[tokens[0]]))
            step = Step(number, 1, len(tokens), phase, 0, cast("Any", None))
            for layer in range(self.trace.shape.layers):
                self.serve(step, layer, tokens)

    def serve(self, step: Step, layer: int, tokens: Any) -> None:
        hidden = torch.from_numpy(tokens.astype(np.float32))[:, None]
        predicted = self.prefetcher.predict(step, layer, hidden)
        index = torch.from_numpy(self.trace.experts[tokens, layer].astype(np.int64))
        batch = ExpertBatch(hidden, index, torch.ones(index.shape), self.trace.shape.experts, predicted)
        slots = self.cache.slots_of(layer, batch.experts)
        placed = self.cache.look_up(layer, batch.experts, slots, batch.counts, len(tokens), step.phase, 0)
        claimed = self.prefetcher.claim(step, placed)
        self.prefetcher.issue(step, layer, batch)
        self.cache.release()
        self.prefetcher.release(step, layer, 0.0, claimed)


@pytest.fixture(scope="module")
def trace() -> Trace:
    """The first steps of a recorded request, with what the routers predicted three layers ahead."""
    whole = Trace.load(reference.trace_path("python"))
    one = whole.take(whole.request == whole.request[0])
    return one.take(one.step < one.step[0] + STEPS)


def live_and_simulated(trace: Trace, forecast: str, plan: PrefetchPlan) -> tuple[tuple[int, int], LiveHost]:
    """What came in time and what was wasted, by the live host, once the simulator has found the same."""
    host = LiveHost(trace, forecast, plan)
    host.run()
    controller = Controller(SlotPlan(trace.shape, SLOTS), parse("lru"))
    found = simulate_prefetch(trace, controller, Link(bytes_per_s=1e18, compute_s=4e-3), forecast, plan)
    counts = host.prefetcher.counts
    assert (counts.in_time, counts.late, counts.wasted) == (found.in_time, found.late, found.wasted)
    return (counts.in_time, counts.wasted), host


def changed(trace: Trace, **rules: Any) -> PrefetchPlan:
    """The plan of a CPU that compares nothing, but for some rules."""
    return replace(plan_prefetch("cpu", trace.shape, rows=rules.pop("rows", None), trial=False), **rules)


@pytest.mark.parametrize("forecast", ["gate", "transition"])
@pytest.mark.parametrize(
    "rules",
    [
        {}, {"rows": 1}, {"rows": 9}, {"layers_ahead": 2}, {"layers_ahead": 3, "rows": 12}, {"min_probability": 0.05},
        {"min_probability": 0.6}, {"wraps": False}, {"adaptive": False, "rows": 7}, {"trial": True},
        {"layer_trial": False, "trial": True}, {"layers_ahead": 2, "wraps": False}, {"max_ranks": 3},
    ],
    ids=str,
)  # fmt: skip
def test_live_host_and_simulator_send_for_the_same(rules: dict[str, Any], forecast: str, trace: Trace) -> None:
    found, _ = live_and_simulated(trace, forecast, changed(trace, **rules))
    assert sum(found) > 0


@pytest.mark.parametrize(
    "rules",
    [
        {"rows": 1}, {"layers_ahead": 2}, {"min_probability": 0.7}, {"max_ranks": 1}, {"wraps": False},
        {"adaptive": False, "rows": 9}, {"trial": True},
    ],
    ids=str,
)  # fmt: skip
def test_every_rule_makes_a_difference_to_both(rules: dict[str, Any], trace: Trace) -> None:
    usual = {"rows": rules["rows"]} if "adaptive" in rules else {}
    before, _ = live_and_simulated(trace, "gate", changed(trace, **usual))
    after, _ = live_and_simulated(trace, "gate", changed(trace, **rules))
    assert before != after


def test_layers_are_judged_alone_only_where_the_plan_says_so(trace: Trace) -> None:
    for by_layer in (True, False):
        _, host = live_and_simulated(trace, "gate", changed(trace, layer_trial=by_layer))
        assert (host.predictor.trial.state.seen[:, :-1].sum() > 0) == by_layer


def test_what_a_step_before_sent_for_is_of_no_use_where_prefetch_does_not_wrap(trace: Trace) -> None:
    """As where a layer is left out: the experts sent for it are not those of the next step."""
    claims = []
    for wraps in (True, False):
        host = LiveHost(trace, "gate", changed(trace, wraps=wraps, min_probability=0.0, rows=16))
        prompt, token, following = (np.flatnonzero(trace.step == number) for number in range(3))
        for layer in range(trace.shape.layers):
            host.serve(Step(0, 1, len(prompt), Phase.PREFILL, 0, cast("Any", None)), layer, prompt)
        host.serve(Step(1, 1, 1, Phase.DECODE, 0, cast("Any", None)), 0, token)
        sent = len(host.prefetcher._held)
        host.serve(Step(2, 1, 1, Phase.DECODE, 0, cast("Any", None)), 1, following)
        counts = host.prefetcher.counts
        assert counts.in_time + counts.wasted == sent > 0
        claims.append(counts.in_time)
    assert claims[0] > 0
    assert claims[1] == 0


def load(monkeypatch: pytest.MonkeyPatch, prefetch: str, **rules: Any) -> Any:
    """A live model whose plan has other rules than it would."""

    def other(driver: Any, shape: Any, *, rows: int | None = None, trial: bool = True) -> PrefetchPlan:
        plan = replace(plan_prefetch(driver, shape, trial=trial), **rules)
        return plan if rows is None else replace(plan, rows=rows)

    monkeypatch.setattr(memory_plan, "plan_prefetch", other)
    return hotset.load(reference.path(), memory="25%", dtype=torch.float32, device="cpu", prefetch=prefetch)


def sent_by(model: Any) -> list[tuple[int, Any]]:
    """What a live model prefetches, and after which layer."""
    predictor, sent = model.hotset.engine.prefetcher.predictor, []
    choose = predictor.choose

    def noted(layer: int, *given: Any) -> Any:
        keys = choose(layer, *given)
        sent.extend((layer, key) for key in keys)
        return keys

    predictor.choose = noted
    given = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    model.generate(IDS, **given)
    return sent


def test_a_live_model_has_one_plan_and_all_its_parts_follow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {"rows": 9, "layers_ahead": 3, "max_ranks": 5, "min_probability": 0.2, "wraps": False, "adaptive": False}
    model = load(monkeypatch, "gate", **rules)
    engine = model.hotset.engine
    plan = engine.prefetcher.plan
    assert {name: getattr(plan, name) for name in rules} == rules
    assert engine.prefetcher.predictor.plan is plan
    assert not plan.trial
    assert engine.controller.plan.prefetch_rows == len(engine.cache.prefetch_rows) == 9
    sent = sent_by(model)
    stats = model.hotset.stats()
    model.hotset.close()
    assert {key.layer - layer for layer, key in sent} == {1, 2, 3}
    assert stats["prefetch"]["most"] == [9] * engine.shape.layers  # neither grown nor shrunk
    assert stats["memory"]["prefetch"] == 9 * stats["expert_bytes"]


def test_a_live_model_sends_for_nothing_that_its_plan_finds_unlikely(monkeypatch: pytest.MonkeyPatch) -> None:
    for least, sends in ((0.3, True), (1.5, False)):
        model = load(monkeypatch, "gate", min_probability=least)
        sent = sent_by(model)
        model.hotset.close()
        assert bool(sent) == sends
        assert {(key.layer - layer) % model.hotset.engine.shape.layers for layer, key in sent} <= {1}

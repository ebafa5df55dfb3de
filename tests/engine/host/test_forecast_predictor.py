"""Forecasts on a live engine: the text and the cache stay as they are, and predictions are what the routers say."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hotset  # noqa: E402
from hotset import reference  # noqa: E402
from hotset.cache.plan import Scope  # noqa: E402
from hotset.engine.batch import ExpertBatch  # noqa: E402
from hotset.engine.host.forecasting import ForecastPredictor  # noqa: E402
from hotset.engine.step import Step  # noqa: E402
from hotset.forecasts import names, parse  # noqa: E402
from hotset.models.budget import least_slots, plan_slots  # noqa: E402
from hotset.models.find_layers import find_moe_layers  # noqa: E402
from hotset.models.routers import Routers  # noqa: E402
from hotset.prefetch import MIN_PROBABILITY, Driver, PrefetchTrial, plan_prefetch, prefetch_rows  # noqa: E402
from hotset.prefetch.trial import ON  # noqa: E402
from hotset.shape import Budget, ExpertKey, ModelShape  # noqa: E402
from hotset.trace import Phase, Trace  # noqa: E402

IDS = torch.tensor([[5, 900, 31, 7, 410, 77]])
LAYERS, EXPERTS, TOP_K, NEW = 8, 64, 8, 24
SHAPE = ModelShape(LAYERS, EXPERTS, TOP_K, 1000)


def greedy(model: Any, tokens: int = NEW, ids: Any = IDS) -> list[list[int]]:
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    text: list[list[int]] = model.generate(ids, **given).tolist()
    return text


def load(prefetch: str, memory: str = "25%", **options: Any) -> Any:
    return hotset.load(reference.path(), memory=memory, dtype=torch.float32, device="cpu", prefetch=prefetch, **options)


@pytest.fixture(scope="module")
def plain() -> tuple[list[list[int]], dict[str, Any]]:
    """The text and the counts without predictions."""
    model = load("off")
    text, stats = greedy(model), model.hotset.stats()
    assert model.hotset.engine.offload.prefetcher is None
    assert stats["prefetch"] is None
    assert "prefetch" not in stats["memory"]
    model.hotset.close()
    return text, stats


def test_without_predictions_the_text_is_that_of_the_stock_model(stock: Any, plain: Any) -> None:
    assert greedy(stock) == plain[0]


@pytest.mark.parametrize("prefetch", ["auto", *names()])
def test_no_forecast_changes_the_text_or_the_cache_and_its_counts_add_up(prefetch: str, plain: Any) -> None:
    text, before = plain
    model = load(prefetch)
    assert greedy(model) == text
    stats, engine = model.hotset.stats(), model.hotset.engine
    engine.offload.prefetcher.clear()
    left = engine.offload.prefetcher.counts.wasted - stats["prefetch"]["wasted"]
    model.hotset.close()
    assert stats["slots"] == before["slots"] == 128
    for count in ("hits", "misses", "asked", "resident"):
        assert stats[count] == before[count]
    found = stats["prefetch"]
    prefetched = {"prefetch_hits": found["in_time"], "late": found["late"]}
    assert prefetched.items() <= stats.items()
    assert before["prefetch_hits"] == before["late"] == 0
    assert stats["prefill"] == before["prefill"]
    assert stats["decode"] == before["decode"] | prefetched
    assert found["forecast"] == ("gate" if prefetch == "auto" else prefetch)
    assert found["auto"] == (prefetch == "auto")
    assert found["in_time"] + found["late"] + found["wasted"] + left > 0
    assert found["in_time"] + found["late"] <= stats["decode"]["misses"]
    rows = engine.offload.prefetcher.plan.rows
    assert 0 <= left <= rows
    assert all(1 <= most <= rows for most in found["most"])
    one = before["loaded_bytes"] // before["misses"]
    assert before["loaded_bytes"] == one * before["misses"]
    for what in ("in_time", "late", "wasted"):
        assert found[f"{what}_bytes"] == found[what] * one
    assert stats["loaded_bytes"] == before["loaded_bytes"]  # a prediction that came true counts as a load


@pytest.mark.parametrize("prefetch", ["gate", "transition"])
def test_a_batch_is_served_as_without_predictions(prefetch: str) -> None:
    ids = torch.tensor([[5, 900, 31, 7], [410, 77, 12, 600], [3, 3, 8, 250]])
    found = []
    for name in ("off", prefetch):
        model = load(name)
        text, decode = greedy(model, 8, ids), model.hotset.stats()["decode"]
        found.append((text, decode | {"prefetch_hits": 0, "late": 0}))
        model.hotset.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("prefetch", ["crystal", "", "gates", "gate:depth=3"])
def test_an_unknown_forecast_is_refused_before_anything_is_read(prefetch: str) -> None:
    with pytest.raises(hotset.HotsetError) as refusal:
        hotset.load("/nowhere", prefetch=prefetch)
    expected = ["options"] if prefetch.startswith("gate:") else names()
    assert all(word in str(refusal.value) for word in expected)


@pytest.mark.parametrize("prefetch", ["auto", "gate"])
def test_where_everything_is_resident_nothing_is_fetched_ahead(prefetch: str) -> None:
    model = load(prefetch, memory="100%")
    greedy(model, 3)
    stats = model.hotset.stats()
    assert model.hotset.engine.controller.plan.prefetch_rows == 0
    assert stats["prefetch"] is None
    assert "prefetch" not in stats["memory"]
    model.hotset.close()


@pytest.mark.parametrize("memory", ["4MiB", "12MiB", "20MB"])
def test_a_budget_in_bytes_pays_for_the_slots_of_predictions(memory: str) -> None:
    model = load("gate", memory=memory)
    stats, plan = model.hotset.stats(), model.hotset.engine.controller.plan
    size = Budget.parse(memory).size_bytes or 0
    assert plan.prefetch_rows > 0
    assert stats["memory"]["prefetch"] == plan.prefetch_rows * stats["expert_bytes"]
    assert size - stats["expert_bytes"] < stats["resident_bytes"] <= size
    assert model.hotset.engine.offload.arena.slots * stats["expert_bytes"] == stats["resident_bytes"]
    model.hotset.close()


def planned(size: int, shape: ModelShape, ahead: int, staging: int | None = None) -> Any:
    return plan_slots(
        Budget(size_bytes=size), shape, scope=Scope.LAYER, staging=staging, free_bytes=0, prefetch_rows=ahead
    )


def test_no_budget_in_bytes_is_exceeded_and_predictions_take_a_sixteenth_at_most() -> None:
    for slots in range(40, 600, 7):
        plan = planned(slots * 1000 + 999, SHAPE, prefetch_rows(Driver.CPU, SHAPE))
        assert plan.cached + plan.staging + plan.prefetch_rows <= slots
        assert plan.prefetch_rows <= slots / 16
        assert plan.prefetch_rows <= prefetch_rows(Driver.CPU, SHAPE) == 4


@pytest.mark.parametrize("memory", ["25%", "130 slots"])
def test_a_budget_in_shares_or_slots_speaks_of_the_cache_alone(memory: str) -> None:
    plans = [
        plan_slots(memory, SHAPE, scope=Scope.LAYER, staging=None, free_bytes=0, prefetch_rows=ahead)
        for ahead in (0, 16)
    ]
    assert plans[0].cached == plans[1].cached
    assert [plan.prefetch_rows for plan in plans] == [0, 16]


def test_predictions_do_not_push_out_experts_that_would_all_fit() -> None:
    size = (SHAPE.total_experts + 4) * 1000
    assert planned(size, SHAPE, 0).cached == SHAPE.total_experts
    assert planned(size, SHAPE, 16).cached == SHAPE.total_experts


@pytest.mark.parametrize("layers", [16, 24, 48])
def test_the_smallest_budget_works_with_predictions_too(layers: int) -> None:
    shape = ModelShape(layers, 64, 8, 1000)
    least = least_slots(shape, Scope.LAYER)
    assert planned((least + 1) * 1000, shape, 0).cached == least
    assert planned((least + 1) * 1000, shape, prefetch_rows(Driver.CPU, shape)).cached == least


def test_a_reset_counts_predictions_anew() -> None:
    model = load("gate")
    greedy(model, 6)
    model.hotset.reset_stats()
    found = model.hotset.stats()["prefetch"]
    model.hotset.close()
    assert [found[key] for key in ("in_time", "late", "wasted", "wasted_bytes")] == [0, 0, 0, 0]


class Watch:
    """What a predictor was asked and told, pass by pass."""

    def __init__(self, predictor: ForecastPredictor) -> None:
        self.gate, self.said = predictor.gate, []
        self.sent: list[tuple[Any, ...]] = []
        self.seen: list[Any] = []
        predictor.gate, choose, seen = self._gate, predictor.choose, predictor._seen

        def watched(layer: int, event: Any, run: Any, room: int, is_near: Any) -> Any:
            near = {key for key in np.ndindex(LAYERS, EXPERTS) if is_near(ExpertKey(*key))}
            keys = choose(layer, event, run, room, is_near)
            self.sent.append((layer, run, room, near, keys))
            return keys

        def looked(*parts: Any) -> Any:
            self.seen.append(seen(*parts))
            return self.seen[-1]

        predictor.choose, predictor._seen = watched, looked  # type: ignore[method-assign]

    def _gate(self, layer: int, hidden: Any, distances: int, width: int) -> Any:
        said = self.gate(layer, hidden, distances, width)  # type: ignore[misc]
        self.said.append((layer, hidden.clone(), said.numpy()))
        return said


@pytest.fixture(scope="module")
def watched() -> Watch:
    model = load("gate")
    watch = Watch(model.hotset.engine.offload.prefetcher.predictor)
    greedy(model)
    model.hotset.close()
    return watch


def test_live_predictions_are_those_of_the_next_layers_router(watched: Watch, stock: Any) -> None:
    routers = {name: weight for name, weight in stock.named_parameters() if name.endswith("mlp.gate.weight")}
    assert len(routers) == LAYERS
    assert len(watched.said) == (NEW - 1) * LAYERS
    for layer, hidden, said in watched.said:
        assert said.shape == (1, 1, 2 * TOP_K)
        if layer == LAYERS - 1:
            assert (said == -1).all()
            continue
        scores = (routers[f"model.layers.{layer + 1}.mlp.gate.weight"].double() @ hidden[0].double()).detach().numpy()
        named = scores[said[0, 0]]
        assert (np.diff(named) <= 1e-5).all()  # the best first
        assert len(set(said[0, 0].tolist())) == 2 * TOP_K
        assert named[-1] >= np.sort(scores)[-2 * TOP_K] - 1e-5  # and none better is left out


def test_what_is_sent_for_is_likely_not_near_and_of_the_next_layer(watched: Watch) -> None:
    assert any(keys for *_, keys in watched.sent)
    for layer, run, room, near, keys in watched.sent:
        assert run.phase == Phase.DECODE
        assert len(keys) <= room
        assert len(set(keys)) == len(keys)
        assert not near & set(keys)
        assert {key.layer for key in keys} <= {(layer + 1) % LAYERS}


def test_recorded_predictions_are_those_that_the_live_gates_would_have_made(stock: Any) -> None:
    # A recorded prediction lies at its target: [token, target, distance - 1]. The request is run again in one pass.
    trace = Trace.load(reference.trace_path("python"))
    trace = trace.take(trace.request == 0)
    assert trace.predictions is not None
    assert trace.token_ids is not None
    distances, width = trace.predictions.shape[2:]
    inputs, chosen = routed(stock, torch.from_numpy(trace.token_ids.astype(np.int64))[None])
    routers = Routers.of(stock, find_moe_layers(stock))
    assert routers is not None
    own = np.sort(np.stack([chosen[layer] for layer in range(LAYERS)], 1), -1)
    assert np.mean(own == np.sort(trace.experts, -1)) > 0.99  # it was recorded on another machine: that rounds apart
    for layer in range(LAYERS):
        said = routers.predict(layer, inputs[layer], distances, width).numpy()
        for distance in range(1, distances + 1):
            if layer + distance < LAYERS:
                recorded = trace.predictions[:, layer + distance, distance - 1]
                assert np.mean(said[:, distance - 1] == recorded) > 0.97
            else:
                assert (said[:, distance - 1] == -1).all()
    assert (trace.predictions[:, 0] == -1).all()


def routed(model: Any, ids: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """What each layer's experts were given in one pass, and who was chosen."""
    inputs, chosen, undo = {}, {}, []
    for layer, moe_layer in enumerate(find_moe_layers(model)):

        def forward(hidden: Any, index: Any, weights: Any, layer: int = layer, moe_layer: Any = moe_layer) -> Any:
            inputs[layer], chosen[layer] = hidden.clone(), index.numpy().copy()
            return moe_layer.stock(hidden, index, weights)

        undo.append(moe_layer.install(forward))
    with torch.no_grad():
        model(ids)
    for back in undo:
        back()
    return inputs, chosen


def event_of(experts: list[int], said: Any = None) -> ExpertBatch:
    index = torch.tensor([experts])
    return ExpertBatch(torch.zeros(1, 4), index, torch.ones(index.shape), EXPERTS, said)


def sent_after(
    predictor: ForecastPredictor, layer: int, experts: list[int], number: int, room: int = 16, near: Any = ()
) -> list[ExpertKey]:
    """Ask as an engine does: the gates first, then, with what they said, the forecast."""
    event = event_of(experts, predictor.ask_device(layer, torch.zeros(1, 4), decode(number)))
    return predictor.choose(layer, event, decode(number), room, lambda key: key.expert in near)


def decode(number: int, ids: list[int] | None = None) -> Step:
    return Step(number, 1, 1, Phase.DECODE, 0, None, None if ids is None else np.array(ids, np.int32))


class Asked(PrefetchTrial):
    """Remembers of which layers and passes it was asked."""

    def __init__(self) -> None:
        super().__init__(LAYERS, most=16)
        self.asked: list[tuple[int, int]] = []

    def most(self, layer: int, number: int) -> int:
        self.asked.append((layer, number))
        return super().most(layer, number)


def predictor_of(forecast: str, rules: dict[str, Any] | None = None, **options: Any) -> ForecastPredictor:
    plan = replace(plan_prefetch("cpu", SHAPE, rows=16), **(rules or {}))
    return ForecastPredictor(parse(forecast), SHAPE, plan, **options)


def fixed_gate(experts: list[int]) -> Any:
    """Routers ahead that always name the same experts."""
    return lambda _, hidden, distances, width: torch.tensor([[experts[:width]] * distances] * len(hidden))


@pytest.mark.parametrize(
    ("rows", "length", "same", "of_these"),
    [
        ([[EXPERTS, EXPERTS + 1], [1, 2], [3, 4]], 3, [[1, 2], [3, 4]], 2),  # who chose no expert is no part of it
        ([[1], [2], [3], [4]], 2, [[1, 2], [3, 4]], 2),  # each token has a row for each of its experts
    ],
)
def test_an_event_has_as_many_tokens_as_chose_experts(
    rows: list[list[int]], length: int, same: list[list[int]], of_these: int
) -> None:
    states = []
    for index, tokens in ((rows, length), (same, of_these)):
        predictor = predictor_of("best")
        pairs = torch.tensor(index)
        event = ExpertBatch(torch.zeros(len(index), 4), pairs, torch.ones(pairs.shape), EXPERTS)
        predictor.observe(0, event, Step(0, 1, tokens, Phase.PREFILL, 0, None))
        states.append(arrays_of(predictor.state))
    for learnt, expected in zip(*states, strict=True):
        np.testing.assert_array_equal(learnt, expected)


def arrays_of(state: Any) -> list[Any]:
    """All that a forecast knows; some of it is in tuples."""
    return [array for part in state for array in arrays_of(part)] if isinstance(state, tuple) else [state]


def test_the_pass_that_is_asked_for_is_that_of_the_layer_to_come() -> None:
    payoff = Asked()
    predictor = predictor_of("previous", trial=payoff)
    for layer in range(LAYERS - 1):
        predictor.choose(layer, event_of([1, 2, 3]), decode(5), 8, lambda _: False)
    assert payoff.asked == [(layer + 1, 5) for layer in range(LAYERS - 1)]


def test_after_the_last_layer_the_pass_that_is_asked_for_is_the_next() -> None:
    payoff = Asked()
    predictor_of("previous", trial=payoff).choose(LAYERS - 1, event_of([1, 2]), decode(5), 8, lambda _: False)
    assert payoff.asked == [(0, 6)]


def test_no_more_is_sent_than_there_is_room_or_than_pays_and_the_best_goes_first() -> None:
    wanted = list(range(10, 26))
    predictor = predictor_of("gate", gate=fixed_gate(wanted), trial=PrefetchTrial(LAYERS, auto=False, most=16))
    everyone = sent_after(predictor, 0, [1, 2, 3, 4, 5, 6, 7, 8], 1)
    assert everyone == [ExpertKey(1, expert) for expert in wanted[:4]]  # four to begin with
    assert len(sent_after(predictor, 0, [1], 2, room=2)) == 2
    assert sent_after(predictor, 0, [1], 3, room=0) == []
    assert sent_after(predictor, 0, [1], 4, near=range(13))[0] == ExpertKey(1, 13)
    predictor.note_event(1, decode(4), 0.0, 3, 0)
    assert len(sent_after(predictor, 0, [1], 5)) == 5
    assert len(sent_after(predictor, 1, [1], 5)) == 4


def test_what_is_unlikely_is_not_sent_for() -> None:
    wanted = list(range(10, 26))
    predictor = predictor_of("gate", gate=fixed_gate(wanted), trial=PrefetchTrial(LAYERS, auto=False, most=16))
    assert {key.expert for key in sent_after(predictor, 0, [40], 0)} <= set(wanted)
    for number in range(60):  # the routers ahead are always wrong
        used = [26 + number % 38]
        sent = [key.expert for layer in range(LAYERS) for key in sent_after(predictor, layer, used, number)]
    assert sent == []
    assert 0.0 < predictor._probabilities.max() < MIN_PROBABILITY


def test_control_passes_go_without() -> None:
    predictor = predictor_of("gate", gate=fixed_gate(list(range(16))))
    sent = [len(sent_after(predictor, 2, [1], number)) > 0 for number in range(2, 34)]
    assert all(sum(sent[at : at + 2]) == 1 for at in range(0, 32, 2))  # in the trial one of two
    predictor.trial.state.stage[0] = ON
    assert sum(len(sent_after(predictor, 2, [1], number)) > 0 for number in range(48, 64)) == 15


def test_experts_with_a_slot_are_not_sent_for() -> None:
    slot_of = np.full((LAYERS, EXPERTS), -1, np.int32)
    slot_of[1, [10, 12]] = [0, 1]
    forced = PrefetchTrial(LAYERS, auto=False, most=16)
    predictor = predictor_of("gate", gate=fixed_gate(list(range(10, 26))), trial=forced, slot_of=slot_of)
    assert [key.expert for key in sent_after(predictor, 0, [1], 1)] == [11, 13, 14, 15]


def test_nothing_is_asked_or_learnt_while_predicting_is_switched_off() -> None:
    asked: list[int] = []
    predictor = predictor_of("previous", gate=lambda *_: asked.append(1))
    for number in range(1, 200):
        predictor.note_step(decode(number), 1e-3 + 1e-4 * (predictor.trial.most(0, number) > 0))
    assert predictor.trial.decision == "off"
    assert "costs 0.100 of 1.000 ms per step" in predictor.trial.reason
    before = [np.copy(part) for part in predictor.state if isinstance(part, np.ndarray)]
    assert predictor.ask_device(3, torch.zeros(1, 4), decode(201)) is None
    assert predictor.choose(3, event_of([1, 2]), decode(201), 8, lambda _: False) == []
    assert asked == []
    after = [part for part in predictor.state if isinstance(part, np.ndarray)]
    assert len(before) > 0
    assert all(np.array_equal(old, new) for old, new in zip(before, after, strict=True))


def test_what_the_gates_say_of_a_batch_reaches_the_forecast_by_votes() -> None:
    predictor = predictor_of("gate", gate=None)
    index, said = torch.tensor([[1, 4], [4, 9]]), torch.tensor([[[7, 3]], [[5, 7]]])
    event = ExpertBatch(torch.zeros(2, 4), index, torch.ones(2, 2), EXPERTS, said)
    seen = predictor._seen(0, event, Step(1, 2, 1, Phase.DECODE, 0, None))
    assert (seen.experts.tolist(), seen.counts.tolist(), seen.tokens) == ([1, 4, 9], [1, 2, 1], 2)
    assert seen.predictions.tolist() == [[7, 5]]
    assert event.flat.tolist() == [1, 4, 4, 9]


def test_the_token_of_a_pass_is_known_where_there_is_one() -> None:
    predictor = predictor_of("token")
    assert predictor._seen(0, event_of([1]), decode(1, [77])).token == 77
    assert predictor._seen(0, event_of([1]), decode(1)).token == -1
    assert predictor._seen(0, event_of([1]), decode(1, [7, 8])).token == -1


def test_the_forecast_by_token_knows_the_tokens() -> None:
    model = load("token")
    watch = Watch(model.hotset.engine.offload.prefetcher.predictor)
    text = greedy(model, 5)[0]
    model.hotset.close()
    told = [seen.token for seen in watch.seen if seen.layer == 0 and seen.phase == Phase.DECODE]
    assert told == text[len(IDS[0]) : -1]


def test_prompts_are_learnt_from() -> None:
    model = load("transition")
    watch = Watch(model.hotset.engine.offload.prefetcher.predictor)
    greedy(model, 2)
    model.hotset.close()
    assert [seen.layer for seen in watch.seen if seen.phase == Phase.PREFILL] == list(range(LAYERS))


def test_stats_say_what_was_decided() -> None:
    payoff = PrefetchTrial(2, most=3)
    with_predictions, without = sorted((6, 7), key=lambda number: payoff.most(1, number) == 0)
    payoff.note_event(1, with_predictions, 2e-3, 0, 1)
    payoff.note_event(1, without, 1e-3, 0, 0)
    found = SimpleNamespace(**payoff.as_dict())
    assert (found.decision, "0 of at least 8 comparisons" in found.reason) == ("trial", True)
    assert (found.auto, found.most, found.layers_switched_off) == (True, [3, 2], [])
    assert (found.stall_ms_with, found.stall_ms_without) == ([0.0, 2.0], [0.0, 1.0])

"""Prefetch: whatever is predicted, the text and the cache stay the same; only times differ."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from two_tiers import few_at_once  # noqa: E402
from two_tiers import load_two_tiers as load_on_device  # noqa: E402

import hotset  # noqa: E402
from hotset import policies, reference  # noqa: E402
from hotset.cache.controller import Controller  # noqa: E402
from hotset.cache.plan import Scope, SlotPlan  # noqa: E402
from hotset.engine.arena import poison  # noqa: E402
from hotset.engine.batch import ExpertBatch  # noqa: E402
from hotset.engine.build import cpu_engine  # noqa: E402
from hotset.engine.host.prefetcher import IsNear  # noqa: E402
from hotset.engine.step import Step  # noqa: E402
from hotset.models.budget import shape_of  # noqa: E402
from hotset.models.connect import connect_engine  # noqa: E402
from hotset.models.deferred import DeferredExperts, load_without_experts  # noqa: E402
from hotset.shape import ExpertKey  # noqa: E402
from hotset.trace import Phase, Trace  # noqa: E402
from hotset.transfer import file as store_file  # noqa: E402

IDS = torch.tensor([[5, 900, 31, 7, 410, 77]])
LAYERS, EXPERTS = 8, 64


def greedy(model: Any, tokens: int = 16) -> Any:
    return model.generate(
        IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )


def load_on_cpu(slots: int, staging: int, scope: Scope = Scope.LAYER, ahead: int = 0, predictor: Any = None) -> Any:
    from transformers import AutoModelForCausalLM

    deferred = DeferredExperts(keep=lambda *_: False)
    with load_without_experts(deferred):
        model = AutoModelForCausalLM.from_pretrained(reference.path(), dtype=torch.float32)
    assert deferred.moe_layers is not None
    assert deferred.catalog is not None
    plan = SlotPlan(shape_of(deferred.moe_layers, deferred.catalog), slots, scope, staging, ahead)
    controller, specs = Controller(plan, policies.parse("blend")), [moe_layer.spec for moe_layer in deferred.moe_layers]
    engine = cpu_engine(controller, deferred.catalog, specs, predictor=predictor)
    assert engine.offload is not None
    poison(engine.offload.arena)
    connect_engine(model, deferred.moe_layers, engine)
    return model


def load(kind: str, scope: Scope, ahead: int, predictor: Any = None) -> Any:
    if kind == "cpu":
        return load_on_cpu(128, 3, scope, ahead, predictor)
    return load_on_device(128, 3, 512 if kind == "gpu" else 256, few_at_once, scope, ahead, predictor)


@pytest.fixture(scope="module")
def truth() -> tuple[Any, Trace]:
    from transformers import AutoModelForCausalLM

    expected = greedy(AutoModelForCausalLM.from_pretrained(reference.path(), dtype=torch.float32))
    model = hotset.load(reference.path(), memory="50%", dtype=torch.float32, device="cpu")
    with model.hotset.trace() as recorder:
        assert torch.equal(greedy(model), expected)
    model.hotset.close()
    return expected, recorder.finish()


class Said:
    """Predictions by a rule that knows nothing, everything, or the opposite."""

    needs_tokens = False

    def __init__(self, rule: str, trace: Trace) -> None:
        self.rule, self.trace = rule, trace
        self.random = np.random.default_rng(1)

    def choose(self, layer: int, _: ExpertBatch, run: Step, room: int, is_near: IsNear) -> list[ExpertKey]:
        keys = [ExpertKey(*key) for key in getattr(self, self.rule)(layer, run)]
        return [key for key in keys if not is_near(key)][:room]

    def observe(self, *_: Any) -> None:
        """Nothing to learn."""

    def ask_device(self, *_: Any) -> None:
        return None

    def note_step(self, *_: Any) -> None:
        return None

    def note_event(self, *_: Any) -> None:
        return None

    def oracle(self, layer: int, run: Step) -> list[tuple[int, int]]:
        step, target = run.number - 1 + (layer == LAYERS - 1), (layer + 1) % LAYERS
        rows = self.trace.experts[self.trace.step == step, target]
        return [(target, int(expert)) for expert in np.unique(rows)]

    def wrong(self, layer: int, run: Step) -> list[tuple[int, int]]:
        right = {key[1] for key in self.oracle(layer, run)}
        return [((layer + 1) % LAYERS, expert) for expert in range(EXPERTS) if expert not in right]

    def random_ones(self, _: int, __: Step) -> list[tuple[int, int]]:
        return [(int(self.random.integers(LAYERS)), int(self.random.integers(EXPERTS))) for _ in range(8)]


def rows_are_kept(engine: Any) -> bool:
    """Every row of memory belongs to exactly one slot, staging place or prediction, and holds what it should."""
    rows = engine.offload.arena.rows()
    for key in engine.controller.residents():
        used = engine.offload.catalog.layers[key.layer].layout.used_bytes
        row = int(engine.cache.rows_of(*key))
        if not np.array_equal(rows[row, :used], engine.fetch(*key)[:used]):
            return False
    engine.offload.prefetcher.clear()
    taken = [*engine.cache.rows.tolist(), *engine.cache.staging, *engine.cache.prefetch_rows]
    return sorted(taken) == list(range(engine.offload.arena.slots))


@pytest.fixture(scope="module")
def without_predictions(truth: Any) -> Callable[[str, Scope], dict[str, Any]]:
    """The statistics of a run without predictions, once for each kind of engine and scope."""

    @cache
    def stats(kind: str, scope: Scope) -> dict[str, Any]:
        plain = load(kind, scope, 0)
        assert torch.equal(greedy(plain), truth[0])
        found: dict[str, Any] = plain.hotset.stats()
        plain.hotset.close()
        return found

    return stats


SMALL = "gpu with a small RAM tier"


@pytest.mark.parametrize(
    ("kind", "rule", "scope", "ahead"),
    [  # every two values of different columns meet in a row
        ("cpu", "oracle", Scope.LAYER, 1), ("cpu", "wrong", Scope.POOL, 8), ("cpu", "random_ones", Scope.LAYER, 8),
        ("gpu", "oracle", Scope.POOL, 8), ("gpu", "wrong", Scope.LAYER, 1), ("gpu", "random_ones", Scope.POOL, 1),
        (SMALL, "oracle", Scope.LAYER, 8), (SMALL, "wrong", Scope.POOL, 1), (SMALL, "random_ones", Scope.POOL, 8),
    ],
)  # fmt: skip
def test_no_prediction_changes_the_text_or_the_cache(
    kind: str, rule: str, scope: Scope, ahead: int, truth: Any, without_predictions: Any
) -> None:
    expected, trace = truth
    before = without_predictions(kind, scope)
    model = load(kind, scope, ahead, Said(rule, trace))
    engine = model.hotset.engine
    assert torch.equal(greedy(model), expected)
    after, counts = model.hotset.stats(), engine.offload.prefetcher.counts
    assert rows_are_kept(engine)
    model.hotset.close()
    for count in ("hits", "misses", "evicted", "staged"):
        assert after["decode"][count] == before["decode"][count]
    assert counts.in_time + counts.late <= after["misses"]
    if rule == "oracle":
        assert counts.in_time + counts.late > 0
        assert counts.wasted <= 0.05 * (counts.in_time + counts.late) + LAYERS * ahead
    if rule == "wrong":
        assert counts.in_time + counts.late == 0
        assert counts.wasted > 0


def test_a_prediction_that_meets_a_bad_disk_is_read_again_by_demand(truth: Any, monkeypatch: Any) -> None:
    expected, trace = truth
    model = load("cpu", Scope.LAYER, 8, Said("oracle", trace))
    engine = model.hotset.engine
    good, calls = os.preadv, [0]

    def now_and_then(*arguments: Any) -> int:
        calls[0] += 1
        if calls[0] % 7 < 5:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return good(*arguments)

    monkeypatch.setattr(store_file, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(store_file, "_preadv", now_and_then)
    for _ in range(3):
        with suppress(hotset.HotsetError):  # demand may meet the fault, too
            assert torch.equal(greedy(model, 12), expected[:, : IDS.shape[1] + 12])
    monkeypatch.setattr(store_file, "_preadv", good)
    assert torch.equal(greedy(model), expected)
    assert rows_are_kept(engine)
    model.hotset.close()


def test_predictions_are_for_decode_alone(truth: Any) -> None:
    _, trace = truth
    phases = []

    class Watching(Said):
        def choose(self, layer: int, event: ExpertBatch, run: Step, room: int, is_near: IsNear) -> list[ExpertKey]:
            phases.append(run.phase)
            return super().choose(layer, event, run, room, is_near)

    model = load("cpu", Scope.LAYER, 4, Watching("oracle", trace))
    greedy(model, 3)
    assert set(phases) == {Phase.DECODE}
    model.hotset.close()

"""The host driver from parts: in whatever order experts arrive, products use the right rows; failures are repaired."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fake_mover import FakeMover  # noqa: E402

from hotset import policies  # noqa: E402
from hotset.cache.controller import Controller  # noqa: E402
from hotset.cache.plan import Scope, SlotPlan  # noqa: E402
from hotset.engine.guard import Guard  # noqa: E402
from hotset.engine.host.driver import HostDriver  # noqa: E402
from hotset.engine.kernels import ExpertSpec  # noqa: E402
from hotset.engine.slots import SlotCache  # noqa: E402
from hotset.engine.stats import EngineStats  # noqa: E402
from hotset.engine.step import Step  # noqa: E402
from hotset.errors import HotsetError, StoreError  # noqa: E402
from hotset.shape import ExpertKey, ModelShape  # noqa: E402
from hotset.store import Catalog, LayerSource, Part, SlotLayout  # noqa: E402
from hotset.trace import Phase  # noqa: E402

SHAPE = ModelShape(3, 12, 4)
LAYOUT = SlotLayout.of([Part("w", (1,), "float32")])
CATALOG = Catalog((), tuple(LayerSource(LAYOUT, [()] * SHAPE.experts) for _ in range(SHAPE.layers)))


class Labelled:
    """Experts that multiply by their number plus one, and refuse a row that holds another."""

    spec = ExpertSpec("up", "down", torch.relu)

    def __init__(self, layer: int, memory: dict[int, tuple[int, int]], few: bool) -> None:
        self.layer, self.memory, self.is_few = layer, memory, few
        self.runs: list[list[int]] = []

    def prefers_one_run(self, _: Any) -> bool:
        return self.is_few

    def run(self, batch: Any, experts: Any, rows: Any) -> None:
        assert [self.memory[int(row)] for row in rows] == [(self.layer, int(expert)) for expert in experts]
        assert sorted(experts) == list(experts)
        self.runs.append([int(expert) for expert in experts])
        pairs, ends = batch.places(batch.positions(experts))
        places, begin = torch.from_numpy(pairs), 0
        given = batch.rows(places).expand(len(pairs), -1)
        scale = torch.empty(len(pairs), 1)
        for expert, end in zip(experts, ends, strict=True):
            scale[begin:end], begin = float(expert) + 1, end
        batch.output.scatter(places, given * scale)


class Bench:
    """A driver, and all its parts."""

    def __init__(self, slots: int, staging: int, *, few: bool = False, scope: Scope = Scope.LAYER, **options: Any):
        self.memory: dict[int, tuple[int, int]] = {}
        self.cache = SlotCache(Controller(SlotPlan(SHAPE, slots, scope, staging), policies.parse("lru")))
        self.guard, self.stats = Guard(self.cache), EngineStats(self.cache.controller)
        self.mover = FakeMover(self.memory, self.cache.staging, **options)
        self.kernels: Any = [Labelled(layer, self.memory, few) for layer in range(SHAPE.layers)]
        self.driver = HostDriver(self.cache, self.mover, self.kernels, None, CATALOG, self.stats, self.guard)
        self.random = np.random.default_rng(slots + 31 * staging)

    def step(self, number: int = 1, tokens: int = 1) -> Step:
        return Step(number, 1, tokens, Phase.DECODE if tokens == 1 else Phase.PREFILL, 0, self.driver)

    def serve(self, layer: int, tokens: int = 1, step: Step | None = None) -> None:
        """Serve a random event, and check its output."""
        index = np.stack([self.random.permutation(SHAPE.experts)[: SHAPE.top_k] for _ in range(tokens)])
        hidden = torch.from_numpy(self.random.standard_normal((tokens, 5))).float()
        weights = torch.from_numpy(self.random.random((tokens, SHAPE.top_k))).float()
        step = step or self.step(tokens=tokens)
        found = step.driver.serve(step, layer, hidden, torch.from_numpy(index), weights)
        expected = hidden * (weights * (torch.from_numpy(index) + 1)).sum(dim=1, keepdim=True)
        assert torch.allclose(found, expected, rtol=1e-5)

    def rows_are_right(self) -> bool:
        keys = self.cache.controller.residents()
        return all(self.memory[int(self.cache.rows_of(*key))] == tuple(key) for key in keys)


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize(("slots", "staging", "at_once"), [(12, 1, 1), (12, 4, 3), (20, 2, 9), (36, 12, 2)])
def test_every_product_is_of_the_right_row(slots: int, staging: int, at_once: int, scope: Scope) -> None:
    bench = Bench(slots, staging, scope=scope, at_once=at_once)
    for number in range(60):
        bench.serve(number % SHAPE.layers, tokens=(1, 1, 1, 6)[number % 4])
    assert bench.rows_are_right()
    counters = bench.cache.controller.counters().as_dict()
    assert counters["misses"] == sum(len(fetch.experts) for fetch in bench.mover.fetches) == bench.stats.loaded_bytes


def test_residents_are_computed_while_others_are_on_their_way() -> None:
    bench = Bench(36, 12)
    for _ in range(20):
        bench.serve(0)
    bench.cache.controller.residency.drop([ExpertKey(0, expert) for expert in range(6)])
    mixed = 0
    for _ in range(6):
        bench.kernels[0].runs.clear()
        before = len(bench.mover.fetches)
        bench.serve(0)
        fetched = {expert for fetch in bench.mover.fetches[before:] for expert in fetch.experts}
        first, asked = set(bench.kernels[0].runs[0]), {e for run in bench.kernels[0].runs for e in run}
        if fetched and asked - fetched:
            mixed += 1
            assert first == asked - fetched
    assert mixed


def test_a_short_transfer_is_waited_for_and_all_is_computed_at_once() -> None:
    bench = Bench(36, 4, few=True, short=True)
    for _ in range(9):
        bench.serve(1)
    assert all(len(run) == SHAPE.top_k for run in bench.kernels[1].runs)
    assert len(bench.kernels[1].runs) == 9


@pytest.mark.parametrize("staging", [1, 4])
def test_an_expert_that_cannot_be_moved_loses_its_slot_and_the_next_event_is_right(staging: int) -> None:
    bench = Bench(12, staging)
    broken = 0
    for number in range(40):
        layer = number % SHAPE.layers
        faults = {(layer, int(expert)) for expert in bench.random.permutation(SHAPE.experts)[:3]}
        bench.mover.faults = set(faults)
        try:
            bench.serve(layer)
        except StoreError:
            broken += 1
            (met,) = faults - bench.mover.faults
            assert not bench.cache.is_resident(ExpertKey(*met))
        bench.mover.faults.clear()
        bench.serve(layer)
        assert bench.rows_are_right()
    assert broken > 3
    assert bench.mover.stops == broken
    assert not bench.cache._in_use


def test_two_threads_are_served_under_their_own_steps() -> None:
    bench = Bench(18, 3, delay_s=0.0005)
    steps = [Step(n + 1, 1, 1, Phase.DECODE, n, bench.driver) for n in range(2)]
    failed: list[BaseException] = []

    def work(step: Step) -> None:
        try:
            for number in range(15):
                with lock:  # random numbers are drawn in turns
                    bench.serve(number % SHAPE.layers, step=step)
        except BaseException as error:
            failed.append(error)

    lock = threading.Lock()
    threads = [threading.Thread(target=work, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    requests = bench.stats.requests()
    assert [request.number for request in requests] == [0, 1]
    asked = [request.counters.as_dict()["hits"] + request.counters.as_dict()["misses"] for request in requests]
    assert asked == [15 * SHAPE.top_k] * 2


def test_a_slow_link_is_waited_for_and_counted() -> None:
    bench = Bench(12, 4, expert_bytes=1000, bytes_per_s=200_000)
    began = time.perf_counter()
    for _ in range(4):
        bench.serve(2)
    assert 0 < bench.stats.clock.stall_s < time.perf_counter() - began
    assert bench.stats.clock.stall_s >= bench.stats.clock.loaded_bytes / 200_000


def test_an_engine_that_was_closed_or_broken_refuses() -> None:
    bench = Bench(12, 4)
    bench.guard.mark_broken()
    with pytest.raises(HotsetError, match="load the model again"):
        bench.serve(0)
    bench.guard.refuse_calls()
    with pytest.raises(HotsetError):
        bench.serve(0)

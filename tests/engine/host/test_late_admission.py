"""Admission `late` live: an expert that its own event evicts still computes, whatever is written to rows meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import expert_samples as samples  # noqa: E402
from fake_mover import FakeMover  # noqa: E402

from hotset import policies  # noqa: E402
from hotset.cache.controller import Controller  # noqa: E402
from hotset.cache.plan import Scope, SlotPlan  # noqa: E402
from hotset.engine.arena import Arena, poison  # noqa: E402
from hotset.engine.batch import ExpertBatch  # noqa: E402
from hotset.engine.guard import Guard  # noqa: E402
from hotset.engine.host.driver import HostDriver  # noqa: E402
from hotset.engine.host.prefetcher import Prefetcher  # noqa: E402
from hotset.engine.kernels.cpu import PerExpertKernels  # noqa: E402
from hotset.engine.slots import SlotCache  # noqa: E402
from hotset.engine.stats import EngineStats  # noqa: E402
from hotset.engine.step import Step  # noqa: E402
from hotset.errors import StoreError  # noqa: E402
from hotset.prefetch import Driver, plan_prefetch  # noqa: E402
from hotset.shape import ExpertKey, ModelShape  # noqa: E402
from hotset.store import Catalog, LayerSource  # noqa: E402
from hotset.trace import Phase, Trace  # noqa: E402
from hotset.transfer.mover import Fetch  # noqa: E402

SHAPE = ModelShape(3, 12, 4)
SAMPLE = samples.sample_of(*samples.spec_of("qwen3_moe"), torch.float32, experts=SHAPE.total_experts)
CATALOG = Catalog((), tuple(LayerSource(SAMPLE.layout, [()] * SHAPE.experts) for _ in range(SHAPE.layers)))
POLICIES = ["nextuse", "nextuse:streams=2", "blend:admit=late", "lfu:admit=late"]


def at_home(layer: int, expert: int) -> int:
    """The row of an expert in the sample's own arena, where all of them lie."""
    return int(SAMPLE.slot(layer * SHAPE.experts + expert))


class Rows(dict[int, tuple[int, int]]):
    """What each row holds: the bytes go where the label goes."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.bytes, self.source = arena.rows(), SAMPLE.arena.rows()

    def __setitem__(self, row: int, key: tuple[int, int]) -> None:
        super().__setitem__(row, key)
        self.bytes[row] = self.source[at_home(*key)]

    def spoil(self, row: int) -> None:
        """Leave a row half written."""
        super().__setitem__(row, (-1, -1))
        self.bytes[row] = 0xFF


class HastyMover(FakeMover):
    """Writes from the moment on at which an event asks: what computes with a row that it was told reads nonsense."""

    def start(self, fetch: Fetch) -> Any:
        transfer = super().start(fetch)
        for expert, row in transfer._pending.items():
            if self.random.random() < 0.5:
                self.memory[row] = (fetch.layer, expert)
            else:
                self.memory.spoil(row)  # type: ignore[attr-defined]
        return transfer


class HastySource:
    """Prefetches at once."""

    done = True

    def __init__(self, memory: Rows) -> None:
        self.memory = memory

    def has(self, *_: int) -> bool:
        return True

    def size_bytes(self, *_: int) -> int:
        return 1

    def start(self, loads: Sequence[Any]) -> Sequence[Any]:
        for load in loads:
            self.memory[load.row] = (load.layer, load.expert)
        return [self] * len(loads)

    def promote(self, transfer: Any) -> None:
        """It is there."""

    def failed(self, *_: Any) -> bool:
        return False

    def cancel(self) -> None:
        """It is there."""


class Guess:
    """Predicts any experts of the next layer."""

    needs_tokens = False

    def __init__(self) -> None:
        self.random = np.random.default_rng(5)

    def choose(self, layer: int, _: Any, __: Any, room: int, is_near: Callable[[ExpertKey], bool]) -> list[ExpertKey]:
        target = (layer + 1) % SHAPE.layers
        keys = [ExpertKey(target, int(expert)) for expert in self.random.permutation(SHAPE.experts)]
        return [key for key in keys if not is_near(key)][:room]

    def observe(self, *_: Any) -> None:
        """Nothing to learn."""

    def ask_device(self, *_: Any) -> None:
        return None

    def note_event(self, *_: Any) -> None:
        """Nothing to learn."""


class Kernels:
    """Those of a CPU, which look at the rows of the whole cache whenever they compute."""

    def __init__(self, bench: Bench, arena: Arena) -> None:
        self.bench, self.inner = bench, PerExpertKernels(arena, SAMPLE.layout, SAMPLE.spec)
        self.spec = SAMPLE.spec

    def prefers_one_run(self, batch: ExpertBatch) -> bool:
        return self.bench.at_once and batch.tokens == 1

    def run(self, batch: ExpertBatch, experts: Any, rows: Any) -> None:
        self.bench.check_rows(in_event=True)
        self.bench.strike("kernel")
        self.inner.run(batch, experts, rows)


class Bench:
    """A host driver over small slots, all experts beside it, and what it has served."""

    def __init__(self, policy: str, slots: int = 15, staging: int = 4, scope: Scope = Scope.LAYER, ahead: int = 0,
                 *, at_once: bool = False, **options: Any) -> None:  # fmt: skip
        self.plan = SlotPlan(SHAPE, slots, scope, staging, ahead)
        self.at_once = at_once
        self.cache = SlotCache(Controller(self.plan, policies.parse(policy)))
        arena = Arena.in_ram(self.cache.num_rows, SAMPLE.arena.slot_bytes)
        poison(arena)
        self.memory = Rows(arena)
        self.guard, self.stats = Guard(self.cache), EngineStats(self.cache.controller)
        self.mover = HastyMover(self.memory, self.cache.staging, short=at_once, **options)
        rules, source = plan_prefetch(Driver.CPU, SHAPE, rows=ahead), HastySource(self.memory)
        self.prefetcher = Prefetcher(rules, self.cache, source, Guess()) if ahead else None  # type: ignore[arg-type]
        of_layers: Any = [Kernels(self, arena) for _ in range(SHAPE.layers)]
        self.driver = HostDriver(self.cache, self.mover, of_layers, self.prefetcher, CATALOG, self.stats, self.guard)
        self.loads: list[list[int]] = []
        self.stats.listener = lambda layer, loads: self.loads.extend([layer, *row] for row in loads.tolist())
        self.served: list[tuple[int, Phase, Any]] = []  # requests, phase and experts [tokens, layers, top_k] of steps
        self.random, self.habits = np.random.default_rng(slots), self._make_habits()
        self.strikes: dict[str, int] = {}  # how often each place is passed before an interrupt
        self.exchanged = 0

    def _make_habits(self) -> Any:
        random = np.random.default_rng(3)
        return np.stack([[random.permutation(12)[:4] for _ in range(SHAPE.layers)] for _ in range(8)])

    def strike(self, place: str) -> None:
        if place in self.strikes:
            self.strikes[place] -= 1
            if self.strikes[place] < 0:
                del self.strikes[place]
                raise KeyboardInterrupt

    def check_rows(self, *, in_event: bool = False) -> None:
        """Every row is of one slot, of staging, of a prediction, or of an expert on its way out, and of one only."""
        cache, ahead = self.cache, self.prefetcher
        held = [] if ahead is None else [one.row for one in (*ahead._held.values(), *ahead._draining)]
        rows = [*cache.rows.tolist(), *cache.staging, *cache._outgoing]
        if in_event:  # what was prefetched for the event and has no slot is with the event
            assert len(set(rows)) == len(rows)
            assert not set(rows) & {*held, *cache.prefetch_rows}
            assert len(cache.staging) + len(cache._outgoing) >= self.plan.staging
            self.exchanged += len(cache._outgoing)
            return
        assert not cache._outgoing
        assert len(cache.staging) == self.plan.staging
        assert sorted([*rows, *cache.prefetch_rows, *held]) == list(range(cache.num_rows))
        for key in cache.controller.residents():
            assert self.memory[int(cache.rows_of(*key))] == tuple(key)

    def step(self, tokens: int = 1, phase: Phase = Phase.DECODE) -> None:
        """Serve all layers of a step, and compare each output with that of all experts resident, to the bit."""
        batch, length = (1, tokens) if phase == Phase.PREFILL else (tokens, 1)
        step = Step(len(self.served), batch, length, phase, 0, self.driver)
        chosen = np.stack([
            self.habits[self.random.integers(8)] if self.random.random() < 0.7
            else [self.random.permutation(12)[:4] for _ in range(SHAPE.layers)] for _ in range(tokens)
        ])  # fmt: skip
        self.served.append((batch, phase, chosen))
        for layer in range(SHAPE.layers):
            self.serve(step, layer, chosen[:, layer])
            self.check_rows()

    def serve(self, step: Step, layer: int, chosen: Any) -> None:
        hidden = torch.from_numpy(self.random.standard_normal((len(chosen), SAMPLE.width))).float()
        weights = torch.from_numpy(self.random.random(chosen.shape)).float()
        index = torch.from_numpy(np.ascontiguousarray(chosen))
        found = step.driver.serve(step, layer, hidden, index, weights)
        event = ExpertBatch(hidden, index, weights, SHAPE.experts)
        rows = np.array([at_home(layer, expert) for expert in event.experts.tolist()], np.int32)
        PerExpertKernels(SAMPLE.arena, SAMPLE.layout, SAMPLE.spec).run(event, event.experts, rows)
        assert torch.equal(found, event.combine())

    def run(self, steps: int, tokens: Sequence[int] = (1, 4)) -> None:
        for number in range(steps):
            if number % 25 == 10:
                self.step(6, Phase.PREFILL)
            self.step(tokens[number // 10 % len(tokens)])

    def trace(self) -> Trace:
        """What was served, as a recording has it."""
        experts = np.concatenate([chosen for *_, chosen in self.served]).astype(np.int16)
        sizes = [len(chosen) for *_, chosen in self.served]
        steps = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
        requests = np.concatenate([np.arange(n) if batch > 1 else np.zeros(n) for (batch, *_), n in
                                   zip(self.served, sizes, strict=True)]).astype(np.int32)  # fmt: skip
        phases = np.repeat([int(phase) for _, phase, _ in self.served], sizes).astype(np.uint8)
        return Trace(SHAPE, experts, requests, steps, phases)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("slots", "staging", "scope", "ahead", "at_once"),
    [
        (12, 2, Scope.LAYER, 0, False),
        (15, 4, Scope.LAYER, 0, True),
        (15, 4, Scope.LAYER, 3, False),
        (18, 9, Scope.POOL, 0, False),
    ],
)
def test_outputs_are_those_of_all_experts_resident(
    policy: str, slots: int, staging: int, scope: Scope, ahead: int, at_once: bool
) -> None:
    bench = Bench(policy, slots, staging, scope, ahead, at_once=at_once)
    bench.run(60)
    assert bench.exchanged > 10 or scope is Scope.POOL  # there, experts of other layers are evicted first


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("staging", [1, 3, 9])
def test_a_replay_of_the_events_loads_and_evicts_the_same(policy: str, scope: Scope, staging: int) -> None:
    bench = Bench(policy, 18, staging, scope)
    bench.run(60)
    replayed = Controller(bench.plan, policies.parse(policy)).replay(bench.trace().events(), log=True)
    assert replayed.log.tolist() == bench.loads
    if staging == 1:
        assert not bench.exchanged
    elif scope is Scope.LAYER:
        assert bench.exchanged > 5


@pytest.mark.parametrize("policy", ["nextuse", "blend:admit=late"])
@pytest.mark.parametrize(("staging", "ahead"), [(2, 0), (4, 3)])
def test_a_failed_transfer_loses_no_row(policy: str, staging: int, ahead: int) -> None:
    bench, broken, chance = Bench(policy, 15, staging, ahead=ahead), 0, random.Random(7)  # noqa: S311
    for _ in range(80):
        bench.mover.faults = {(chance.randrange(3), chance.randrange(12)) for _ in range(3)}
        try:
            bench.step(chance.choice((1, 4)))
        except StoreError:
            broken += 1
            bench.check_rows()
        bench.mover.faults = set()
        bench.step(chance.choice((1, 4)))
    assert broken > 10
    assert bench.exchanged > 10


@pytest.mark.parametrize("policy", ["nextuse", "blend:admit=late"])
@pytest.mark.parametrize("place", ["exchange", "exchanged", "kernel", "release", "released", "start"])
def test_an_interrupt_loses_no_row(policy: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, chance = Bench(policy, 15, 4, ahead=2), random.Random(8)  # noqa: S311
    exchange, release, start = SlotCache._exchange, SlotCache.release, HastyMover.start

    def struck_exchange(self: SlotCache, slot: int) -> int:
        bench.strike("exchange")
        row = exchange(self, slot)
        bench.strike("exchanged")
        return row

    def struck_release(self: SlotCache) -> None:
        bench.strike("release")
        release(self)
        bench.strike("released")

    def struck_start(self: HastyMover, fetch: Fetch) -> Any:
        transfer = start(self, fetch)
        bench.strike("start")
        return transfer

    monkeypatch.setattr(SlotCache, "_exchange", struck_exchange)
    monkeypatch.setattr(SlotCache, "release", struck_release)
    monkeypatch.setattr(HastyMover, "start", struck_start)
    struck = 0
    for _ in range(200):
        bench.strikes = {place: chance.randrange(2 if place.startswith("exchange") else 4)}
        try:
            bench.step(chance.choice((1, 4)))
        except KeyboardInterrupt:
            struck += 1
            bench.check_rows()
        bench.strikes = {}
        bench.step(chance.choice((1, 4)))
        if struck == 8:
            break
    assert struck == 8


def test_a_row_that_is_given_away_at_once_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotCache, "_exchange", lambda self, slot: int(self.rows[slot]))
    with pytest.raises(AssertionError):
        Bench("nextuse").run(60)
    monkeypatch.undo()
    Bench("nextuse").run(60)

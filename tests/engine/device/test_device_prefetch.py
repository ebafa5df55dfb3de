"""Prefetch on the device: whatever was predicted, and however far it came, every pair finds the bytes of its expert."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")
CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are defined
triton = pytest.importorskip("triton")

from hotset.cache.controller import Controller  # noqa: E402
from hotset.cache.plan import SlotPlan  # noqa: E402
from hotset.engine import support  # noqa: E402
from hotset.engine.device import prefetch_kernels as kernels  # noqa: E402
from hotset.engine.device.gather import Gather, Work  # noqa: E402
from hotset.engine.device.plan import Outputs, Plan  # noqa: E402
from hotset.engine.device.prefetch import DevicePrefetch  # noqa: E402
from hotset.engine.device.prefetch_state import PrefetchState  # noqa: E402
from hotset.engine.device.table import DeviceTable  # noqa: E402
from hotset.engine.host.prefetcher import PrefetchCounts  # noqa: E402
from hotset.forecasts import _learnt, gate  # noqa: E402
from hotset.forecasts.base import Seen  # noqa: E402
from hotset.policies import Admit, parse  # noqa: E402
from hotset.prefetch import plan_prefetch  # noqa: E402
from hotset.prefetch.votes import rank_by_votes  # noqa: E402
from hotset.shape import ModelShape  # noqa: E402
from hotset.trace import Phase  # noqa: E402

interpreted = pytest.mark.skipif(CUDA, reason="stops at will: by the interpreter only")
pytestmark = [
    pytest.mark.skipif(
        not CUDA and isinstance(kernels.claim, triton.JITFunction), reason="the interpreter came too late"
    ),
    pytest.mark.filterwarnings("ignore"),
]
DEVICE = "cuda" if CUDA else "cpu"
SHAPE = ModelShape(4, 14, 3)
SLOT, USED = 8 * 96, [8 * 77, 8 * 96, 8 * 70 - 3, 8 * 81]
WORDS = [-(-used // 8) for used in USED]
DEMAND, PREFETCH = Work(3, 16, 1), Work(4, 8, 1)
PER_PART, DISTANCES = 3, 2
PARTS = DISTANCES + 1
POISON = 0xFF


class Event(NamedTuple):
    """Whom the tokens of one layer ask for, and whom its router named for them before, from nearby and from afar."""

    index: Any  # [tokens, top_k]
    said: tuple[Any, ...]  # of each distance [tokens, width]


class Machine:
    """A cache on the device with prefetch, a host that serves the same events without it, and a look at every row."""

    def __init__(
        self, tokens: int = 1, slots: int = 5, spec: str = "lru", seed: int = 0, distances: int = DISTANCES,
        **rules: Any,
    ) -> None:  # fmt: skip
        self.rng, self.tokens, self.parts = np.random.default_rng(seed), tokens, distances + 1
        layers, experts, top_k = SHAPE.layers, SHAPE.experts, SHAPE.top_k
        self.host = Controller(SlotPlan(SHAPE, slots * layers), parse(spec))
        self.cached, self.staging = slots * layers, min(tokens * top_k, experts)
        rows = self.rng.permutation(self.cached + self.parts * PER_PART)
        rows[rows >= self.cached] += self.staging  # the staging is in the middle, all else anywhere
        self.row_of = torch.from_numpy(rows[: self.cached].astype(np.int32)).to(DEVICE)
        self.table = DeviceTable.upload(self.host, DEVICE)
        listed = torch.arange(self.cached, self.cached + self.staging, dtype=torch.int32, device=DEVICE)
        self.plan = Plan(
            self.host, self.table, tokens * top_k, self.row_of, self.cached, ring=4,
            staging=listed if self.host.policy.admission is Admit.LATE else None,
        )  # fmt: skip
        self.memory = torch.full((len(rows) + self.staging, SLOT), POISON, dtype=torch.uint8, device=DEVICE)
        source = torch.from_numpy(self.rng.integers(0, 255, (layers * experts, SLOT)).astype(np.uint8))
        self.source = source.pin_memory() if CUDA else source
        self.host_row_of = self.rng.permutation(layers * experts).reshape(layers, experts).astype(np.int32)
        plan = replace(plan_prefetch("device", SHAPE, rows=self.parts * PER_PART), layers_ahead=distances, **rules)
        spare = rows[self.cached :].tolist()
        self.state = PrefetchState.of(spare, layers, experts, plan, DEVICE, PREFETCH.programs)
        where = torch.from_numpy(self.host_row_of).to(DEVICE)
        gather = Gather(self.source, self.memory, SLOT, USED, where, DEMAND, PREFETCH)
        self.ahead = DevicePrefetch(self.state, plan, gather, tokens=tokens, top_k=top_k)
        self.copies = torch.cuda.Stream() if CUDA else None
        self.expected = np.zeros(6, np.int64)
        self.claimed = self.exchanged = 0

    def bytes_of(self, layer: int, expert: int) -> Any:
        return self.source[int(self.host_row_of[layer, expert]), : USED[layer]]

    def row(self, layer: int, row: int) -> Any:
        return self.memory[row, : USED[layer]].cpu()

    @property
    def staging_rows(self) -> list[int]:
        """The rows of staging now."""
        listed = self.plan.staging
        return [*range(self.cached, self.cached + self.staging)] if listed is None else listed.tolist()

    def run(self, events: list[Event], begins: str = "after") -> None:
        """One pass; an event begins before the predictions for it set out, while they are under way, or after that."""
        self.plan.out.step.add_(1)
        began = False
        for layer, event in enumerate(events):
            if not began:
                self.state.stop.add_(1)
            self.serve(layer, event.index)
            began = begins != "after" and layer + 1 < len(events)
            self.predict(layer, self.said(events, layer), begins if began else "after")

    def said(self, events: list[Event], layer: int) -> list[Any]:
        """What the routers ahead name after a layer, the nearest first."""
        ahead = events[layer + 1 : layer + self.parts]
        return [event.said[distance] for distance, event in enumerate(ahead)]

    def serve(self, layer: int, index: Any) -> None:
        """Plan an event as the host does, fetch for it, and look at every row."""
        self.poison()
        flat = torch.from_numpy(np.ascontiguousarray(index, np.int64)).reshape(-1).to(DEVICE)
        self.plan(layer, flat)
        out = self.plan.out
        rows_before, pairs_before = self.row_of.tolist(), out.pair_row.tolist()
        held = self.state.prefetch_row.tolist()
        self.begin(layer, flat)
        self.agrees_with_the_host(layer, index)
        if (flat < SHAPE.experts).any():
            self.expect(layer, held)
        for pair, (old, new, late) in enumerate(
            zip(pairs_before, out.pair_row.tolist(), out.pair_late.tolist(), strict=True)
        ):
            assert late or old == new, f"pair {pair} is computed already"
        self.exchanged += sum(old != new for old, new in zip(rows_before, self.row_of.tolist(), strict=True))
        self.look(layer, flat)

    def begin(self, layer: int, index: Any, slot_of: Any = None) -> None:
        """What follows the planning of an event."""
        slots_of = self.table.table.slot_of if slot_of is None else slot_of
        self.ahead.claim(layer, self.plan.out, slots_of, self.row_of, index)
        self.ahead.fetch(layer, self.plan.out)

    def predict(self, layer: int, said: list[Any], begins: str = "after") -> None:
        """Send for the next layers, beside whatever computes this one."""
        if begins == "before":
            self.state.stop.add_(1)
        late = self.plan.out.pair_row[self.plan.out.pair_late > 0].tolist()
        seen = {row: self.memory[row].cpu() for row in late}
        for target in range(layer + 1, min(layer + self.parts, SHAPE.layers)):
            assert not set(late) & set(self.state.prefetch_row[target % self.parts].tolist())
        scores = [scores_of(each) for each in said]
        with torch.cuda.stream(self.copies):  # does nothing for None
            self.ahead.pick(layer, scores)
            self.ahead.send(layer)
        if begins == "meanwhile":
            torch.cuda._sleep(int(self.rng.integers(40_000)))
            self.state.stop.add_(1)
        if self.copies is not None:
            torch.cuda.synchronize()
        for row, before in seen.items():
            assert torch.equal(self.memory[row].cpu(), before), "a row that is computed with has changed"
        for target in range(layer + 1, min(layer + self.parts, SHAPE.layers)):
            self.check_list(target)

    def poison(self) -> None:
        """Spoil all rows that no event may read: staging, and those for predictions but for what is on its way."""
        now, targets = self.state.stop.item(), self.state.target.tolist()
        mine = [
            row for part, target in enumerate(targets) if target >= now for row in self.state.queued_row[part].tolist()
        ]
        rows = [*self.staging_rows, *self.state.prefetch_row.flatten().tolist()]
        for row in set(rows) - set(mine):
            self.memory[row] = POISON

    def agrees_with_the_host(self, layer: int, index: Any) -> None:
        """Predictions change nothing in who is loaded, who leaves and who sits where."""
        real = index[(index >= 0) & (index < SHAPE.experts)]
        experts, counts = np.unique(real, return_counts=True)
        missing = 0
        if len(experts):
            missing = self.host.route(layer, experts.astype(np.int32), counts.astype(np.int32), self.tokens)
        assert self.plan.out.missing.item() == missing
        np.testing.assert_array_equal(self.plan.out.loads[:missing].cpu().numpy(), self.host.table.loads[:missing])
        np.testing.assert_array_equal(self.table.table.slot_of.cpu().numpy(), self.host.table.slot_of)

    def expect(self, layer: int, held: Any) -> None:
        """CounterDelta by hand what came of the predictions."""
        half, missing = layer % self.parts, self.plan.out.missing.item()
        wanted = self.plan.out.loads[:missing, 0].tolist()
        claims = self.ahead.job_queued[:missing].tolist()
        rows = self.plan.out.job_row[:missing].tolist()
        valid = self.state.target[half].item() == self.state.stop.item()
        for place, expert in enumerate(self.state.queued_expert[half].tolist() if valid else []):
            copied, total = self.copied(layer, place)
            if expert < 0 or not copied:
                assert place not in claims
                continue
            kind = 2 if expert not in wanted else int(copied < total)
            self.expected[kind] += 1
            self.expected[3 + kind] += min(copied * PREFETCH.block, WORDS[layer]) * 8
            assert (kind < 2) == (place in claims)
            if kind < 2:
                assert rows[claims.index(place)] == held[half][place]
                assert wanted[claims.index(place)] == expert
                self.claimed += 1
        assert valid or set(claims) <= {-1}
        np.testing.assert_array_equal(self.state.tallies.cpu().numpy(), self.expected)

    def copied(self, layer: int, place: int) -> tuple[int, int]:
        """How many blocks of a prediction have come, and how many there are."""
        total = -(-WORDS[layer] // PREFETCH.block)
        done = self.state.progress[layer % self.parts].tolist()
        numbers = range(place * total, (place + 1) * total)
        return sum(number < done[number % PREFETCH.programs] for number in numbers), total

    def look(self, layer: int, index: Any) -> None:
        """Every pair and every resident has its bytes, and no row is anybody else's."""
        for expert, row in zip(index.tolist(), self.plan.out.pair_row.tolist(), strict=True):
            assert (row >= 0) == (0 <= expert < SHAPE.experts)
            if row >= 0:
                assert torch.equal(self.row(layer, row), self.bytes_of(layer, expert)), (layer, expert)
        for (where, expert), slot in np.ndenumerate(self.table.table.slot_of.cpu().numpy()):
            if slot >= 0:
                assert torch.equal(self.row(where, int(self.row_of[slot])), self.bytes_of(where, expert))
        own = sorted(self.row_of.tolist() + self.state.prefetch_row.flatten().tolist())
        assert own == sorted({*range(len(self.memory))} - {*self.staging_rows})

    def check_list(self, target: int) -> None:
        """Those picked are no residents, differ, and go to the target's part."""
        part = target % self.parts
        length = self.state.length[part].item()
        picked = self.state.queued_expert[part].tolist()
        assert len(set(picked[:length])) == length <= self.state.max_queued[target].item()
        assert set(picked[length:]) <= {-1}
        assert (self.host.table.slot_of[target, picked[:length]] < 0).all()
        assert self.state.queued_row[part].tolist()[:length] == self.state.prefetch_row[part].tolist()[:length]


def said_of(rng: Any, index: Any, kind: str) -> Any:
    """What a router names beforehand: those that will be chosen, none of them, any, or some of each."""
    rows = []
    for row in index:
        right, others = rng.permutation(row), rng.permutation(np.setdiff1d(np.arange(SHAPE.experts), row))
        if kind == "oracle":
            named = np.concatenate([right, others[:3]])
        elif kind == "wrong":
            named = others[:6]
        elif kind == "mixed":
            named = np.stack([right, others[:3]], axis=1).reshape(-1)
        else:
            named = rng.integers(-1, SHAPE.experts + 2, 6)  # repetitions, and some who do not exist
        rows.append(named)
    return np.array(rows)


def scores_of(said: Any) -> Any:
    """Scores that name the same: who is named first has the highest, and who is not cannot be chosen."""
    scores = torch.full((len(said), SHAPE.experts), float("-inf"), dtype=torch.float32)
    for row, named in zip(scores, said.tolist(), strict=True):
        for place, expert in reversed(list(enumerate(named))):
            if 0 <= expert < SHAPE.experts:
                row[expert] = 8 - place
    return scores.to(DEVICE)


def events_of(rng: Any, tokens: int, kind: str) -> list[Event]:
    found = []
    for _ in range(SHAPE.layers):
        index = np.array([rng.choice(SHAPE.experts, SHAPE.top_k, replace=False) for _ in range(tokens)])
        found.append(Event(index, tuple(said_of(rng, index, kind) for _ in range(DISTANCES))))
    return found


def stop_at_random(monkeypatch: Any, seed: int = 0, probability: float = 0.3) -> None:
    """Have every program of a list stop when it likes, as parallel ones do."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(kernels, "_is_over", lambda _, epoch: epoch * 0 + int(rng.random() < probability) > 0)


def stop_after(monkeypatch: Any, asked: int) -> None:
    """Stop a list once it has asked so many times whether to go on; each program does before and after every block."""
    left = [asked]

    def is_over(stop: Any, epoch: Any) -> Any:
        left[0] -= 1
        return epoch * 0 + int(left[0] < 0) > 0

    monkeypatch.setattr(kernels, "_is_over", is_over)


@pytest.mark.parametrize("begins", ["after", "before"])
@pytest.mark.parametrize("kind", ["oracle", "wrong", "random"])
def test_pairs_find_their_bytes(kind: str, begins: str) -> None:
    machine = Machine(seed=1)
    machine.state.max_queued.fill_(PER_PART)
    for _ in range(4):
        machine.run(events_of(machine.rng, 1, kind), begins)
    found = machine.ahead.tallies()
    if begins == "before":
        assert found == PrefetchCounts()
    else:
        assert (found.in_time > 0) == (kind != "wrong")
        assert found.late == 0
    assert (machine.exchanged > 0) == (found.in_time > 0)


@interpreted
@pytest.mark.parametrize(("kind", "tokens", "spec"), [
    ("oracle", 1, "lru"), ("mixed", 1, "lfu:admit=score"), ("oracle", 3, "lru"), ("mixed", 4, "blend"),
])  # fmt: skip
def test_pairs_find_their_bytes_wherever_the_predictions_stop(
    monkeypatch: pytest.MonkeyPatch, kind: str, tokens: int, spec: str
) -> None:
    """With and without a slot alike: with more tokens more are staged than have slots."""
    stop_at_random(monkeypatch, tokens)
    machine = Machine(tokens, 5 if tokens == 1 else 4, spec, seed=tokens)
    machine.state.max_queued.fill_(PER_PART)
    for _ in range(5):
        machine.run(events_of(machine.rng, tokens, kind))
    assert machine.ahead.tallies().late > 2
    assert machine.claimed > machine.exchanged > 0 if spec != "lru" or tokens > 1 else machine.exchanged > 0


@pytest.mark.skipif(not CUDA, reason="needs two streams")
@pytest.mark.parametrize("tokens", [1, 4])
def test_pairs_find_their_bytes_in_a_race(tokens: int) -> None:
    """The event begins while its predictions are on their way, on another stream."""
    machine = Machine(tokens, seed=tokens)
    for _ in range(100):
        machine.run(events_of(machine.rng, tokens, "mixed"), "meanwhile")
    assert machine.claimed > 0


@interpreted
def test_what_an_event_evicts_of_its_own_computes_beside_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of its successor is of staging, or of a prediction: no two share one, and all pairs find their bytes."""
    monkeypatch.setattr(support, "LATE_HAS_RUN", True)
    stop_at_random(monkeypatch, 3)
    machine = Machine(2, 5, "lfu:admit=late", seed=3)
    machine.state.max_queued.fill_(PER_PART)
    first, evicted = machine.staging_rows, 0
    for _ in range(8):
        uses = machine.rng.integers(0, 6, machine.host.state.uses.shape).astype(np.float64)
        machine.host.state.uses[...] = uses
        machine.table.state.uses.copy_(torch.from_numpy(uses))
        machine.run(events_of(machine.rng, 2, "mixed"))
        evicted += len(set(machine.staging_rows) - set(first))
    assert evicted > 0
    assert machine.exchanged > 0


@interpreted
def test_a_prediction_is_fetched_from_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every number of blocks: those that came are not fetched again, and all others are."""
    machine = Machine(distances=1)
    machine.state.max_queued.fill_(2)
    events = events_of(machine.rng, 1, "oracle")[:2]
    blocks, seen = 2 * machine.copied(1, 0)[1], set()
    for asked in range(0, blocks + PREFETCH.programs + 1, 2):
        machine = Machine(distances=1)
        machine.state.max_queued.fill_(2)
        machine.state.stop.add_(1)
        machine.serve(0, events[0].index)
        with monkeypatch.context() as patch:
            stop_after(patch, asked)
            machine.predict(0, [events[1].said[0]])
        copied = sum(machine.copied(1, place)[0] for place in range(2))
        seen.add(copied)
        rows = machine.state.queued_row[1, :2].tolist()
        came = {row: (machine.memory[row] != POISON).nonzero().numel() for row in rows}
        assert sum(came.values()) == copied * PREFETCH.block * 8
        marked = {row: torch.where(machine.memory[row] != POISON, 0, POISON) for row in rows}
        experts = machine.state.queued_expert[1, :2].tolist()
        for row in rows:
            machine.memory[row] = marked[row]
        machine.state.stop.add_(1)
        index = torch.from_numpy(events[1].index).reshape(-1)
        machine.plan(1, index)
        machine.begin(1, index)
        for row, expert in zip(rows, experts, strict=True):
            if came[row]:
                goes_on = torch.where(marked[row] == 0, 0, machine.bytes_of(1, expert))
                assert torch.equal(machine.row(1, row), goes_on)
    assert {0, blocks} < seen
    assert len(seen) > blocks // 3


def test_what_was_predicted_for_one_pass_is_nothing_to_the_next() -> None:
    """Layer 0 shares its part with layer 3 of the pass before."""
    machine = Machine()
    events = events_of(machine.rng, 1, "oracle")
    machine.run(events)
    picked = machine.state.queued_expert[0, 0].item()
    assert picked >= 0
    before = machine.ahead.tallies()
    machine.state.stop.add_(1)
    others = [e for e in range(SHAPE.experts) if machine.host.table.slot_of[0, e] < 0 and e != picked]
    machine.serve(0, np.array([[picked, *others[:2]]]))
    missing = machine.plan.out.missing.item()
    assert machine.ahead.job_queued.tolist()[:missing] == [-1] * missing
    assert machine.ahead.tallies() == before


def test_an_event_of_sentinels_alone_changes_nothing() -> None:
    machine = Machine()
    machine.run(events_of(machine.rng, 1, "oracle"))
    names = ("prefetch_row", "own", "shared", "max_queued", "tallies")
    before = [getattr(machine.state, name).clone() for name in names]
    machine.run([event._replace(index=np.full((1, 3), SHAPE.experts)) for event in events_of(machine.rng, 1, "oracle")])
    for name, tensor in zip(names, before, strict=True):
        assert torch.equal(getattr(machine.state, name), tensor), name


def test_nothing_is_sent_while_switched_off() -> None:
    """But whom the routers name is learnt from all the same."""
    machine = Machine()
    machine.state.max_queued.fill_(0)
    for _ in range(2):
        machine.run(events_of(machine.rng, 1, "oracle"))
        assert machine.state.length.tolist() == [0] * PARTS
    assert machine.ahead.tallies() == PrefetchCounts()
    assert machine.state.own[0, 0, 1:, :, 1].min().item() == 2
    machine.state.max_queued.fill_(PER_PART)
    machine.run(events_of(machine.rng, 1, "oracle"))
    assert machine.ahead.tallies().in_time > 0


def test_a_list_goes_on_when_its_layer_comes_nearer() -> None:
    """What has started stays first; the rest makes way for what is predicted now."""
    machine = Machine()
    events = events_of(machine.rng, 1, "oracle")
    machine.state.stop.add_(1)
    machine.serve(0, events[0].index)
    machine.predict(0, [events[1].said[0], events[2].said[1]])
    part = 2 % PARTS
    before = machine.state.queued_expert[part].tolist()
    set_out = [who for place, who in enumerate(before) if who >= 0 and machine.copied(2, place)[0]]
    assert len(set_out) == machine.state.length[part].item() > 1
    progress = machine.state.progress[part].clone()
    machine.state.max_queued[2] = len(set_out) + 1
    machine.state.stop.add_(1)
    machine.serve(1, events[1].index)
    others = np.setdiff1d(np.arange(SHAPE.experts), set_out)[:4]
    machine.predict(1, [np.array([[*others, *set_out[:2]]]), events[3].said[1]])
    after = machine.state.queued_expert[part].tolist()
    assert after[: len(set_out)] == set_out
    assert set(after[len(set_out) :]) <= {*others.tolist(), -1}
    assert (machine.state.progress[part] >= progress).all()


def queued_after(rules: dict[str, Any], first: int = 0) -> tuple[Machine, list[list[int]]]:
    """What is queued for each layer after one event, whose routers ahead name six experts each."""
    machine = Machine(seed=3, **rules)
    slot_of = torch.full((SHAPE.layers, SHAPE.experts), -1, dtype=torch.int32, device=DEVICE)
    machine.state.stop.add_(1)
    machine.begin(first, torch.full((3,), SHAPE.experts, device=DEVICE), slot_of)
    named = np.arange(6)
    machine.ahead.pick(first, [scores_of(named[None] + ahead) for ahead in range(machine.ahead.targets(first))])
    now, found = machine.state.stop.item(), []
    for target in range(SHAPE.layers):
        part = target % (machine.state.distances + 1)
        mine = machine.state.target[part].item() == now + target - first
        queued = machine.state.queued_expert[part].tolist() if mine else []
        found.append([expert for expert in queued if expert >= 0])
    return machine, found


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({}, [[], [0, 1, 2], [1, 2, 3], []]),
        ({"rows": 6}, [[], [0, 1], [1, 2], []]),
        ({"distances": 1}, [[], [0, 1, 2], [], []]),
        ({"distances": 3, "rows": 4}, [[], [0], [1], [2]]),
        ({"max_ranks": 2}, [[], [0, 1], [1, 2], []]),
        ({"min_probability": 0.5}, [[], [0, 1, 2], [1, 2, 3], []]),
        ({"min_probability": 0.51}, [[], [], [], []]),  # a rank begins at 0.5
    ],
    ids=str,
)
def test_the_device_follows_its_plan(rules: dict[str, Any], expected: list[list[int]]) -> None:
    machine, queued = queued_after(rules)
    assert queued == expected
    assert machine.state.ranked.shape[2] == rules.get("max_ranks", 6)


def test_after_the_last_layer_the_device_prefetches_nothing() -> None:
    assert queued_after({}, first=SHAPE.layers - 1)[1] == [[], [], [], []]


def test_constants_are_those_of_the_host() -> None:
    assert (kernels.OWN_WEIGHT, kernels.ALL_WEIGHT, kernels.RANK_START) == (
        gate.OWN_WEIGHT,
        gate.ALL_WEIGHT,
        gate.RANK_START,
    )
    assert kernels.MAX_TRIALS == _learnt.MAX_TRIALS


@pytest.mark.parametrize("tokens", [1, 3])
def test_ranks_are_learnt_as_by_the_gate_on_the_host(tokens: int) -> None:
    """Counts, probabilities and the choice, also of several tokens, whose lists are merged by votes."""
    machine, state = Machine(tokens, seed=7, distances=1), gate.Gate().start(SHAPE)
    machine.state.max_queued.fill_(PER_PART)
    machine.state.own[0, tokens > 1, :, :, 1] = 8191  # soon half is forgotten
    machine.state.own[0, tokens > 1, :, ::2, 0] = 5000
    state.own_cells[int(tokens > 1), 0, :, :6] = machine.state.own[0, int(tokens > 1)].cpu().double()
    slots, several, compared = machine.host.table.slot_of, int(tokens > 1), 0
    for kind in ("mixed", "oracle", "wrong"):
        events = events_of(machine.rng, tokens, kind)
        machine.plan.out.step.add_(1)
        for layer, event in enumerate(events):
            machine.state.stop.add_(1)
            machine.serve(layer, event.index)
            experts, counts = np.unique(event.index, return_counts=True)
            said = events[layer + 1].said[0].astype(np.int16)[:, None] if layer + 1 < len(events) else None
            none = np.full((1, 6), -1, np.int16)
            merged = none if said is None else said[0] if tokens == 1 else rank_by_votes(said, SHAPE.experts)
            seen = Seen(
                layer, experts.astype(np.int32), counts.astype(np.int32), tokens, int(Phase.DECODE), 0, -1, merged
            )
            gate.observe(state, seen)
            machine.predict(layer, [] if said is None else [said[:, 0]])
            if said is None:
                continue
            half = (layer + 1) % 2
            assert machine.state.ranked[half, 0].tolist() == merged[0].tolist()
            probability = [gate.expected(state, several, 0, layer + 1, rank, 0.0) for rank in range(6)]
            picked = sorted(
                (r for r in range(6) if probability[r] >= 0.3), key=lambda r: (-np.float32(probability[r]), r)
            )
            picked = [e for e in merged[0, picked].tolist() if e >= 0 and slots[layer + 1, e] < 0]
            most = machine.state.max_queued[layer + 1].item()
            assert machine.state.queued_expert[half, : machine.state.length[half]].tolist() == picked[:most]
            compared += len(picked[:most])
    kept = int(several)
    np.testing.assert_allclose(machine.state.own[0, kept, 1:].cpu(), state.own_cells[kept, 0, 1:, :6])
    np.testing.assert_allclose(machine.state.shared[0, kept].cpu(), state.all_cells[kept, 0, :6])
    assert compared > 6


def test_probabilities_approach_how_often_a_rank_is_right() -> None:
    """Ranks that are mostly wrong are not sent any more."""
    machine, share = Machine(distances=1), np.array([0.9, 0.6, 0.5, 0.1, 0.05, 0.0])
    state, out = machine.state, machine.plan.out
    slot_of = torch.full((SHAPE.layers, SHAPE.experts), -1, dtype=torch.int32, device=DEVICE)
    state.max_queued.fill_(PER_PART)
    none = torch.full((3,), SHAPE.experts, device=DEVICE)
    assert isinstance(out, Outputs)
    for trial in range(80 if not CUDA else 800):
        said = machine.rng.permutation(SHAPE.experts)[:6]
        state.stop.add_(1)
        machine.begin(0, none, slot_of)
        state.max_queued.fill_(PER_PART * int(trial % 40 == 39))  # sending takes time
        machine.ahead.pick(0, [scores_of(said[None])])
        machine.ahead.send(0)
        hits = said[machine.rng.random(6) < share][:3]
        index = np.concatenate([hits, np.full(3 - len(hits), SHAPE.experts)])
        if not len(hits):
            index[0] = np.setdiff1d(np.arange(SHAPE.experts), said)[0]
        state.stop.add_(1)
        machine.begin(1, torch.from_numpy(index).to(DEVICE), slot_of)
        if trial % 40 == 39:
            assert set(state.queued_expert[1].tolist()) <= {*said[:3].tolist(), -1} or trial < 40
    cells = state.own[0, 0, 1].cpu().numpy()
    assert (cells[:, 1] == trial + 1).all()
    np.testing.assert_allclose(cells[:3, 0] / cells[:3, 1], [0.9, 0.6, 0.47], atol=0.15)
    assert (cells[3:, 0] / cells[3:, 1] < 0.2).all()


def test_what_does_not_fit_is_refused() -> None:
    machine = Machine()
    with pytest.raises(ValueError, match="two rows"):
        PrefetchState.of([3], 4, 14, plan_prefetch("device", SHAPE, rows=1), DEVICE)
    with pytest.raises(ValueError, match="side by side"):
        machine.ahead.pick(0, [torch.zeros((1, 7), device=DEVICE)] * DISTANCES)
    with pytest.raises(ValueError, match="does not go with"):
        Gather(machine.source, machine.memory, SLOT, USED, machine.row_of, DEMAND, Work(8, 7, 1))
    gather = Gather(
        machine.source, machine.memory, SLOT, USED, torch.from_numpy(machine.host_row_of), DEMAND, Work(8, 8, 1)
    )
    with pytest.raises(ValueError, match="does not go with the state"):
        DevicePrefetch(machine.state, machine.ahead.plan, gather, tokens=1, top_k=3)

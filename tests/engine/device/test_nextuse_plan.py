"""`nextuse` on the device: the same loads, victims and learning as on the host, in steps of one to eight requests."""

from __future__ import annotations

import os
from itertools import count, cycle

import numpy as np
import pytest

torch = pytest.importorskip("torch")
CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are defined
triton = pytest.importorskip("triton")

from plan_twins import DEVICE, Twins  # noqa: E402

from hotset import reference  # noqa: E402
from hotset.cache.controller import Controller  # noqa: E402
from hotset.cache.plan import Scope, SlotPlan  # noqa: E402
from hotset.engine import support  # noqa: E402
from hotset.engine.device.plan import Plan, plan_event  # noqa: E402
from hotset.engine.device.table import DeviceTable  # noqa: E402
from hotset.engine.support import DeviceSupport  # noqa: E402
from hotset.policies import parse  # noqa: E402
from hotset.policies.nextuse import SIGNATURES  # noqa: E402
from hotset.shape import ModelShape  # noqa: E402
from hotset.trace import Phase  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not CUDA and isinstance(plan_event, triton.JITFunction), reason="the interpreter came too late"),
    pytest.mark.filterwarnings("ignore"),  # the interpreter's numpy warns of infinities
]
LONG = 20 if CUDA else 1
SMALL = ModelShape(3, 20, 3)  # rows of 20 experts are padded to 24, and vectors to 32


@pytest.fixture(autouse=True)
def _late(monkeypatch):
    monkeypatch.setattr(support, "LATE_HAS_RUN", True)


@pytest.fixture(scope="module")
def italian():
    return reference.trace("it")


class Speakers:
    """Requests that each have habits, go round in them with slips, and are exchanged for others now and then."""

    def __init__(self, shape, tokens, *, seed=0, sentinels=0.0):
        self.shape, self.rng, self.sentinels = shape, np.random.default_rng(seed), sentinels
        self.numbers = count()
        self.requests = [next(self.numbers) for _ in range(tokens)]
        self.habits = [self.habit() for _ in range(tokens)]
        self.at = 0

    def habit(self):
        """Of a few steps, what each layer chooses."""
        return [[self.choice() for _ in range(self.shape.layers)] for _ in range(4)]

    def choice(self):
        return self.rng.choice(self.shape.experts, self.shape.top_k, replace=False)

    def step(self):
        """The events of one step."""
        self.at += 1
        if self.at % 7 == 0:
            one = int(self.rng.integers(len(self.requests)))
            self.requests[one], self.habits[one] = next(self.numbers), self.habit()
        requests = np.array(self.requests, np.int32)
        for layer in range(self.shape.layers):
            rows = [habit[self.at % 4][layer] if self.rng.random() < 0.7 else self.choice() for habit in self.habits]
            index = np.stack(rows)
            index[self.rng.random(len(index)) < self.sentinels] = self.shape.experts  # tokens that pass it by
            yield layer, index.reshape(-1), requests

    def steps(self, passes):
        for _ in range(passes):
            yield from self.step()


def prompt(speakers, tokens):
    """Of every request a prompt on the host, then a few steps."""

    def serve(host):
        for at, request in enumerate(speakers.requests):
            chosen = np.stack([[speakers.choice() for _ in range(SMALL.layers)] for _ in range(tokens)]).astype(
                np.int32
            )
            for layer in range(SMALL.layers):
                routes = np.ascontiguousarray(chosen[:, layer])
                experts, counts = np.unique(routes, return_counts=True)
                requests = np.full(tokens, request, np.int32)
                host.route(
                    layer,
                    experts.astype(np.int32),
                    counts.astype(np.int32),
                    tokens,
                    Phase.PREFILL,
                    at,
                    routes,
                    requests,
                )
        for layer, index, requests in speakers.steps(6):
            routes = index.reshape(len(requests), -1).astype(np.int32)
            experts, counts = np.unique(routes, return_counts=True)
            host.route(
                layer, experts.astype(np.int32), counts.astype(np.int32), len(routes), Phase.DECODE, 0, routes, requests
            )

    return serve


@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_the_device_learns_what_the_host_learns(tokens):
    """From a state that the host has left after prompts; requests end and others begin meanwhile."""
    speakers = Speakers(SMALL, tokens, seed=tokens)
    staging = min(tokens * SMALL.top_k, SMALL.experts)
    twins = Twins(
        SMALL, 6 * SMALL.layers, "nextuse", tokens * SMALL.top_k, staging=staging, prepare=prompt(speakers, 70)
    )
    twins.run(speakers.steps(max(24 // tokens, 4) * LONG))
    assert twins.evicted > 0
    assert twins.host.state.learnt.sum() > 0
    assert twins.host.state.features[:, :, 12:].any()  # recalled


@pytest.mark.parametrize("admit", ["late", "score"])
def test_from_nothing_and_with_tokens_that_pass_layers_by(admit):
    speakers = Speakers(SMALL, 3, seed=5, sentinels=0.3)
    staging = 9 if admit == "late" else 0
    twins = Twins(SMALL, 5 * SMALL.layers, f"nextuse:admit={admit},passes=20,streams=4,depth=2", 9, staging=staging)
    twins.run(speakers.steps(12 * LONG))
    assert twins.evicted > 0
    assert len(set(twins.host.state.owner.tolist())) == 4


def test_tokens_that_choose_experts_without_weights_as_well():
    """Such have numbers past those of the layer; neither side looks at which of them it was."""
    speakers, rng = Speakers(SMALL, 1, seed=11), np.random.default_rng(11)
    twins = Twins(SMALL, 5 * SMALL.layers, "nextuse:streams=1,depth=1", 3, staging=3)

    def mixed(steps):
        for layer, index, requests in steps:
            yield layer, np.where(rng.random(len(index)) < 0.3, SMALL.experts + index % 3, index), requests

    twins.run(mixed(speakers.steps(4 * LONG)))
    assert twins.host.state.learnt[:, -SIGNATURES:].any()


@pytest.mark.parametrize("streams", [1, 4, 8])
def test_a_recorded_workload_is_planned_as_on_the_host(italian, streams):
    """Answers of the reference model side by side, after 100 steps of them on the host."""
    shape = italian.shape
    chosen = italian.experts[italian.phase == Phase.DECODE]
    each = len(chosen) // streams
    rows = np.stack([chosen[s * each : (s + 1) * each] for s in range(streams)], axis=1)  # [steps, streams, layers, k]
    requests = np.arange(streams, dtype=np.int32)

    def past(host):
        for row in rows[:100]:
            for layer in range(shape.layers):
                routes = np.ascontiguousarray(row[:, layer]).astype(np.int32)
                experts, counts = np.unique(routes, return_counts=True)
                host.route(
                    layer, experts.astype(np.int32), counts.astype(np.int32), streams, Phase.DECODE, 0, routes, requests
                )

    staging = min(streams * shape.top_k, shape.experts)
    twins = Twins(shape, 12 * shape.layers, "nextuse", streams * shape.top_k, staging=staging, prepare=past)
    passes = (4 if streams == 1 else 1) * LONG
    twins.run(
        (layer, row[:, layer].reshape(-1), requests)
        for row in rows[100 : 100 + passes]
        for layer in range(shape.layers)
    )
    assert twins.evicted > 0


def test_requests_in_turns_learn_as_on_the_host():
    """Steps of one request each: what it predicted is put right three steps later, and a stay is a third as long."""
    speakers = Speakers(SMALL, 3, seed=7)

    def turns(passes):
        for one, _ in zip(cycle(range(3)), range(passes), strict=False):
            for layer, index, requests in speakers.step():
                yield layer, index.reshape(3, -1)[one], requests[one : one + 1]

    twins = Twins(SMALL, 6 * SMALL.layers, "nextuse", SMALL.top_k, staging=SMALL.top_k)
    twins.run(turns(24 * LONG))
    assert twins.evicted > 0
    assert twins.host.state.gap.max() > 2


def test_sentinels_alone_are_no_event():
    speakers = Speakers(SMALL, 2, seed=1)
    twins = Twins(SMALL, 15, "nextuse", 6, staging=6, prepare=prompt(speakers, 5))
    before = twins.table.state.worth.clone()
    twins.run([(1, np.full(6, 20), np.array([0, 1], np.int32))])
    assert twins.plan.out.missing.item() == 0
    assert torch.equal(before, twins.table.state.worth)


def test_what_the_device_knows_goes_back_and_forth():
    speakers = Speakers(SMALL, 2, seed=2)
    twins = Twins(SMALL, 15, "nextuse", 6, staging=6, prepare=prompt(speakers, 70))
    twins.run(speakers.steps(3))
    other = Controller(twins.host.plan, twins.host.policy)
    twins.table.download(other)
    for name, mine in other.state._asdict().items():
        if name not in ("scratch", "rows"):
            np.testing.assert_array_equal(mine, getattr(twins.host.state, name), err_msg=name)
    prompt(speakers, 3)(twins.host)
    twins.table.refresh(twins.host)
    # The rows did not go along, and the host has filled slots: what lies in them is not asked.
    twins.rows = None
    twins._check_rows = lambda *_: None
    twins.run(speakers.steps(2))


def test_it_waits_for_a_gpu_and_for_streams_enough(monkeypatch):
    shape = ModelShape(2, 16, 4)
    assert DeviceSupport.check_batch(4, shape, 16, parse("nextuse:streams=4")) == []
    (told,) = DeviceSupport.check_batch(4, shape, 16, parse("nextuse:streams=3"))
    assert "follows 3 requests" in told
    assert Plan.supports(parse("nextuse"), Scope.LAYER) is None
    monkeypatch.setattr(support, "LATE_HAS_RUN", False)
    for spec in ("nextuse", "nextuse:admit=score", "lru:admit=late"):
        assert "has not been run on a GPU yet" in (Plan.supports(parse(spec), Scope.LAYER) or "")
    assert DeviceTable.upload(Controller(SlotPlan(shape, 8), parse("nextuse")), DEVICE).size_bytes > 0

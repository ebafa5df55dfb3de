"""The device plans as the host does: the same loads, the same victims, the same learning, bit for bit."""

from __future__ import annotations

import os
from itertools import product

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
from hotset.cache.table import WARM  # noqa: E402
from hotset.engine.device.plan import Plan, plan_event  # noqa: E402
from hotset.engine.device.table import DeviceTable  # noqa: E402
from hotset.errors import HotsetError  # noqa: E402
from hotset.policies import parse  # noqa: E402
from hotset.shape import ExpertKey, ModelShape  # noqa: E402
from hotset.trace import Phase  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not CUDA and isinstance(plan_event, triton.JITFunction), reason="the interpreter came too late"),
    pytest.mark.filterwarnings("ignore"),  # the interpreter's numpy warns of infinities
]
LONG = 40 if CUDA else 1  # the interpreter takes some 40 ms for an event
POLICIES = [
    "lru", "lfu", "lfu:history=off", "lfru", "slru", "slru:hint=on", "decay", "blend", "blend:transitions=off",
]  # fmt: skip
SMALL = ModelShape(3, 20, 3)  # rows of 20 experts are padded to 24, and vectors to 32


@pytest.fixture(scope="module")
def italian():
    return reference.trace("it")


def random_index(rng, shape, tokens, *, sentinels=0.0):
    """The pairs of some tokens with favourites among the experts; some name an expert that does not exist."""
    taste = np.arange(1, shape.experts + 1.0) ** -0.7
    rows = [rng.choice(shape.experts, shape.top_k, replace=False, p=taste / taste.sum()) for _ in range(tokens)]
    index = np.concatenate(rows)
    index[rng.random(len(index)) < sentinels] = shape.experts + int(rng.integers(3))
    return index


def random_events(shape, passes, tokens=1, *, seed=0, sentinels=0.0):
    rng = np.random.default_rng(seed)
    for _ in range(passes * LONG):
        for layer in range(shape.layers):
            yield layer, random_index(rng, shape, tokens, sentinels=sentinels)


def past(shape, passes, tokens=1, seed=99):
    """What brings a cache on the host into the middle of its work."""

    def serve(host):
        rng = np.random.default_rng(seed)
        for i, layer in product(range(passes), range(shape.layers)):
            experts, counts = np.unique(random_index(rng, shape, tokens), return_counts=True)
            phase = Phase.PREFILL if i == 0 else Phase.DECODE
            host.route(layer, experts.astype(np.int32), counts.astype(np.int32), tokens, phase)

    return serve


@pytest.mark.parametrize(("slots", "passes"), [(8, 2), (12, 4)])
@pytest.mark.parametrize("spec", POLICIES)
def test_a_recorded_workload_is_planned_as_on_the_host(italian, spec, slots, passes):
    """After 400 passes on the host, from the smallest budget that serves, and half as much again."""
    events = italian.events()
    first = int(np.searchsorted(events.step, 400))
    shape, tokens = italian.shape, italian.experts[italian.step >= 400]
    tokens = tokens[italian.phase[italian.step >= 400] == Phase.DECODE][: passes * LONG]
    twins = Twins(shape, slots * shape.layers, spec, 8, prepare=lambda host: host.replay(events.slice(0, first)))
    twins.run((layer, token[layer]) for token in tokens for layer in range(shape.layers))
    assert twins.evicted + twins.staged > 8 * passes


@pytest.mark.parametrize("spec", POLICIES)
def test_an_empty_cache_fills_and_then_evicts(spec):
    twins = Twins(SMALL, 5 * SMALL.layers, spec, 3)
    twins.run(random_events(SMALL, 5))
    assert 0 < twins.evicted < twins.loads


@pytest.mark.parametrize("spec", ["lfu", "slru", "blend", "lfru:admit=score"])
def test_several_tokens_share_a_pass(spec):
    """Events of more experts than there are slots, so that it matters who comes first, with pairs left out."""
    twins = Twins(SMALL, 5 * SMALL.layers + 1, spec, 12, prepare=past(SMALL, 6, tokens=8))
    twins.run(random_events(SMALL, 3, 4, sentinels=0.2))
    assert twins.evicted > 0
    assert twins.staged > 0


@pytest.mark.parametrize("admit", ["always", "score", "free"])
@pytest.mark.parametrize("spec", ["lru", "lfu", "blend"])
def test_admission_rules(spec, admit):
    twins = Twins(SMALL, 6 * SMALL.layers, f"{spec}:admit={admit}", 6, prepare=past(SMALL, 2))
    twins.run(random_events(SMALL, 3, 2, seed=5))
    assert twins.loads > 0
    assert (twins.evicted == 0) == (admit == "free")


@pytest.mark.parametrize("spec", ["lru", "slru", "blend"])
def test_pins_stay(spec):
    """A pinned expert is never evicted, whether pinned for good or for now."""

    def prepare(host):
        host.pin([ExpertKey(layer, expert) for layer in range(SMALL.layers) for expert in (19, 4)])
        past(SMALL, 6)(host)
        host.pin([ExpertKey(layer, int(np.flatnonzero(host.table.slot_of[layer] >= 0)[0])) for layer in (1, 2)], WARM)

    twins = Twins(SMALL, 6 * SMALL.layers, spec, 6, prepare=prepare)
    twins.run(random_events(SMALL, 3, 2, seed=2))
    assert twins.evicted > 0
    assert (twins.host.table.slot_of[:, [4, 19]] >= 0).all()


def test_equals_leave_by_age_and_then_by_number():
    """Counts are equal: 3 and 9 of the first event are older than 1 and 7 of the second; the lower leaves first."""
    shape = ModelShape(2, 16, 2)
    twins = Twins(shape, 8, "lfu", 2)
    twins.run([(0, [9, 3]), (0, [7, 1]), (0, [14, 2]), (0, [15, 0])])
    assert np.flatnonzero(twins.host.table.slot_of[0] >= 0).tolist() == [0, 2, 14, 15]
    assert twins.plan.out.loads[:2, 3].tolist() == [1, 7]


def test_one_layer_ranks_like_a_pool():
    """The host takes a single layer for a pool, where candidates are ranked whenever slots are scarce."""
    shape = ModelShape(1, 16, 4)
    twins = Twins(shape, 6, "lfu", 4, prepare=past(shape, 8))
    twins.run(random_events(shape, 8, seed=3))
    assert twins.evicted > 0


def test_a_layer_without_slots_stages_everything():
    shape = ModelShape(3, 16, 2)
    twins = Twins(shape, 2, "lru", 2)
    twins.run(random_events(shape, 2))
    assert twins.staged >= 4


@pytest.mark.parametrize("spec", ["slru:protected=0", "slru:protected=0.34", "slru:protected=1"])
def test_segments_of_other_sizes(spec):
    twins = Twins(SMALL, 6 * SMALL.layers, spec, 3, prepare=past(SMALL, 8))
    twins.run(random_events(SMALL, 3, seed=8))


def test_transitions_from_many_experts_to_many():
    """More than fit into one chunk of rows on either side, in rows padded from 42 to 48."""
    shape = ModelShape(2, 42, 10)
    twins = Twins(shape, 60, "blend:transitions=on", 40, prepare=past(shape, 4, tokens=6))
    assert (twins.host.state.previous[:, 0] > 16).all()
    twins.run(random_events(shape, 2, 4, seed=4))
    assert (twins.host.state.previous[:, 0] > 16).all()


def test_the_first_event_teaches_nothing():
    twins = Twins(SMALL, 15, "blend", 3)
    twins.run([(0, [5, 1, 7])])
    assert not twins.host.state.scratch[1].any()


def test_where_nearly_nothing_is_missing():
    """Everybody is resident, and the share of the transitions rests on the least churn that is believed."""

    def prepare(host):
        past(SMALL, 40, tokens=4)(host)
        host.state.churn[:] = 1e-5

    twins = Twins(SMALL, SMALL.total_experts, "blend", 3, prepare=prepare)
    twins.run(random_events(SMALL, 2))
    assert (twins.host.state.churn < 1e-3).any()


def test_many_experts_under_few_pairs():
    """Vectors of 512; a table of transitions would be large, so auto leaves it out."""
    shape = ModelShape(2, 509, 3)
    twins = Twins(shape, 24, "blend:transitions=off", 3, prepare=past(shape, 12))
    twins.run(random_events(shape, 1))


@pytest.mark.parametrize("spec", POLICIES)
def test_sentinels_alone_are_no_event(spec):
    twins = Twins(SMALL, 15, spec, 3, prepare=past(SMALL, 5))
    twins.run([(1, [20, 63, -1])])
    assert twins.plan.out.missing.item() == 0
    assert twins.plan.out.pair_row.tolist() == [-1, -1, -1]


def test_the_log_is_a_ring_of_passes():
    twins = Twins(SMALL, 15, "lru", 3, ring=2)
    events = list(random_events(SMALL, 3))[: 3 * SMALL.layers]
    twins.run(events)
    rows = np.array([index for _, index in events]).reshape(3, SMALL.layers, 3)
    np.testing.assert_array_equal(twins.plan.out.log.cpu().numpy(), rows[[2, 1]])


def test_what_the_device_knows_goes_back_and_forth():
    """Written back, it is what the host knows; and a table that is refreshed goes on from there, at its address."""
    twins = Twins(SMALL, 15, "blend", 3, prepare=past(SMALL, 3))
    twins.run(random_events(SMALL, 1))
    other = Controller(twins.host.plan, twins.host.policy)
    arrays = [*other.table, *other.state]
    twins.table.download(other)
    assert all(a is b for a, b in zip(arrays, [*other.table, *other.state], strict=True))
    for name in ("slot_of", "expert_in", "layer_in", "num_free", "resident", "last", "passes", "clock"):
        np.testing.assert_array_equal(getattr(other.table, name), getattr(twins.host.table, name))
    for mine, theirs in zip(other.state, twins.host.state, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    past(SMALL, 2, tokens=5, seed=7)(twins.host)
    where = [tensor.data_ptr() for tensor in (*twins.table.table, *twins.table.state)]
    twins.table.refresh(twins.host)
    assert where == [tensor.data_ptr() for tensor in (*twins.table.table, *twins.table.state)]
    twins.run(random_events(SMALL, 1, seed=6))


@pytest.mark.parametrize(
    ("spec", "scope", "word"),
    [
        ("static", Scope.LAYER, "host only"),
        ("lru", Scope.POOL, "shared by all layers"),
        ("decay:half_life=auto", Scope.LAYER, "eight half-lives"),
        ("lru:admit=late", Scope.LAYER, "admit=late"),
    ],
)
def test_what_is_not_supported_is_said_in_words(spec, scope, word):
    assert word in (Plan.supports(parse(spec), scope) or "")
    host = Controller(SlotPlan(SMALL, 15, scope), parse(spec))
    with pytest.raises(HotsetError, match=word):
        Plan(host, DeviceTable.upload(host, DEVICE), 3, torch.zeros(15, dtype=torch.int32), 15)


def test_what_does_not_fit_is_refused():
    host = Controller(SlotPlan(SMALL, 15), parse("lru"))
    table = DeviceTable.upload(host, DEVICE)
    with pytest.raises(HotsetError, match="129 pairs"):
        Plan(host, table, 129, torch.zeros(15, dtype=torch.int32), 15)
    host.residency.reserve(ExpertKey(0, 1))
    for way in (lambda: DeviceTable.upload(host, DEVICE), lambda: table.refresh(host)):
        with pytest.raises(HotsetError, match="on their way"):
            way()


def test_supported_policies_are_supported():
    assert [Plan.supports(parse(spec), Scope.LAYER) for spec in POLICIES] == [None] * len(POLICIES)

"""Admission `late` on the device: what the host loads and evicts, and no row that anything computes with is lost."""

from __future__ import annotations

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")
CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are defined
triton = pytest.importorskip("triton")

from plan_twins import DEVICE, Twins  # noqa: E402

from hotset.cache.controller import Controller  # noqa: E402
from hotset.cache.plan import SlotPlan  # noqa: E402
from hotset.cache.table import WARM  # noqa: E402
from hotset.engine import support  # noqa: E402
from hotset.engine.device.plan import Plan, plan_event  # noqa: E402
from hotset.engine.device.table import DeviceTable  # noqa: E402
from hotset.errors import HotsetError  # noqa: E402
from hotset.policies import parse  # noqa: E402
from hotset.shape import ExpertKey, ModelShape  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not CUDA and isinstance(plan_event, triton.JITFunction), reason="the interpreter came too late"),
    pytest.mark.filterwarnings("ignore"),  # the interpreter's numpy warns of infinities
]
LONG = 40 if CUDA else 1
SHAPE = ModelShape(2, 14, 3)
POLICIES = ["lru", "lfu", "lfru", "slru:hint=on", "decay", "blend"]


@pytest.fixture(autouse=True)
def _late(monkeypatch):
    monkeypatch.setattr(support, "LATE_HAS_RUN", True)


def events(passes, tokens, *, sentinels=0.0, seed=0):
    """Tokens with habits, which change now and then."""
    rng = np.random.default_rng(seed)
    for i in range(passes * LONG):
        if i % 12 == 0:
            taste = rng.permutation(np.arange(1, SHAPE.experts + 1.0) ** -1.2)
        for layer in range(SHAPE.layers):
            rows = [rng.choice(SHAPE.experts, SHAPE.top_k, replace=False, p=taste / taste.sum()) for _ in range(tokens)]
            index = np.concatenate(rows)
            index[rng.random(len(index)) < sentinels] = SHAPE.experts + 1
            yield layer, index


def past(host):
    """What fills the cache, and evicts from it by `late`."""
    for layer, index in events(10, 2, seed=5):
        experts, counts = np.unique(index, return_counts=True)
        host.route(layer, experts.astype(np.int32), counts.astype(np.int32), 2)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("tokens", "staging"), [(1, 3), (3, 9)])
def test_the_device_loads_and_evicts_as_the_host_does(policy, tokens, staging):
    spec = f"{policy}{',' if ':' in policy else ':'}admit=late"
    twins = Twins(SHAPE, 5 * SHAPE.layers, spec, tokens * SHAPE.top_k, prepare=past, staging=staging)
    twins.run(events(8, tokens, sentinels=0.1, seed=tokens))
    assert twins.evicted > 0


def unsettled(twins, served, seed=0):
    """The same events, between which counts change at random, equals among them: so an event evicts some of its own."""
    rng = np.random.default_rng(seed)
    for event in served:
        uses = rng.integers(0, 6, twins.host.state.uses.shape).astype(np.float64)
        twins.host.state.uses[...] = uses
        twins.table.state.uses.copy_(torch.from_numpy(uses))
        yield event


def test_an_empty_cache_fills_and_then_exchanges():
    twins = Twins(SHAPE, 4 * SHAPE.layers + 1, "lfu:admit=late", 6, staging=6)
    twins.run(unsettled(twins, events(12, 2)))
    assert twins.rows.exchanged > 0


@pytest.mark.parametrize(("tokens", "staging"), [(1, 3), (1, 4), (2, 14), (4, 12)])
def test_rows_stay_a_permutation_over_many_events(tokens, staging):
    twins = Twins(SHAPE, 5 * SHAPE.layers, "lfu:admit=late", 3 * tokens, prepare=past, staging=staging)
    twins.run(unsettled(twins, events(60, tokens, sentinels=0.05, seed=staging), staging))
    assert twins.rows.exchanged > 5


def test_pinned_experts_of_an_event_stay():
    def prepare(host):
        host.pin([ExpertKey(layer, 3) for layer in range(SHAPE.layers)])
        past(host)
        host.pin([next(key for key in host.residents() if key.expert != 3)], WARM)

    twins = Twins(SHAPE, 5 * SHAPE.layers, "lfu:admit=late", 6, prepare=prepare, staging=6)
    pins = twins.host.pins() + twins.host.pins(WARM)
    twins.run(unsettled(twins, ((layer, np.r_[index[:3], [3, 3, 3]]) for layer, index in events(20, 2, seed=3))))
    assert twins.rows.exchanged > 0
    assert set(pins) <= set(twins.host.residents())


def test_listed_rows_serve_any_admission():
    """After `late` on the host, the rows of staging lie anywhere."""
    twins = Twins(SHAPE, 5 * SHAPE.layers, "lru", 6, prepare=past, staging=6)
    twins.run(events(6, 2))
    assert twins.rows.exchanged == 0
    assert twins.evicted > 0


def test_too_few_rows_are_refused():
    host = Controller(SlotPlan(SHAPE, 10, staging=2), parse("lru:admit=late"))
    table, rows = DeviceTable.upload(host, DEVICE), torch.zeros(10, dtype=torch.int32)
    for listed in (None, rows[:2]):
        with pytest.raises(HotsetError, match="3 rows of staging"):
            Plan(host, table, 3, rows, 10, staging=listed)

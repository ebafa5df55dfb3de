"""Tokens that choose no expert of a layer are no part of its event, whoever serves it: a recording has none either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton")

import expert_samples as samples  # noqa: E402
from fake_mover import FakeMover  # noqa: E402

from hotset import policies  # noqa: E402
from hotset.cache.controller import Controller  # noqa: E402
from hotset.cache.plan import SlotPlan  # noqa: E402
from hotset.engine.arena import Arena  # noqa: E402
from hotset.engine.device.follow import Follower, count_experts  # noqa: E402
from hotset.engine.driver import StockDriver  # noqa: E402
from hotset.engine.guard import Guard  # noqa: E402
from hotset.engine.host.driver import HostDriver  # noqa: E402
from hotset.engine.host.streams import Streams  # noqa: E402
from hotset.engine.kernels.cpu import PerExpertKernels  # noqa: E402
from hotset.engine.slots import SlotCache  # noqa: E402
from hotset.engine.stats import EngineStats  # noqa: E402
from hotset.engine.step import Step  # noqa: E402
from hotset.shape import ModelShape  # noqa: E402
from hotset.store import Catalog, LayerSource  # noqa: E402
from hotset.trace import Phase, Trace  # noqa: E402

SHAPE = ModelShape(3, 10, 2)
WITHOUT = 3  # numbers of experts without weights, which routers choose as well
SAMPLE = samples.sample_of(*samples.spec_of("qwen3_moe"), torch.float32, experts=1)
CATALOG = Catalog((), tuple(LayerSource(SAMPLE.layout, [()] * SHAPE.experts) for _ in range(SHAPE.layers)))
Serve = Callable[[Step, int, Any], None]


def by_stock(cache: SlotCache, stats: EngineStats) -> Serve:
    driver = StockDriver(cache.controller, [lambda hidden, *_: hidden] * SHAPE.layers, stats, Guard(cache))
    return lambda step, layer, chosen: driven(driver, step, layer, chosen)


def by_host(cache: SlotCache, stats: EngineStats) -> Serve:
    arena = Arena.in_ram(cache.num_rows, SAMPLE.arena.slot_bytes)
    kernels = [PerExpertKernels(arena, SAMPLE.layout, SAMPLE.spec) for _ in range(SHAPE.layers)]
    driver = HostDriver(cache, FakeMover({}, cache.staging), kernels, None, CATALOG, stats, Guard(cache))
    return lambda step, layer, chosen: driven(driver, step, layer, chosen)


def driven(driver: Any, step: Step, layer: int, chosen: Any) -> None:
    hidden, weights = torch.zeros(len(chosen), SAMPLE.width), torch.zeros(chosen.shape)
    driver.serve(step, layer, hidden, torch.from_numpy(np.ascontiguousarray(chosen)), weights)


def by_follower(cache: SlotCache, stats: EngineStats) -> Serve:
    follower = Follower(cache.controller, stats, CATALOG, None, Streams(torch.device("cpu")))

    def follow(step: Step, layer: int, chosen: Any) -> None:
        rows = np.where(chosen < SHAPE.experts, chosen, -1).astype(np.int16)  # as the device logs them
        experts, counts = count_experts(rows.reshape(-1), len(rows))
        if len(experts):
            follower._serve(step, layer, experts, counts, rows, 0.0)

    return follow


@pytest.mark.parametrize("way", [by_stock, by_host, by_follower])
@pytest.mark.parametrize("policy", ["nextuse:admit=score", "blend", "eam"])
def test_a_replay_of_the_recording_learns_the_same(policy: str, way: Callable[..., Serve]) -> None:
    plan, random = SlotPlan(SHAPE, 12, staging=6), np.random.default_rng(4)
    cache = SlotCache(Controller(plan, policies.parse(policy)))
    serve, steps, absent = way(cache, EngineStats(cache.controller)), [], 0
    for number in range(60):
        phase = Phase.PREFILL if number % 20 == 0 else Phase.DECODE
        batch, length = (1, 5) if phase is Phase.PREFILL else (1 + number % 3, 1)
        step = Step(number, batch, length, phase, number // 20 * 3, driver=None)  # type: ignore[arg-type]
        chosen = np.stack([
            [random.permutation(SHAPE.experts + WITHOUT)[: SHAPE.top_k] for _ in range(SHAPE.layers)]
            for _ in range(batch * length)
        ])  # fmt: skip
        chosen[0, number % SHAPE.layers] = SHAPE.experts
        for layer in range(SHAPE.layers):
            serve(step, layer, chosen[:, layer])
        steps.append((step, np.where(chosen < SHAPE.experts, chosen, -1)))
        absent += int((steps[-1][1].max(axis=2) < 0).sum())
    sizes = [len(chosen) for _, chosen in steps]
    trace = Trace(
        SHAPE,
        np.concatenate([chosen for _, chosen in steps]).astype(np.int16),
        np.concatenate([step.requests(size) for (step, _), size in zip(steps, sizes, strict=True)]),
        np.repeat(np.arange(len(sizes)), sizes).astype(np.int32),
        np.repeat([int(step.phase) for step, _ in steps], sizes).astype(np.uint8),
    )
    again = Controller(plan, policies.parse(policy))
    again.replay(trace.events())
    assert absent > 60
    np.testing.assert_array_equal(cache.controller.table.counters, again.table.counters)
    np.testing.assert_array_equal(cache.controller.table.slot_of, again.table.slot_of)
    for name, learnt in again.state._asdict().items():
        if name not in ("scratch", "rows"):
            np.testing.assert_array_equal(getattr(cache.controller.state, name), learnt, err_msg=name)

"""How memory is split: nothing is lost, and slots are those that `hotset.load` would make."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_samples import MODEL, PRECISION, SIZE

from hotset.analysis.planner.model import slot_bytes
from hotset.analysis.planner.rates import Engine
from hotset.analysis.planner.shapes import parse_shape
from hotset.analysis.planner.tiers import Memory, bytes_for, expert_room, least_bytes, slots_for, split
from hotset.cache.plan import Scope
from hotset.errors import BudgetError, HotsetError
from hotset.models.budget import plan_slots
from hotset.prefetch import Driver, prefetch_rows
from hotset.shape import Budget, ModelShape

SHAPES = (ModelShape(2, 4, 2, 4096), ModelShape(24, 32, 4, 13 << 20), ModelShape(48, 128, 8, 9 << 20))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("engine", Engine)
def test_slots_are_those_of_a_load(shape: ModelShape, engine: Engine) -> None:
    size = shape.expert_bytes or 0
    device = engine is Engine.DEVICE
    for rows in (1, 2, shape.layers, shape.layers + 1, shape.layers + 5, shape.total_experts // 3,
                 shape.total_experts - 1, shape.total_experts + 3, 2 * shape.total_experts):  # fmt: skip
        found = slots_for(rows * size + 17, shape, size, engine)
        try:
            plan = plan_slots(
                Budget(size_bytes=rows * size + 17), shape, scope=Scope.LAYER, staging=None, free_bytes=0,
                on_gpu=engine is not Engine.CPU, by_device=device,
                prefetch_rows=prefetch_rows(Driver.DEVICE if device else Driver.HOST, shape),
            )  # fmt: skip
        except BudgetError:
            assert found is None
            continue
        assert found == (plan.slots, plan.staging + plan.prefetch_rows)


@pytest.mark.parametrize("gpu_bytes", [None, MODEL.rest_bytes + 6 * SIZE, MODEL.rest_bytes + 20 * SIZE])
@pytest.mark.parametrize("ram_bytes", [MODEL.rest_bytes + 6 * SIZE, 1 << 30])
def test_tiers_add_up_to_what_was_given(ram_bytes: int, gpu_bytes: int | None) -> None:
    memory = Memory(ram_bytes, gpu_bytes)
    found = split(MODEL, PRECISION, memory)
    if found is None:  # RAM of six experts is too small behind a GPU
        assert gpu_bytes is not None
        return
    assert found.rest_bytes + found.fast_bytes + found.unused_bytes == memory.fast_bytes
    assert found.unused_bytes >= 0
    assert found.ram_bytes <= memory.ram_bytes
    held = max(found.slots, found.ram_slots) * SIZE
    assert held + found.disk_bytes == MODEL.shape.total_experts * SIZE


def test_least_memory_is_the_least() -> None:
    least = least_bytes(MODEL, PRECISION)
    assert split(MODEL, PRECISION, Memory(least)) is not None
    assert split(MODEL, PRECISION, Memory(least - SIZE)) is None
    for slots in (2, 4, 7, 8):
        needed = bytes_for(MODEL, PRECISION, slots, Engine.CPU)
        found, less = (split(MODEL, PRECISION, Memory(size)) for size in (needed, needed - SIZE))
        assert found is not None
        assert found.slots >= slots
        assert less is None or less.slots < slots
        assert expert_room(MODEL, needed) >= found.fast_bytes


def test_a_gpu_that_ram_does_not_stand_behind_is_driven_by_the_host() -> None:
    model = parse_shape("layers=4,experts=16,top_k=2,hidden=256,intermediate=256", 512)
    precision = model.precisions()[0]
    small, large = (
        split(model, precision, Memory(ram, model.rest_bytes + 20 * precision.expert_bytes))
        for ram in (30 * precision.expert_bytes, 1 << 30)
    )
    assert small is not None
    assert large is not None
    assert (small.engine, large.engine) == (Engine.HOST, Engine.DEVICE)
    assert small.is_short_of_ram
    assert not large.is_short_of_ram


def test_precisions_follow_from_the_checkpoints() -> None:
    plain = parse_shape("layers=4,experts=16,top_k=2,hidden=256,intermediate=256", 512)
    assert [each.name for each in plain.precisions()] == ["bfloat16", "int8", "int4", "mxfp4"]
    sizes = [each.expert_bytes for each in plain.precisions()]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 3 * 256 * 256 * 2
    gpt_oss = parse_shape("gpt-oss-20b", 512)
    assert [(each.name, each.expand) for each in gpt_oss.precisions()] == [("mxfp4", False), ("bfloat16", True)]
    assert [each.name for each in replace(plain, packed=True).precisions()] == ["bfloat16"]
    odd = parse_shape("layers=4,experts=16,top_k=2,hidden=40,intermediate=24", 512)
    assert [each.name for each in odd.precisions()] == ["bfloat16"]  # no whole groups of 32
    with pytest.raises(HotsetError, match="not known"):
        slot_bytes(((64, 64),), "q5")

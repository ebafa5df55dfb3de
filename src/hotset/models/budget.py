"""Turns the budget that a person asked for into slots, with memory left for everything else a model needs."""

from __future__ import annotations

from collections.abc import Sequence

from hotset.cache.plan import Scope, SlotPlan
from hotset.errors import BudgetError
from hotset.models.layers import MoeLayer
from hotset.options.run import AUTO
from hotset.shape import Budget, ModelShape, format_size
from hotset.store import Catalog

SAFETY = 0.05
"""The share of what is left for experts that `auto` leaves to others and to what no account covers."""


def shape_of(moe_layers: Sequence[MoeLayer], catalog: Catalog) -> ModelShape:
    """The model's shape; layers may differ, and the largest counts."""
    return ModelShape(
        layers=len(moe_layers),
        experts=max(moe_layer.experts for moe_layer in moe_layers),
        top_k=max(moe_layer.top_k for moe_layer in moe_layers),
        expert_bytes=catalog.slot_bytes,
    )


def default_staging(shape: ModelShape, on_gpu: bool, by_device: bool = False) -> int:
    """Slots that experts only pass through: enough to keep the disk busy, or the link while others compute.

    Where the device may drive, all that a token asks for must find a place.
    """
    return max(2, shape.top_k if by_device else min(shape.top_k, 8 if on_gpu else 4))


def plan_slots(
    memory: str | Budget,
    shape: ModelShape,
    *,
    scope: Scope,
    staging: int | None,
    free_bytes: int,
    on_gpu: bool = False,
    by_device: bool = False,
    prefetch_rows: int = 0,
) -> SlotPlan:
    """The slots for a budget; a budget in bytes pays for the staging and for prefetch, too."""
    staged = default_staging(shape, on_gpu, by_device) if staging is None else staging
    if staged < 1:
        raise BudgetError("staging needs at least one slot: experts that find no place in the cache pass through it")
    if memory == AUTO:
        budget = Budget(size_bytes=max(int(free_bytes * (1 - SAFETY)), 0))
    else:
        budget = memory if isinstance(memory, Budget) else Budget.parse(memory)
    least = least_slots(shape, scope)
    if budget.size_bytes is not None:
        if staging is None:  # less where the budget is so tight that staging would eat the cache
            staged = max(1, min(staged, budget.size_bytes // (shape.expert_bytes or 1) - least))
        # No more rows for prefetch than a sixteenth of the cache, which would lose more by it.
        slots = budget.slots_for(shape, staged)
        prefetch_rows = max(min(prefetch_rows, slots // 16, slots - least), 0) if slots < shape.total_experts else 0
    slots = budget.slots_for(shape, staged + prefetch_rows)
    if slots >= shape.total_experts:
        prefetch_rows = 0  # nothing is ever missing
    if slots < least:
        raise BudgetError(
            f"{budget} holds {slots} of {shape.total_experts} experts beside {staged} for staging; the smallest budget "
            f"that works is {least} slots, or {format_size((least + 1) * (shape.expert_bytes or 0))}"
            + (
                " (memory is short: close other programs, pass a smaller --context, or use a machine with more)"
                if memory == AUTO
                else ""
            )
        )
    return SlotPlan(shape, slots, scope, staged, prefetch_rows)


def least_slots(shape: ModelShape, scope: Scope) -> int:
    """The fewest slots with which every layer can cache at all."""
    return max(shape.layers, shape.top_k) if scope is Scope.LAYER else shape.top_k

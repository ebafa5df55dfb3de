"""What memory is free, and what of it everything but the experts will take."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hotset.cache.controller import Controller
from hotset.cache.plan import Scope, SlotPlan
from hotset.engine.kernels import cpu, grouped
from hotset.engine.memory import available_memory_bytes, keep_large_blocks_apart, memory_limit_bytes
from hotset.errors import BudgetError
from hotset.formats import parse as parse_format
from hotset.models.footprint import Footprint
from hotset.models.static_caches import length_for
from hotset.policies import parse
from hotset.prefetch import Driver, prefetch_rows
from hotset.shape import Budget, ModelShape, format_size
from hotset.store import Catalog
from hotset.store.layout import ITEM_BYTES
from hotset.trace import Phase
from hotset.transfer.readers import default_threads

LIBRARIES_BYTES = 128 << 20
"""What libraries take once a model runs: compiled code, plans of multiplications, blocks that allocators keep."""
_KEPT_PLANS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
GPU_LIBRARIES_BYTES = 256 << 20
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES, _CHUNK_SHARE = 32 << 20, 2 << 30, 1 / 24
_ROUNDING = 0.02  # free memory moves between a refusal and the next try


@dataclass(frozen=True, slots=True)
class Account:
    """Free memory of a device, and what the load takes of it beside the experts."""

    free_bytes: int
    dense_bytes: int = 0  # weights that are not experts, as far as they are not loaded yet
    context_bytes: int = 0  # the key-value cache
    work_bytes: int = 0  # activations, and what libraries take as they go

    @property
    def expert_bytes(self) -> int:
        """What is left for experts."""
        return max(self.free_bytes - self.dense_bytes - self.context_bytes - self.work_bytes, 0)

    def check(self, plan: SlotPlan, budget: Budget, extra_bytes: int = 0) -> None:
        """Refuse a plan that memory cannot hold, and name the largest budget that it can."""
        size = plan.shape.expert_bytes or 0
        needed = (plan.cached + plan.staging + plan.prefetch_rows) * size + extra_bytes
        if needed <= self.expert_bytes:
            return
        rest = self.dense_bytes + self.context_bytes + self.work_bytes
        raise BudgetError(
            f"--memory {budget} needs {format_size(needed)} for experts and {format_size(rest)} beside them, and "
            f"{format_size(self.free_bytes)} are free: {self._remedy(plan, budget)}; --force tries all the same"
        )

    def _remedy(self, plan: SlotPlan, budget: Budget) -> str:
        """The largest budget that works, in the words of the one that does not."""
        size, shape = plan.shape.expert_bytes or 1, plan.shape
        room = int(self.expert_bytes * (1 - _ROUNDING))
        beside = plan.staging + max(
            plan.prefetch_rows, prefetch_rows(Driver.HOST, shape)
        )  # where some are missing, some are predicted
        slots = min(room // size - beside, shape.total_experts - 1)
        if slots < max(shape.layers, shape.top_k):
            return "close other programs, pass a smaller --context, or use a machine with more memory"
        return f"the largest that works is --memory {_in_words(budget, slots, room, shape)}"


def _in_words(budget: Budget, slots: int, room_bytes: int, shape: ModelShape) -> str:
    if budget.slots is not None:
        return f'"{slots} slots"'
    if budget.fraction is not None:
        return f"{math.floor(1000 * slots / shape.total_experts) / 10:g}%"
    return f"{min(room_bytes, shape.total_experts * (shape.expert_bytes or 1)) >> 20}MiB"


def take_account(
    model: Any,
    device: torch.device,
    top_k: int,
    *,
    context: int,
    by_device: bool = False,
    loaded: bool = False,
    expert_work_bytes: int = 0,
) -> Account:
    """The account of a model that is about to be loaded, or that is and will go on under a budget."""
    footprint = Footprint.of(model, top_k)
    others = {*getattr(model, "_hotset_shapes", ()), *getattr(model, "all_tied_weights_keys", ())}
    weights = ((name, p.numel() * p.element_size()) for name, p in model.named_parameters())
    tokens = length_for(context) if by_device else context
    return Account(
        free_bytes=free_bytes(device),
        dense_bytes=0 if loaded else sum(size for name, size in weights if name not in others),
        context_bytes=footprint.cached_bytes(tokens),
        work_bytes=work_bytes(footprint, device, context) + expert_work_bytes,
    )


def work_bytes(footprint: Footprint, device: torch.device, context: int) -> int:
    """The activations of a chunk at the end of such a context, with the experts' own and what libraries take."""
    rows = min(footprint.rows_within(chunk_bytes(device), 1, context), context)
    gpu = device.type == "cuda"
    own = grouped.WORK_BYTES + GPU_LIBRARIES_BYTES if gpu else cpu.WORK_BYTES + LIBRARIES_BYTES
    return footprint.pass_bytes(1, rows, context) + own


def reading_bytes(catalog: Catalog, threads: int) -> int:
    """What reader threads hold where experts are decoded: each the raw bytes of one, and twice what comes of them."""
    decoded = [
        layer.raw_bytes(0) + 2 * layer.layout.used_bytes
        for layer in catalog.layers
        if layer.decode and layer.experts[0]
    ]
    return (threads or default_threads()) * max(decoded, default=0)


def decoding_bytes(catalog: Catalog, device: torch.device) -> int:
    """What matrices take that are decoded for their products, where experts are packed.

    On a CPU there is one at a time, on a GPU as many as there is room for.
    """
    packed = {(m, len(layer.experts)) for layer in catalog.layers for m in layer.layout.matrices}
    sizes = {(m.outputs * m.inputs * ITEM_BYTES[parse_format(m.format).dtype], experts) for m, experts in packed}
    if device.type == "cpu":
        return max((size for size, _ in sizes), default=0)
    return max((max(size, min(size * experts, grouped.DECODED_BYTES)) for size, experts in sizes), default=0)


def chunk_bytes(device: torch.device) -> int:
    """The bound of a chunk's activations: a small share of all the memory that there could be.

    It does not depend on what is free at the moment, so that a prompt is computed alike from run to run.
    """
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else memory_limit_bytes()
    return min(max(int(total * _CHUNK_SHARE), _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)


def free_bytes(device: torch.device) -> int:
    """The memory of a device that this process can still have, what its allocator keeps for it included."""
    if device.type != "cuda":
        return available_memory_bytes()
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def bound_library_caches() -> None:
    """Have torch keep few plans of multiplications (one for every number of rows is half a gibibyte), and few holes.

    It reads these settings at the first multiplication in 16 bits; making a plan anew costs next to nothing.
    """
    keep_large_blocks_apart()
    for name, number in _KEPT_PLANS.items():
        os.environ.setdefault(name, number)


def compile_ahead(policy: str) -> None:
    """Have the code of a policy compiled or loaded now: what that takes is then no longer counted as free."""
    plan = SlotPlan(ModelShape(layers=1, experts=4, top_k=2), 3, Scope.LAYER, 1)
    controller = Controller(plan, parse(policy))
    one = np.ones(2, np.int32)
    controller.route(0, np.array([0, 1], np.int32), one, 1, Phase.DECODE, 0)

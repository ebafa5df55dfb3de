"""The reference model over the engine of a GPU on the CPU: slots, staging, and a RAM tier behind them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hotset import policies, reference
from hotset.cache.controller import Controller
from hotset.cache.plan import Scope, SlotPlan
from hotset.engine.arena import poison
from hotset.engine.build import gpu_engine
from hotset.engine.kernels.grouped import GroupedKernels
from hotset.models.budget import shape_of
from hotset.models.connect import connect_engine
from hotset.models.deferred import DeferredExperts, load_without_experts


class FewAtOnce(GroupedKernels):
    """Says of few tokens what kernels in Triton say of them, and computes by torch."""

    def prefers_one_run(self, batch: Any) -> bool:
        return batch.tokens * batch.top_k <= 64


def few_at_once(arena: Any, layout: Any, spec: Any, top_k: int) -> Any:
    return FewAtOnce(arena, layout, spec)


def load_two_tiers(
    slots: int,
    staging: int,
    host_slots: int,
    kernels: Any,
    scope: Scope = Scope.LAYER,
    ahead: int = 0,
    predictor: Any = None,
) -> Any:
    deferred = DeferredExperts(keep=lambda *_: False)
    with load_without_experts(deferred):
        model = AutoModelForCausalLM.from_pretrained(reference.path(), dtype=torch.float32)
    assert deferred.moe_layers is not None
    assert deferred.catalog is not None
    shape = shape_of(deferred.moe_layers, deferred.catalog)
    host_staging = 0 if host_slots >= shape.total_experts else 8
    host = SlotPlan(shape, host_slots, staging=host_staging)
    controller = Controller(SlotPlan(shape, slots, scope, staging, ahead), policies.parse("blend"))
    specs = [moe_layer.spec for moe_layer in deferred.moe_layers]
    engine = gpu_engine(
        controller,
        deferred.catalog,
        specs,
        torch.device("cpu"),
        host,
        policies.parse("lru"),
        kernels=kernels,
        predictor=predictor,
    )
    assert engine.offload is not None
    assert engine.offload.tier is not None
    poison(engine.offload.arena)
    poison(engine.offload.tier.arena)
    connect_engine(model, deferred.moe_layers, engine)
    return model

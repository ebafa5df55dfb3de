"""LongCat-Flash: the router may also choose experts without weights, which return their input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hotset.engine.kernels.spec import ExpertSpec
from hotset.models.adapters._common import gated
from hotset.models.layers import Forward, MoeLayer, fused_parts, parent_of
from hotset.models.patches import replace_forward

Tensor = torch.Tensor

CLASSES = ("LongcatFlashExperts",)


def moe_layer_of(name: str, module: Any, model: torch.nn.Module) -> MoeLayer:
    """Describe one experts module."""
    parts = fused_parts(name, module, ("gate_up_proj", "down_proj"))
    spec = ExpertSpec("gate_up_proj", "down_proj", gated(module.act_fn))
    experts, top_k = module.num_routed_experts, parent_of(name, model).router.top_k
    return MoeLayer(name, module, experts, top_k, parts, spec, lambda f: _install(module, f))


def _install(module: Any, forward: Forward) -> Callable[[], None]:
    def experts(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        returned = weights.masked_fill(index < module.num_routed_experts, 0).sum(dim=-1, keepdim=True)
        return forward(hidden, index, weights) + (hidden * returned).to(hidden.dtype)

    return replace_forward(module, experts)

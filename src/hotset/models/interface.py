"""The experts interface of transformers: modules that describe themselves, in every family that uses it."""

from __future__ import annotations

from typing import Any

import torch

from hotset.engine.kernels.spec import ExpertSpec
from hotset.models.layers import MoeLayer, RouterTraits, fused_parts, parent_of
from hotset.models.patches import replace_forward

_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")


def is_experts(module: torch.nn.Module) -> bool:
    """Whether a module's forward goes through the interface."""
    return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "has_bias", "num_experts"))


def moe_layer_of(
    name: str,
    module: Any,
    model: torch.nn.Module,
    router: RouterTraits = RouterTraits(),  # noqa: B008 - frozen
) -> MoeLayer:
    """Describe one experts module."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    bias, parent = bool(module.has_bias), parent_of(name, model)
    spec = ExpertSpec(
        up=up,
        down="down_proj",
        activation=module._apply_gate if module.has_gate else module.act_fn,
        up_bias=f"{up}_bias" if bias else None,
        down_bias="down_proj_bias" if bias else None,
        up_transposed=module.is_transposed,
        down_transposed=module.is_transposed,
        norm=module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None,
    )
    return MoeLayer(
        name,
        module,
        module.num_experts,
        router.top_k_of((getattr(module, "config", None), parent, *parent.children()), module.num_experts),
        fused_parts(name, module, _WEIGHTS),
        spec,
        lambda f: replace_forward(module, f),
        module.forward,  # looks up the implementation that the model's config names
        router=router,
    )

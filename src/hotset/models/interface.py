"""The experts interface of transformers: modules that describe themselves, in every family that uses it."""

from __future__ import annotations

from typing import Any

import torch

from hotset.engine.kernels.spec import ExpertSpec
from hotset.models.layers import MoeLayer, fused_part, parent_of
from hotset.models.patches import replace_forward

_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")
TOP_K_NAMES = (
    "num_experts_per_tok", "top_k", "moe_topk", "moe_top_k", "num_experts_per_token", "top_k_experts",
    "num_selected_experts", "moe_k", "num_selects", "router_topk", "num_activated_experts",
)  # fmt: skip


def is_experts(module: torch.nn.Module) -> bool:
    """Whether a module's forward goes through the interface."""
    return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "has_bias", "num_experts"))


def moe_layer_of(name: str, module: Any, model: torch.nn.Module) -> MoeLayer:
    """Describe one experts module."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    parts = [
        fused_part(key, f"{name}.{key}" if name else key, tuple(parameter.shape[1:]))
        for key in _WEIGHTS
        if (parameter := getattr(module, key, None)) is not None
    ]
    bias = bool(module.has_bias)
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
        top_k_of(name, module, model),
        tuple(parts),
        spec,
        lambda f: replace_forward(module, f),
        module.forward,  # looks up the implementation that the model's config names
    )


def top_k_of(name: str, module: Any, model: torch.nn.Module) -> int:
    """The experts that one token uses, as the config or the router beside the experts says."""
    config = getattr(module, "config", None)
    parent = parent_of(name, model)
    for holder in (config, parent, *parent.children()):  # where a router may sit
        for key in TOP_K_NAMES:
            value = getattr(holder, key, None)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= module.num_experts:
                return value
    return 1

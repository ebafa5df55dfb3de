"""Switch Transformers: one expert per token, and none for a token whose expert has no room left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hotset.engine.kernels.spec import ExpertSpec
from hotset.models.adapters._common import module_part
from hotset.models.layers import Forward, MoeLayer
from hotset.models.patches import replace_forward

Tensor = torch.Tensor

CLASSES = ("SwitchTransformersExperts",)


def moe_layer_of(name: str, module: Any, _: torch.nn.Module) -> MoeLayer:
    """Describe one experts module."""
    expert = module["expert_0"]
    parts = tuple(module_part(name, key, expert) for key in ("wi.weight", "wo.weight"))
    spec = ExpertSpec("wi.weight", "wo.weight", expert.act)
    return MoeLayer(name, module, module.num_experts, 1, parts, spec, lambda f: _install(module, f))


def _install(module: Any, forward: Forward) -> Callable[[], None]:
    def experts(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The stock router's choice is a mask [tokens, 1, experts], all zero where there was no room."""
        index = chosen.argmax(dim=-1).masked_fill(~chosen.any(dim=-1), module.num_experts)
        return forward(hidden, index, weights)

    return replace_forward(module, experts)

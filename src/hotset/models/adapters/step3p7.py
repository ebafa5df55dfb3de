"""Step 3.7: called as through the experts interface, without being part of it."""

from __future__ import annotations

from typing import Any

import torch

from hotset.engine.kernels.spec import ExpertSpec
from hotset.models.layers import MoeLayer, fused_parts, parent_of
from hotset.models.patches import replace_forward

CLASSES = ("Step3p7Experts",)


def moe_layer_of(name: str, module: Any, model: torch.nn.Module) -> MoeLayer:
    """Describe one experts module."""
    parts = fused_parts(name, module, ("gate_up_proj", "down_proj"))
    spec = ExpertSpec("gate_up_proj", "down_proj", module._apply_gate)
    top_k = parent_of(name, model).gate.top_k
    return MoeLayer(name, module, module.num_experts, top_k, parts, spec, lambda f: replace_forward(module, f))

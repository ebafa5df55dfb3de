"""Llama 4: the router's score scales what an expert is given, not what it returns.

Stock runs every expert on every token, with zeros where the router did not choose; here only the chosen ones run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hotset.engine.kernels.spec import ExpertSpec
from hotset.models.adapters._common import gated
from hotset.models.layers import Forward, MoeLayer, fused_parts
from hotset.models.patches import replace_forward

Tensor = torch.Tensor

CLASSES = ("Llama4TextMoe",)


def moe_layer_of(name: str, module: Any, _: torch.nn.Module) -> MoeLayer:
    """Describe the experts of one layer."""
    experts = module.experts
    parts = fused_parts(f"{name}.experts", experts, ("gate_up_proj", "down_proj"))
    spec = ExpertSpec("gate_up_proj", "down_proj", gated(experts.act_fn), up_transposed=True, down_transposed=True)
    return MoeLayer(name, module, module.num_experts, module.top_k, parts, spec, lambda f: _install(module, f))


def _install(module: Any, forward: Forward) -> Callable[[], None]:
    def layer(hidden: Tensor) -> tuple[Tensor, Tensor]:
        rows = hidden.reshape(-1, module.hidden_dim)
        scores, logits = module.router(rows)
        chosen, index = scores.topk(module.top_k, dim=1)  # all others are zero
        given = (rows.unsqueeze(1) * chosen.unsqueeze(-1)).view(-1, module.hidden_dim)
        routed = forward(given, index.view(-1, 1), torch.ones_like(chosen).view(-1, 1))
        return module.shared_expert(rows) + routed.view(-1, module.top_k, module.hidden_dim).sum(dim=1), logits

    return replace_forward(module, layer)

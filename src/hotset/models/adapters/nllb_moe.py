"""NLLB-MoE: two experts per token, and a correction of stock.

Stock transformers (5.17 to 5.22) encodes the router's 0/1 mask as one-hot a second time, so that zeros and ones become
expert numbers: only the first two experts ever run, on weights that belong to others. Here every token goes to the
experts for which the router computed a weight, as in the published layer and in transformers 4. Outputs therefore
differ from stock's, which are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hotset.engine.kernels.spec import ExpertSpec
from hotset.models.adapters._common import module_part
from hotset.models.layers import Forward, MoeLayer
from hotset.models.patches import replace_forward

Tensor = torch.Tensor

CLASSES = ("NllbMoeExperts",)

_TOP_K = 2  # fixed by the router


def moe_layer_of(name: str, module: Any, _: torch.nn.Module) -> MoeLayer:
    """Describe one experts module."""
    expert = module["expert_0"]
    parts = tuple(module_part(name, key, expert) for key in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"))
    spec = ExpertSpec("fc1.weight", "fc2.weight", expert.act, up_bias="fc1.bias", down_bias="fc2.bias")
    top_k = min(_TOP_K, module.num_experts)
    return MoeLayer(name, module, module.num_experts, top_k, parts, spec, lambda f: _install(module, top_k, f))


def _install(module: Any, top_k: int, forward: Forward) -> Callable[[], None]:
    def experts(hidden: Tensor, _: Tensor, router_weights: Tensor) -> Tensor:
        weights, index = router_weights.topk(top_k, dim=-1)
        index = index.masked_fill(weights == 0, module.num_experts)  # padding, or no room at the expert
        # whole experts were dropped in training with this probability: evaluation scales by the rest
        kept: float = 1 - module.moe_token_dropout
        return forward(hidden, index, weights) * kept

    return replace_forward(module, experts)

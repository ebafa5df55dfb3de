"""DBRX: the experts lie end to end in three flat matrices, the last of them transposed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hotset.engine.kernels.spec import ExpertSpec
from hotset.models.adapters._common import gated
from hotset.models.layers import Forward, LayerPart, MoeLayer, RowRange, parent_of
from hotset.models.patches import replace_forward

Tensor = torch.Tensor

CLASSES = ("DbrxExperts",)


def moe_layer_of(name: str, module: Any, model: torch.nn.Module) -> MoeLayer:
    """Describe one experts module."""
    inner, width = module.ffn_hidden_size, module.hidden_size

    def rows(*keys: str) -> Callable[[int], tuple[RowRange, ...]]:
        return lambda expert: tuple(RowRange(f"{name}.mlp.{key}", expert * inner, (expert + 1) * inner) for key in keys)

    parts = (
        LayerPart("gate_up", (2 * inner, width), rows("w1", "v1")),
        LayerPart("down", (inner, width), rows("w2")),
    )
    spec = ExpertSpec(up="gate_up", down="down", activation=gated(module.mlp.activation_fn), down_transposed=True)
    top_k = parent_of(name, model).top_k
    keys = (r"mlp\.(w1|v1|w2)",)
    return MoeLayer(
        name, module, module.num_experts, top_k, parts, spec, lambda f: _install(module, f), ignored_keys=keys
    )


def _install(module: Any, forward: Forward) -> Callable[[], None]:
    def experts(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = forward(hidden.reshape(-1, module.hidden_size), index, weights)
        return out.view(hidden.shape[0], -1, module.hidden_size)

    return replace_forward(module, experts)

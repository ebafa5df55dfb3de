"""JetMoE: the experts of its MLP are cached.

Its attention has experts too (JetMoeMoA). They are small, and their query and output halves run at different times with
attention between them, so they stay resident as ordinary weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hotset.engine.kernels.spec import ExpertSpec
from hotset.models.adapters._common import gated
from hotset.models.layers import Forward, MoeLayer, fused_part
from hotset.models.patches import replace_forward

Tensor = torch.Tensor

CLASSES = ("JetMoeMoE",)


def moe_layer_of(name: str, module: Any, _: torch.nn.Module) -> MoeLayer:
    """Describe the experts of one MLP."""
    up, down = module.input_linear, module.output_linear
    parts = (
        fused_part("gate_up", f"{name}.input_linear.weight", tuple(up.weight.shape[1:])),
        fused_part("down", f"{name}.output_linear.weight", tuple(down.weight.shape[1:])),
    )
    spec = ExpertSpec(up="gate_up", down="down", activation=gated(module.activation))
    keys, top_k = (r"mlp\.(input|output)_linear",), module.router.top_k
    return MoeLayer(name, module, up.num_experts, top_k, parts, spec, lambda f: _install(module, f), ignored_keys=keys)


def _install(module: Any, forward: Forward) -> Callable[[], None]:
    def layer(hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        index, weights = _route(module.router, rows)
        out: Tensor = forward(rows, index, weights).view(hidden.shape) + module.bias
        return out

    return replace_forward(module, layer)


def _route(router: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The experts of each row and their weights; the stock router sorts them by expert, so its order is undone."""
    order, _, sorted_weights, sizes, _ = router(rows)
    numbers = torch.arange(len(sizes), device=order.device)
    index, weights = torch.empty_like(order), torch.empty_like(sorted_weights)
    index[order] = numbers.repeat_interleave(torch.tensor(sizes, device=order.device))
    weights[order] = sorted_weights
    return index.view(-1, router.top_k), weights.view(-1, router.top_k)

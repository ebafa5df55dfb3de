"""Finds the experts of a model, in the order in which the model runs them."""

from __future__ import annotations

import torch

from hotset.errors import ModelError
from hotset.models import expert_lists, interface
from hotset.models.adapters import adapter_for
from hotset.models.adapters._unsupported import refuse_unsupported
from hotset.models.expert_lists import is_expert_list
from hotset.models.layers import MoeLayer
from hotset.models.plausible import refuse_top_k


def find_moe_layers(model: torch.nn.Module) -> list[MoeLayer]:
    """All places where experts work; a model without any, or with ones that cannot be served, raises ModelError."""
    moe_layers = []
    for name, module in model.named_modules():
        refuse_unsupported(name, module)
        adapter = adapter_for(module)
        if adapter is not None:
            moe_layers.append(adapter.moe_layer_of(name, module, model))
        elif interface.is_experts(module):
            moe_layers.append(interface.moe_layer_of(name, module, model))
    if not moe_layers:
        lists = [(name, module) for name, module in model.named_modules() if is_expert_list(name, module)]
        moe_layers = [expert_lists.moe_layer_of(name, module, model) for name, module in lists]
    if not moe_layers:
        raise ModelError(
            f"{type(model).__name__} has no experts that hotset knows: it is a dense model, or a family that is not "
            "supported; plain transformers runs it"
        )
    for moe_layer in moe_layers:
        if not 0 < moe_layer.top_k <= moe_layer.experts:
            refuse_top_k(getattr(model, "config", None), moe_layer.top_k, moe_layer.experts, moe_layer.router.top_k)
    return moe_layers

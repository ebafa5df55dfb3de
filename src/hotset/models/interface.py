"""The experts interface of transformers: one registered function serves every family that uses it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hotset.engine.kernels.spec import ExpertSpec
from hotset.models.site import Forward, Site, fused_part

NAME = "hotset"
"""What the implementation is called in a model's config."""

_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")
_TOP_K = (
    "num_experts_per_tok", "top_k", "moe_topk", "moe_top_k", "num_experts_per_token", "top_k_experts",
    "num_selected_experts", "moe_k", "num_selects", "router_topk", "num_activated_experts",
)  # fmt: skip


def is_experts(module: torch.nn.Module) -> bool:
    """Whether a module's forward goes through the interface."""
    return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "has_bias", "num_experts"))


def site_of(name: str, module: Any, model: torch.nn.Module) -> Site:
    """Describe one experts module."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    parts = [
        fused_part(key, f"{name}.{key}" if name else key, tuple(parameter.shape[1:]))
        for key in _WEIGHTS
        if (parameter := getattr(module, key, None)) is not None
    ]
    bias = bool(module.has_bias)
    math = ExpertSpec(
        up=up,
        down="down_proj",
        activation=module._apply_gate if module.has_gate else module.act_fn,
        up_bias=f"{up}_bias" if bias else None,
        down_bias="down_proj_bias" if bias else None,
        up_transposed=module.is_transposed,
        down_transposed=module.is_transposed,
        norm=module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None,
    )
    return Site(
        name,
        module,
        module.num_experts,
        top_k_of(name, module, model),
        tuple(parts),
        math,
        lambda f: take_over(module, f),
        stock_of(module),
    )


def take_over(module: Any, forward: Forward) -> Callable[[], None]:
    """Send the module's calls to a function of ours; returns what undoes it."""
    register()
    config, before = module.config, module.config._experts_implementation
    module._hotset_forward = forward
    if before != NAME:
        config._experts_implementation = NAME

    def give_back() -> None:
        del module._hotset_forward
        if before != NAME:
            config._experts_implementation = before

    return give_back


def stock_of(module: Any) -> Forward:
    """The implementation that the model's config names now."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    name, own = module.config._experts_implementation, type(module).forward.__wrapped__
    return partial(ALL_EXPERTS_FUNCTIONS.get(name, own), module)


def register() -> None:
    """Make our function known to transformers under our name."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if NAME not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(NAME, dispatch)


def dispatch(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What transformers calls: the engine of this module, or the stock kernel if it has none."""
    forward: Forward | None = getattr(module, "_hotset_forward", None)
    if forward is not None:
        return forward(hidden, index, weights)
    from transformers.integrations.moe import grouped_mm_experts_forward

    return grouped_mm_experts_forward(module, hidden, index, weights)


def top_k_of(name: str, module: Any, model: torch.nn.Module) -> int:
    """The experts that one token uses, as the config or the router beside the experts says."""
    config = getattr(module, "config", None)
    for holder in (config, *_neighbours(name, model)):
        for key in _TOP_K:
            value = getattr(holder, key, None)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= module.num_experts:
                return value
    return 1


def _neighbours(name: str, model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules in which a router may sit: the experts' parent and its children."""
    parent = model.get_submodule(name.rpartition(".")[0])
    return [parent, *parent.children()]

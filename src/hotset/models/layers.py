"""An MoE layer of a model: what its experts are made of, and how to take over its call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hotset.engine.kernels.spec import ExpertSpec

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""hidden [tokens, width], index and weights [tokens, top_k] -> [tokens, width]"""


class RowRange(NamedTuple):
    """Rows of one of the model's parameters, by its full name."""

    parameter: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class LayerPart:
    """One tensor of every expert of a layer: its shape, and the rows of parameters that it is made of, end to end."""

    name: str
    shape: tuple[int, ...]
    row_ranges: Callable[[int], tuple[RowRange, ...]]


TOP_K = "top_k"
"""What some call the number of experts of one token, and others that of the tokens to sample from."""


@dataclass(frozen=True, slots=True)
class RouterTraits:
    """What a family calls the parts of its routers; the default is what most call them."""

    modules: tuple[str, ...] = ("router", "gate")  # in the module taken over, or beside the experts
    corrections: tuple[str, ...] = ("e_score_correction_bias", "expert_bias", "correction_bias")
    """Tensors added to the scores that decide; they are not part of the weight of an expert."""
    experts_norm: str | None = None  # beside the experts: the norm of their input, where the router has one of its own
    top_k: tuple[str, ...] = (
        "num_experts_per_tok", TOP_K, "moe_topk", "moe_top_k", "num_experts_per_token", "top_k_experts",
        "num_selected_experts", "moe_k", "num_selects", "router_topk", "num_activated_experts",
    )  # fmt: skip
    """The number of experts of one token, in a config or a router."""

    def top_k_of(self, holders: Iterable[Any], experts: int) -> int:
        """The experts that one token uses, as the first of these objects that knows it says; 1 if none does.

        It may be more than there are, or none, which is refused later; a plain `top_k` beyond them is about sampling.
        """
        for holder in holders:
            for key in self.top_k:
                value = getattr(holder, key, None)
                if isinstance(value, int) and not isinstance(value, bool) and (key != TOP_K or 0 < value <= experts):
                    return value
        return 1


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """All experts of one MoE layer."""

    name: str
    module: torch.nn.Module
    experts: int
    top_k: int
    parts: tuple[LayerPart, ...]
    spec: ExpertSpec
    install: Callable[[Forward], Callable[[], None]]  # takes over the calls; returns what gives them back
    stock: Forward | None = None  # the stock implementation of the same call, where the family has one
    ignored_keys: tuple[str, ...] = ("expert",)  # patterns of the experts' keys in a checkpoint
    router: RouterTraits = RouterTraits()

    def parameters(self) -> list[str]:
        """The full names of all parameters that the experts are made of."""
        names = {
            row_range.parameter: None
            for part in self.parts
            for e in range(self.experts)
            for row_range in part.row_ranges(e)
        }
        return list(names)


def parent_of(name: str, model: torch.nn.Module) -> Any:
    """The module that holds the one of this name."""
    return model.get_submodule(name.rpartition(".")[0])


def fused_parts(name: str, experts: Any, keys: Iterable[str]) -> tuple[LayerPart, ...]:
    """The parts of a module whose parameters of these names count the experts first; those it lacks are left out."""
    found = ((key, getattr(experts, key, None)) for key in keys)
    return tuple(
        fused_part(key, f"{name}.{key}" if name else key, tuple(parameter.shape[1:]))
        for key, parameter in found
        if parameter is not None
    )


def fused_part(name: str, parameter: str, shape: tuple[int, ...]) -> LayerPart:
    """A part that lies in one parameter whose first dimension counts the experts."""
    return LayerPart(name, shape, lambda expert: (RowRange(parameter, expert, expert + 1),))

"""An MoE layer of a model: what its experts are made of, and how to take over its call."""

from __future__ import annotations

from collections.abc import Callable
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


def fused_part(name: str, parameter: str, shape: tuple[int, ...]) -> LayerPart:
    """A part that lies in one parameter whose first dimension counts the experts."""
    return LayerPart(name, shape, lambda expert: (RowRange(parameter, expert, expert + 1),))

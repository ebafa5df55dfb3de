"""What several adapters need: to gate, and to name the parts of experts that are modules."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hotset.models.layers import LayerPart, RowRange

Tensor = torch.Tensor


def gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The usual gate: the first half activated, times the second."""

    def gate(both: Tensor) -> Tensor:
        first, second = both.chunk(2, dim=-1)
        return activation(first) * second

    return gate


def module_part(name: str, key: str, expert: torch.nn.Module) -> LayerPart:
    """A parameter of experts that are modules of their own, `expert_0` and so on; all are shaped like the one given."""
    shape = tuple(expert.get_parameter(key).shape)
    return LayerPart(key, shape, lambda number: (RowRange(f"{name}.expert_{number}.{key}", 0, shape[0]),))

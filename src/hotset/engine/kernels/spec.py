"""What one expert computes: two linear maps with an activation between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Two linear maps with an activation between them; the names say which matrices of an expert they use."""

    up: str
    down: str
    activation: Callable[[Tensor], Tensor]
    up_bias: str | None = None
    down_bias: str | None = None
    up_transposed: bool = False  # whether the model has the matrix as (inputs, outputs)
    down_transposed: bool = False
    norm: Callable[[Tensor], Tensor] | None = None
    looped: bool = False  # the model's own code calls its experts one after another

    def is_transposed(self, name: str) -> bool:
        """Whether the model has a tensor of this name as (inputs, outputs)."""
        return (name == self.up and self.up_transposed) or (name == self.down and self.down_transposed)

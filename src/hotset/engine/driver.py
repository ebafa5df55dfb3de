"""Who serves the MoE layers of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from hotset.runtime.step import Step


class Driver(Protocol):
    """Serves the experts of one layer at a time; a step carries the driver that its layers reach."""

    def serve(self, step: Step, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The output of one layer's experts for hidden [tokens, width], index and weights [tokens, top_k]."""

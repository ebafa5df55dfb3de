"""When every expert fits: the model runs as transformers made it, and hotset only watches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from hotset.cache.controller import Controller
from hotset.runtime.engine import Engine
from hotset.runtime.event import LiveEvent
from hotset.runtime.gradients import in_backward
from hotset.runtime.step import Step

Tensor = torch.Tensor
Stock = Callable[[Tensor, Tensor, Tensor], Tensor]


class StockEngine(Engine):
    """All experts resident, computed by the stock implementation; calls come here only while a trace is recorded."""

    kind = "stock"

    def __init__(self, controller: Controller, implementations: list[Stock]) -> None:
        super().__init__(controller)
        self.implementations = implementations
        controller.preload(np.ones((self.shape.layers, self.shape.experts)))

    def forward(self, step: Step, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Note what was routed, and let the stock implementation compute."""
        # A child runs on, but counts nothing: there the lock may be held for ever. A checkpointed layer was counted.
        if self.owner.is_here and not in_backward():
            self._count(step, layer, hidden, index, weights)
        return self.implementations[layer](hidden, index, weights)

    def _count(self, step: Step, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        event = LiveEvent(hidden, index, weights, self.shape.experts)
        with self._lock:
            self.serve_request(step.first_request, layer)
            self.controller.route(layer, event.experts, event.counts, event.tokens, step.phase, step.first_request)
            self.record(step, layer, hidden, index, weights)

    def resident_bytes(self) -> dict[str, int]:
        """The bytes of all experts."""
        return {"slots": self.shape.total_experts * (self.shape.expert_bytes or 0)}

    def close(self) -> None:
        """Nothing to give back."""

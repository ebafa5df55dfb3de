"""Who serves the MoE layers of a step: every driver has one method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from hotset.cache.controller import Controller
from hotset.engine.batch import ExpertBatch
from hotset.engine.gradients import in_backward
from hotset.engine.guard import Guard
from hotset.engine.stats import EngineStats
from hotset.engine.step import Step

Tensor = torch.Tensor
Stock = Callable[[Tensor, Tensor, Tensor], Tensor]
"""An implementation of transformers: the output for hidden, index and weights."""


class Driver(Protocol):
    """Serves events."""

    def serve(self, step: Step, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The output of one layer's experts for hidden [tokens, width], index and weights [tokens, top_k]."""


class StockDriver:
    """Where every expert fits the stock implementation computes; calls come here only while routing is watched."""

    def __init__(
        self, controller: Controller, implementations: Sequence[Stock], stats: EngineStats, guard: Guard
    ) -> None:
        self._controller, self._implementations = controller, implementations
        self._stats, self._guard = stats, guard

    def serve(self, step: Step, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Note what was routed, and let the stock implementation compute."""
        # A child runs on, but counts nothing: there the lock may be held for ever. A checkpointed layer was counted.
        if self._guard.owner.is_here and not in_backward():
            self._count(step, layer, hidden, index, weights)
        return self._implementations[layer](hidden, index, weights)

    def _count(self, step: Step, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        batch = ExpertBatch(hidden, index, weights, self._controller.plan.shape.experts)
        with self._guard.lock:
            if len(batch.experts):
                self._stats.begin_event(step, layer)
                who = batch.asking(step, batch.tokens, routed=self._controller.policy.needs_routes)
                self._controller.route(layer, batch.experts, batch.counts, *who)
            self._stats.record(step, layer, hidden, index, weights)

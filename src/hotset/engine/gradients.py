"""Gradients through experts that come and go: of a layer's input, of the router's weights and of norms among experts.

The backward pass needs the experts of an event once more. It does not route it again: what is resident is used where it
lies, the rest passes through staging. So no expert is admitted or evicted by it, hits, misses and recordings are those
of the forward pass, and `stats()["backward"]` says what was fetched. The experts' own weights are constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hotset.engine.batch import ExpertBatch
from hotset.engine.host.driver import HostDriver
from hotset.engine.kernels import ExpertKernels
from hotset.errors import ModelError

Tensor = torch.Tensor
Serve = Callable[[Tensor, Tensor, Tensor], Tensor]
"""hidden [tokens, width], index and weights [tokens, top_k] -> [tokens, width]"""


def in_backward() -> bool:
    """Whether a backward pass is under way in this thread: then a forward is that of a checkpointed layer, again."""
    return bool(torch._C._current_graph_task_id() != -1)


def differentiable(
    driver: HostDriver, layer: int, module: torch.nn.Module, serve: Serve, given: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Serve one event so that gradients go through it, if anything wants some; else `serve` alone is called."""
    hidden, index, weights = given
    if in_backward():
        serve = partial(driver.serve_again, layer)
    if not torch.is_grad_enabled():
        return serve(hidden, index, weights)
    learnt = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not (hidden.requires_grad or weights.requires_grad or learnt):
        return serve(hidden, index, weights)
    refuse_trained_experts(module)
    out: Tensor = _Experts.apply(hidden, weights, index, driver, layer, serve, *learnt)  # type: ignore[no-untyped-call]
    return out


def refuse_trained_experts(module: torch.nn.Module) -> None:
    """The weights of experts get no gradients: who asks for some must be told."""
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, Tensor) and value.requires_grad:
                raise ModelError("experts that hotset serves are frozen: set requires_grad of other weights only")


def refuse_dropout(module: torch.nn.Module) -> None:
    """In training mode the experts of some families drop values at random, which those in slots do not."""
    if not module.training:
        return
    kinds = torch.nn.modules.dropout._DropoutNd
    drops = getattr(module, "moe_token_dropout", 0) or any(
        part.p > 0 for part in module.modules() if isinstance(part, kinds)
    )
    if drops:
        raise ModelError(
            "the experts of this model use dropout in training mode, which hotset does not: call model.eval(), where "
            "gradients are right too, or load it with its dropout rates set to 0"
        )


class _Experts(torch.autograd.Function):
    """The experts of one layer as a function of its input, the router's weights and what else they learn."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weights: Tensor,
        index: Tensor,
        driver: HostDriver,
        layer: int,
        serve: Serve,
        *learnt: Tensor,
    ) -> Tensor:
        ctx.driver, ctx.layer = driver, layer
        ctx.save_for_backward(hidden, weights, index, *learnt)
        return serve(hidden, index, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weights, index, *learnt = ctx.saved_tensors
        if not index.numel():
            return torch.zeros_like(hidden), torch.zeros_like(weights), *[None] * (4 + len(learnt))
        driver, layer = ctx.driver, ctx.layer
        driver.check_usable()
        event = ExpertBatch(hidden, index, weights, driver.num_experts(layer))
        back = Backward(event, driver.kernels[layer], grad, learnt)
        if len(event.experts):
            driver.revisit(layer, event, back)
        return back.of_hidden(), back.of_weights.view_as(weights), None, None, None, None, *back.of_learnt()


class Backward:
    """The gradients of one event; every pair of token and expert has a place of its own, as in the forward pass."""

    def __init__(self, event: ExpertBatch, experts: ExpertKernels, grad: Tensor, learnt: Sequence[Tensor]) -> None:
        self.event, self.experts, self.grad, self.learnt = event, experts, grad, learnt
        pairs = event.tokens * event.top_k
        self._rows = event.hidden.new_zeros((pairs, event.hidden.shape[-1]))
        self._given_weights = event.weights.reshape(-1)
        self.of_weights = torch.zeros_like(self._given_weights)  # pair by pair
        self._learnt: dict[int, tuple[Tensor | None, ...]] = {}

    def __call__(self, experts: Sequence[int], rows: Sequence[int]) -> None:
        """Take in some experts, which lie in these rows."""
        device = self.event.hidden.device
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            for expert, row in zip(experts, rows, strict=True):
                pairs, _ = self.event.places(self.event.positions([expert]))
                self._take_in(int(expert), int(row), torch.from_numpy(pairs).to(device))

    def _take_in(self, expert: int, row: int, places: Tensor) -> None:
        tokens = places // self.event.top_k
        given = self.event.hidden[tokens].detach().requires_grad_()
        weights = self._given_weights[places].detach().requires_grad_()
        weighted = self.experts.differentiable(given, row) * weights.unsqueeze(-1)
        wanted = (given, weights, *self.learnt)
        found = torch.autograd.grad(weighted, wanted, self.grad[tokens].to(weighted.dtype), allow_unused=True)
        of_given, of_weights, *of_learnt = found
        if of_given is None or of_weights is None:
            raise ModelError("the experts of this model cannot be differentiated: use torch.no_grad()")
        self._rows[places], self.of_weights[places] = of_given, of_weights
        self._learnt[expert] = tuple(of_learnt)

    def of_hidden(self) -> Tensor:
        """The gradient of the layer's input, summed over each token's experts in the router's order."""
        return self._rows.view(self.event.tokens, self.event.top_k, -1).sum(dim=1)

    def of_learnt(self) -> Iterator[Tensor | None]:
        """The gradients of other parameters, summed in the order of experts, whichever arrived first."""
        for number in range(len(self.learnt)):
            parts = [part for expert in sorted(self._learnt) if (part := self._learnt[expert][number]) is not None]
            yield torch.stack(parts).sum(dim=0) if parts else None

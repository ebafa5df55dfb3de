"""Takes over experts that a model's own code calls one by one, so that all that a layer needs come as one event.

The block around the list is run twice. The first time experts only note what they are given, which tells the event; it
is served as a whole; the second time each call gets its part of the result. Whatever is called otherwise, while
gradients are wanted, in training, or from outside of the block, is served alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hotset.errors import ModelError
from hotset.models.layers import Forward
from hotset.models.patches import Undo, replace_forward

Tensor = torch.Tensor


@dataclass(slots=True)
class Call:
    """What an expert was given, and in the second run what it makes of it."""

    expert: int
    given: Tensor
    out: Tensor | None = None


@dataclass(slots=True)
class Event:
    """The calls of one run of a block."""

    calls: list[Call] = field(default_factory=list)
    served: bool = False

    def take(self, expert: int, given: Tensor) -> Tensor | None:
        """The result of a call that was noted; None where the second run gives an expert something else."""
        for number, call in enumerate(self.calls):
            if call.expert == expert and call.given.shape == given.shape and torch.equal(call.given, given):
                del self.calls[number]
                return call.out
        return None


class ListCalls:
    """The calls of the experts in one list, within the block that holds it."""

    def __init__(self, block: torch.nn.Module, experts: Any) -> None:
        self.block, self.experts = block, experts
        self._thread = threading.local()

    def install(self, forward: Forward) -> Undo:
        """Send the calls to the engine; returns what gives them back."""
        stock = self.block.forward
        with ExitStack() as undo:
            undo.callback(replace_forward(self.block, partial(self._run_block, stock, forward)))
            for number, expert in enumerate(self.experts):
                undo.callback(replace_forward(expert, partial(self._run_expert, forward, number)))
            return undo.pop_all().close

    def _run_block(self, stock: Callable[..., Any], forward: Forward, *given: Any, **named: Any) -> Any:
        if not self._is_plain_call(given, named):
            return stock(*given, **named)
        event = self._thread.event = Event()
        try:
            stock(*given)
            if event.calls:
                _serve(event, forward, given[0])
            event.served = True
            return stock(*given)
        finally:
            self._thread.event = None

    def _is_plain_call(self, given: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Whether a block is given its input and nothing else: caches and the like would see a second run."""
        plain = len(given) == 1 and not named and isinstance(given[0], Tensor)
        return plain and not self.block.training and not torch.is_grad_enabled()

    def _run_expert(self, forward: Forward, expert: int, given: Tensor, *more: Any, **named: Any) -> Tensor:
        if more or named:
            raise ModelError(
                f"the model's own code gives its experts more than their input ({len(more) + len(named)} arguments "
                "more): hotset cannot serve them"
            )
        event: Event | None = getattr(self._thread, "event", None)
        if not given.numel():
            return torch.zeros_like(given)
        if event is None:
            return _alone(forward, expert, given)
        if not event.served:
            event.calls.append(Call(expert, given))
            return torch.zeros_like(given)
        found = event.take(expert, given)
        return _alone(forward, expert, given) if found is None else found


def _alone(forward: Forward, expert: int, given: Tensor) -> Tensor:
    """An event of one expert."""
    rows = given.reshape(-1, given.shape[-1])
    index = torch.full((len(rows), 1), expert, dtype=torch.long, device=given.device)
    return forward(rows, index, rows.new_ones(len(rows), 1)).view(given.shape)


def _serve(event: Event, forward: Forward, hidden: Tensor) -> None:
    """Have all calls served together, token by token where rows can be told to be of tokens."""
    rows = [call.given.reshape(-1, call.given.shape[-1]) for call in event.calls]
    index = torch.cat([torch.full((len(own),), call.expert) for call, own in zip(event.calls, rows, strict=True)])
    inputs = torch.cat(rows)
    order = _by_token(hidden.reshape(-1, hidden.shape[-1]), inputs)
    out = torch.empty_like(inputs)
    out[order] = forward(inputs[order], index.to(inputs.device)[order, None], inputs.new_ones(len(inputs), 1))
    for call, own in zip(event.calls, out.split_with_sizes([len(own) for own in rows]), strict=True):
        call.out = own.view(call.given.shape)


def _by_token(tokens: Tensor, rows: Tensor) -> Tensor:
    """An order of rows in which those of one token follow each other; a recording groups them by that."""
    if len(tokens) == 1 or tokens.shape[-1] != rows.shape[-1] or tokens.dtype is not rows.dtype:
        return torch.arange(len(rows), device=rows.device)
    sums, places = _marks(tokens).sort(stable=True)
    found = torch.searchsorted(sums, _marks(rows)).clamp(max=len(sums) - 1)
    return places[found].argsort(stable=True)


def _marks(rows: Tensor) -> Tensor:
    """A number for each row by which equal ones are known, from its bits."""
    bits = rows.detach().contiguous().view(torch.uint8).long()
    factors = torch.arange(1, bits.shape[1] + 1, device=rows.device) * 0x9E3779B1
    return (bits * factors).sum(-1)

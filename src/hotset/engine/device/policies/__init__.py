"""What to keep, on the device: one policy per file, named like its twin in hotset.policies.

A file defines two Triton functions, and `DEVICE`, which says how the host calls them:

    load_state(state, layer, experts, lanes)
        loads what is known of a layer, before it is known what the event asks for: memory is slow to answer
    observe_and_score(state, found, layer, tick, passes, resident, slots, used, counts, slot_of, num_used, num_missing,
          experts, lanes, variant)
        learns from the event and returns what each expert is worth, a vector; `found` is what load_state returned

`used`, `counts` and `slot_of` are vectors over the layer's experts, padded to `lanes`, a power of two. An event that
uses none must change nothing. Threads do not run in step, and some load what others store: a barrier stands between
every load and the store to the same place, and between a store and a later load.

A policy that looks at what each token chose has a `follower`, too: a kernel before that of the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple, Protocol

import torch

from hotset.policies import Policy
from hotset.shape import ModelShape

Tensor = torch.Tensor


class EventFollower(Protocol):
    """A kernel before that of the plan, of a policy that looks at what each token chose, and whose it is."""

    requests: Tensor
    """int64 [tokens], on the device: whose each token is. It is written before a step, and read by all its events."""

    def __call__(self, layer: int, index: Tensor) -> None:
        """Launch it for one event."""


class DevicePolicy(NamedTuple):
    """How the host calls the functions of one policy."""

    load_state: Any
    observe_and_score: Any
    tensors: Callable[[Any], Any] = lambda state: (
        state
    )  # the named tuple of tensors that observe_and_score takes as its state
    variant: Callable[[Any, Any], int] = lambda *_: 0  # compiled separately
    refuses: Callable[[Policy], str | None] = lambda _: None  # the reason why these options do not run here
    least_warps: int = 1
    follower: Callable[[Any, Any, ModelShape, int], EventFollower] | None = None
    """Makes what follows each token before an event is planned, of the table, the state and the tokens of an event."""
    most_tokens: Callable[[Any, ModelShape], int] | None = None  # of an event that it can follow, if that is limited


def names() -> list[str]:
    """The policies that run on the device."""
    return sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_"))


def find(name: str) -> DevicePolicy:
    """The device's side of a policy."""
    found: DevicePolicy = import_module(f"{__name__}.{name}").DEVICE
    return found

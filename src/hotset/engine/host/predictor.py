"""What decides which experts to prefetch: called once per layer of a decode step, before its experts compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from hotset.engine.batch import ExpertBatch
from hotset.engine.step import Step
from hotset.shape import ExpertKey

IsNear = Callable[[ExpertKey], bool]


class Predictor(Protocol):
    """Names the experts to prefetch, the likeliest first."""

    @property
    def needs_tokens(self) -> bool:
        """Whether it wants to know which tokens a step computes."""

    def after(self, layer: int, event: ExpertBatch, step: Step, room: int, is_near: IsNear) -> list[ExpertKey]:
        """What to fetch once a layer was routed: at most `room` experts, none that is here or on its way."""

    def observe(self, layer: int, event: ExpertBatch, step: Step) -> None:
        """Learn from an event after which nothing is prefetched, as in a prompt."""

    def look(self, layer: int, hidden: torch.Tensor, step: Step) -> torch.Tensor | None:
        """What the device has to say before the routing is known to the host: it comes along with that."""

    def note_pass(self, step: Step, seconds: float) -> None:
        """Learn how long a whole step took."""

    def note(self, layer: int, step: Step, stall_s: float, in_time: int, late: int) -> None:
        """Learn how an event went: how long it stalled, and how many predictions for it came in time or late."""

"""What a captured step does beside computing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor

Predict = Callable[[int, Tensor, int], list[Tensor]]
"""Scores of all experts ([tokens, experts], the nearest layer first) of a layer, its input and a number of layers."""
Lookahead = Callable[[int, Tensor], Tensor]
"""What a recording keeps of the next layers' routers: the experts that they predict, of a layer and its input."""


class Variant(NamedTuple):
    """Whether a step prefetches, and whether it keeps what a recording wants, with the routers that it asks."""

    prefetch: bool = False
    recording: bool = False
    lookahead: Lookahead | None = None  # kept alive by the capture that uses it
    resident: bool = False  # all experts have a slot, and keep it: nothing is fetched, and nothing is late

    @property
    def key(self) -> tuple[Any, ...]:
        """What must be alike for a graph to be used again."""
        return self.prefetch, self.recording, self.resident, lookahead_key(self.lookahead)


def lookahead_key(lookahead: Any) -> Any:
    """What tells the routers of one model apart that a recording asks: how far and how wide they look."""
    return tuple(sorted(lookahead.keywords.items())) if isinstance(lookahead, partial) else lookahead

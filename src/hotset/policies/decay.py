"""Exponentially decayed counts: frequency that forgets at a chosen half-life."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hotset.policies.base import Ask, Grid, Policy, compiled
from hotset.shape import ModelShape


class DecayState(NamedTuple):
    """The base-2 logarithm of each decayed count, carried forward to time zero so that it never needs ageing."""

    level: Grid
    half_life: Any


@compiled
def observe(state: DecayState, table: Any, ask: Ask) -> None:
    """Add this event's tokens at today's weight, 2 to the power of now / half-life."""
    now = table.passes[ask.layer] / state.half_life[0]
    for i in range(len(ask.experts)):
        expert = ask.experts[i]
        kept = 2.0 ** (state.level[ask.layer, expert] - now)
        state.level[ask.layer, expert] = now + math.log2(kept + ask.counts[i])


@compiled
def score(state: DecayState, table: Any, ask: Ask, layer: int, expert: int) -> Any:
    """The decayed count on a logarithmic scale, aged by its layer's own time so that layers compare."""
    return state.level[layer, expert] - table.passes[layer] / state.half_life[0]


@dataclass(frozen=True, kw_only=True)
class Decay(Policy):
    """The smallest exponentially decayed count leaves; half_life is in forward passes, so in tokens of one stream."""

    name: ClassVar[str] = "decay"
    observe: ClassVar[Any] = staticmethod(observe)
    score: ClassVar[Any] = staticmethod(score)
    half_life: float = 16.0

    def check(self) -> None:
        """The half-life must be positive."""
        self.require(
            self.half_life > 0 and math.isfinite(self.half_life),
            "half_life must be a positive number of tokens",
        )

    def start(self, shape: ModelShape) -> DecayState:
        """All counts are zero: minus infinity on the logarithmic scale."""
        return DecayState(np.full((shape.layers, shape.experts), -np.inf), np.array([self.half_life]))


POLICY = Decay

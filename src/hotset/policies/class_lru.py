"""Recency, weighed by classes of frequency: how llama.cpp's cache of experts chooses, written anew."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hotset.policies.base import EventView, Grid, Policy, compiled
from hotset.shape import ModelShape

HALF_LIFE = 128.0
"""Tokens in which a use loses half of its weight."""
CLASSES = 8
"""An expert that every token uses comes to 185 uses, and log2 of that is between 7 and 8."""


class ClassLruState(NamedTuple):
    """Decayed uses as of the last use, the class that they made then, and the time of that in tokens of the layer."""

    uses: Grid
    weight: Grid  # 2 to the power of the class
    last: Grid
    clock: Any  # float64 [layers], tokens that ran through each


@compiled
def observe(state: ClassLruState, table: Any, event: EventView) -> None:
    """Advance the layer's clock by the event's tokens, and put each expert that they used into its class."""
    layer = event.layer
    state.clock[layer] += event.tokens
    now = state.clock[layer]
    for i in range(len(event.experts)):
        expert = event.experts[i]
        kept = state.uses[layer, expert] * 0.5 ** ((now - state.last[layer, expert]) / HALF_LIFE)
        uses = kept + event.counts[i]
        state.uses[layer, expert] = uses
        state.weight[layer, expert] = 2.0 ** min(math.floor(math.log2(max(uses, 1.0))), CLASSES - 1)
        state.last[layer, expert] = now


@compiled
def score(state: ClassLruState, table: Any, event: EventView, layer: int, expert: int) -> Any:
    """The age in tokens of the layer, divided by 2 to the power of the class: the largest is evicted."""
    return (state.last[layer, expert] - state.clock[layer]) / state.weight[layer, expert]


@dataclass(frozen=True, kw_only=True)
class ClassLru(Policy, name="class_lru", observe=observe, score=score):
    """The expert is evicted whose age, divided by the decayed number of its uses as of the last one, is largest.

    Uses lose half their weight in 128 tokens and survive eviction; they count by powers of two, 1 to 128.
    """

    def start(self, shape: ModelShape) -> ClassLruState:
        """Every expert is in the lowest class."""
        grid = (shape.layers, shape.experts)
        return ClassLruState(np.zeros(grid), np.ones(grid), np.zeros(grid), np.zeros(shape.layers))


POLICY = ClassLru

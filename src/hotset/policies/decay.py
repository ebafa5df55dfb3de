"""Exponentially decayed counts: frequency that forgets at a chosen half-life, or at the one that predicts best."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hotset.errors import PolicyError
from hotset.policies._choice import SMOOTH, choose, note_surprise
from hotset.policies.base import EventView, Policy, compiled
from hotset.shape import ModelShape

HALF_LIVES = (16.0, 2.0, 4.0, 8.0, 32.0, 64.0, 128.0, 256.0)
"""The half-lives that auto tries; the first is used while none has done better."""


class DecayState(NamedTuple):
    """Counts on a base-2 logarithm, carried forward to time zero so that they never need ageing."""

    level: Any  # float64 [half-lives, layers, experts]
    total: Any  # float64 [half-lives, layers], of all experts together; kept only when there is a choice
    half_life: Any  # float64 [half-lives]
    surprise: Any  # float64 [half-lives], bits per use, lately
    chosen: Any  # int64 [1]


@compiled
def observe(state: DecayState, table: Any, event: EventView) -> None:
    """Add this event's tokens at today's weight, 2 to the power of now / half-life."""
    choices = len(state.half_life)
    if choices > 1:
        for choice in range(choices):
            _judge(state, table, event, choice)
        choose(state.surprise, state.chosen)
    for choice in range(choices):
        now = table.passes[event.layer] / state.half_life[choice]
        level = state.level[choice, event.layer]
        for i in range(len(event.experts)):
            expert = event.experts[i]
            kept = 2.0 ** (level[expert] - now)
            level[expert] = now + math.log2(kept + event.counts[i])


@compiled
def _judge(state: DecayState, table: Any, event: EventView, choice: int) -> None:
    """How surprising this event was by the shares of the counts so far; prompts are counted, not predicted."""
    layer, level = event.layer, state.level[choice, event.layer]
    now = table.passes[layer] / state.half_life[choice]
    whole = 2.0 ** (state.total[choice, layer] - now)
    uses, bits = 0, len(event.experts) * math.log2(whole + SMOOTH * len(level))
    for i in range(len(event.experts)):
        uses += event.counts[i]
        bits -= math.log2(2.0 ** (level[event.experts[i]] - now) + SMOOTH)
    state.total[choice, layer] = now + math.log2(whole + uses)
    if event.phase == 1:
        note_surprise(state.surprise, choice, bits / len(event.experts), state.level.shape[1])


@compiled
def score(state: DecayState, table: Any, event: EventView, layer: int, expert: int) -> Any:
    """The decayed count on a logarithmic scale, aged by its layer's own time so that layers compare."""
    chosen = state.chosen[0]
    return state.level[chosen, layer, expert] - table.passes[layer] / state.half_life[chosen]


@dataclass(frozen=True, kw_only=True)
class Decay(Policy, name="decay", observe=observe, score=score):
    """The smallest exponentially decayed count is evicted; half_life is in forward passes: tokens of one stream.

    With half_life=auto, counts are kept at eight half-lives, and the one that predicted the uses best lately decides.
    """

    half_life: str = "16"

    def check(self) -> None:
        """The half-life must be positive, and is written as short as can be."""
        if self.half_life == "auto":
            return
        try:
            number = float(self.half_life)
        except ValueError:
            raise PolicyError(f'decay: half_life must be a number or auto, not "{self.half_life}"') from None
        self.require(number > 0 and math.isfinite(number), "half_life must be a positive number of tokens")
        object.__setattr__(self, "half_life", f"{number:.12g}")

    def start(self, shape: ModelShape) -> DecayState:
        """All counts are zero: minus infinity on the logarithmic scale."""
        half_lives = np.array(HALF_LIVES if self.half_life == "auto" else [float(self.half_life)])
        return DecayState(
            np.full((len(half_lives), shape.layers, shape.experts), -np.inf),
            np.full((len(half_lives), shape.layers), -np.inf),
            half_lives,
            np.zeros(len(half_lives)),
            np.zeros(1, np.int64),
        )


POLICY = Decay

"""Counts in a sliding window of the last tokens: exact forgetting, at the price of remembering the window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hotset.policies.base import Ask, Grid, Policy, compiled
from hotset.shape import ModelShape


class WindowState(NamedTuple):
    """The running sums, and per layer a ring of the passes inside the window."""

    uses: Grid
    ring: Any  # float32 [layers, window, experts], uses of one pass
    ring_tokens: Any  # float64 [layers, window]
    cursor: Any  # int64 [layers, 3]: oldest entry, number of entries, tokens held


@compiled
def observe(state: WindowState, table: Any, ask: Ask) -> None:
    """Add this pass and drop the oldest ones until the window holds no more than its tokens."""
    layer, window = ask.layer, state.ring.shape[1]
    tokens = min(ask.tokens, window)
    share = tokens / ask.tokens  # a prompt longer than the window fills it in its own proportions
    while state.cursor[layer, 1] > 0 and state.cursor[layer, 2] + tokens > window:
        oldest = state.cursor[layer, 0]
        _add(state, layer, oldest, -1.0)
        state.cursor[layer, 2] -= int(state.ring_tokens[layer, oldest])
        state.cursor[layer, 0] = (oldest + 1) % window
        state.cursor[layer, 1] -= 1
    newest = (state.cursor[layer, 0] + state.cursor[layer, 1]) % window
    for expert in range(state.ring.shape[2]):
        state.ring[layer, newest, expert] = 0.0
    for i in range(len(ask.experts)):
        state.ring[layer, newest, ask.experts[i]] = ask.counts[i] * share
    _add(state, layer, newest, 1.0)
    state.ring_tokens[layer, newest] = tokens
    state.cursor[layer, 1] += 1
    state.cursor[layer, 2] += tokens


@compiled
def _add(state: WindowState, layer: int, entry: int, sign: float) -> None:
    """Add or take away one pass of the ring."""
    for expert in range(state.ring.shape[2]):
        state.uses[layer, expert] += sign * state.ring[layer, entry, expert]


@compiled
def score(state: WindowState, table: Any, ask: Ask, layer: int, expert: int) -> Any:
    """Uses inside the window, to the nearest thousandth so that sums of shares compare equal."""
    return round(state.uses[layer, expert] * 1000.0)


@dataclass(frozen=True, kw_only=True)
class Window(Policy):
    """The expert with the fewest uses among the layer's last `tokens` tokens leaves."""

    name: ClassVar[str] = "window"
    observe: ClassVar[Any] = staticmethod(observe)
    score: ClassVar[Any] = staticmethod(score)
    tokens: int = 64

    def check(self) -> None:
        """The window must hold something."""
        self.require(1 <= self.tokens <= 4096, "tokens must be 1 to 4096")

    def start(self, shape: ModelShape) -> WindowState:
        """An empty window."""
        return WindowState(
            np.zeros((shape.layers, shape.experts)),
            np.zeros((shape.layers, self.tokens, shape.experts), np.float32),
            np.zeros((shape.layers, self.tokens)),
            np.zeros((shape.layers, 3), np.int64),
        )


POLICY = Window

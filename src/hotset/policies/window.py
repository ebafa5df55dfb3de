"""Counts in a sliding window of the last tokens: exact forgetting, at the price of remembering the window."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hotset.errors import PolicyError
from hotset.policies._choice import SMOOTH, choose, note_surprise
from hotset.policies.base import EventView, Policy, compiled
from hotset.shape import ModelShape

WINDOWS = (64, 16, 32, 128, 256, 512)
"""The windows that auto tries; the first is used while none has done better."""


class WindowState(NamedTuple):
    """The running sums of each window, and per layer one ring of the passes inside the longest."""

    uses: Any  # float64 [windows, layers, experts]
    window: Any  # int64 [windows], tokens
    held: Any  # int64 [windows, layers, 2]: passes and tokens inside
    ring: Any  # float32 [layers, longest window, experts], uses of one pass
    ring_tokens: Any  # int64 [layers, longest window]
    newest: Any  # int64 [layers], where the next pass goes
    surprise: Any  # float64 [windows], bits per use, lately
    chosen: Any  # int64 [1]


@compiled
def observe(state: WindowState, table: Any, event: EventView) -> None:
    """Add this pass and drop the oldest ones until each window holds no more than its tokens."""
    windows = len(state.window)
    if windows > 1 and event.phase == 1:
        for choice in range(windows):
            _judge(state, event, choice)
        choose(state.surprise, state.chosen)
    for choice in range(windows):
        _make_room(state, event, choice)
    _record(state, event)
    for choice in range(windows):
        _add(state, event.layer, choice, state.newest[event.layer], 1)
    state.newest[event.layer] = (state.newest[event.layer] + 1) % state.ring.shape[1]


@compiled
def _judge(state: WindowState, event: EventView, choice: int) -> None:
    """How surprising this event was by the shares of the uses in one window."""
    uses, whole, bits = state.uses[choice, event.layer], 0.0, 0.0
    for expert in range(len(uses)):
        whole += uses[expert] + SMOOTH
    for i in range(len(event.experts)):
        bits -= math.log2((uses[event.experts[i]] + SMOOTH) / whole)
    note_surprise(state.surprise, choice, bits / len(event.experts), state.uses.shape[1])


@compiled
def _make_room(state: WindowState, event: EventView, choice: int) -> None:
    """Let the oldest passes go until the new one fits."""
    held, window = state.held[choice, event.layer], state.window[choice]
    while held[0] > 0 and held[1] + min(event.tokens, window) > window:
        _add(state, event.layer, choice, (state.newest[event.layer] - held[0]) % state.ring.shape[1], -1)


@compiled
def _record(state: WindowState, event: EventView) -> None:
    """Write this pass into the ring."""
    newest = state.newest[event.layer]
    for expert in range(state.ring.shape[2]):
        state.ring[event.layer, newest, expert] = 0.0
    for i in range(len(event.experts)):
        state.ring[event.layer, newest, event.experts[i]] = event.counts[i]
    state.ring_tokens[event.layer, newest] = event.tokens


@compiled
def _add(state: WindowState, layer: int, choice: int, entry: int, sign: int) -> None:
    """Add or take away one pass; a prompt longer than the window fills it in its own proportions."""
    tokens = min(state.ring_tokens[layer, entry], state.window[choice])
    share = sign * tokens / state.ring_tokens[layer, entry]
    uses, row = state.uses[choice, layer], state.ring[layer, entry]
    for expert in range(len(uses)):
        uses[expert] += share * row[expert]
    state.held[choice, layer, 0] += sign
    state.held[choice, layer, 1] += sign * tokens


@compiled
def score(state: WindowState, table: Any, event: EventView, layer: int, expert: int) -> Any:
    """Uses inside the window, to the nearest thousandth so that sums of shares compare equal."""
    return round(state.uses[state.chosen[0], layer, expert] * 1000.0)


@dataclass(frozen=True, kw_only=True)
class Window(Policy, name="window", observe=observe, score=score):
    """The expert with the fewest uses among the layer's last `tokens` tokens is evicted.

    With tokens=auto, six windows are kept, and the one that predicted the uses best lately decides.
    """

    tokens: str = "64"

    def check(self) -> None:
        """The window must hold something."""
        if self.tokens == "auto":
            return
        try:
            number = int(self.tokens)
        except ValueError:
            raise PolicyError(f'window: tokens must be a number or auto, not "{self.tokens}"') from None
        self.require(1 <= number <= 4096, "tokens must be 1 to 4096")
        object.__setattr__(self, "tokens", str(number))

    def start(self, shape: ModelShape) -> WindowState:
        """Empty windows."""
        windows = np.array(WINDOWS if self.tokens == "auto" else [int(self.tokens)])
        number, longest = len(windows), int(windows.max())
        return WindowState(
            uses=np.zeros((number, shape.layers, shape.experts)),
            window=windows,
            held=np.zeros((number, shape.layers, 2), np.int64),
            ring=np.zeros((shape.layers, longest, shape.experts), np.float32),
            ring_tokens=np.zeros((shape.layers, longest), np.int64),
            newest=np.zeros(shape.layers, np.int64),
            surprise=np.zeros(number),
            chosen=np.zeros(1, np.int64),
        )


POLICY = Window

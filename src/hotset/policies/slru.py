"""Segmented LRU: new experts are on probation, a second use protects them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hotset.policies.base import EventView, Grid, Policy, compiled
from hotset.shape import ModelShape

ABOVE = 2.0**52  # lifts the protected segment above every probationary score


class SlruState(NamedTuple):
    """When an expert entered its segment, which one it is in, and how often it was used lately."""

    since: Grid
    protected: Any  # bool [layers, experts]
    level: Grid  # base-2 logarithm of the decayed uses, carried forward to time zero; kept only for the hint
    options: Any  # float64: share of protected slots, frequency hint, its half-life


@compiled
def observe(state: SlruState, table: Any, event: EventView) -> None:
    """Promote what was hit, put what must be loaded on probation, then bring the protected segment to size."""
    layer, promoted = event.layer, 0
    for i in range(len(event.experts)):
        expert = event.experts[i]
        hit = table.slot_of[layer, expert] >= 0
        promoted += hit and not state.protected[layer, expert]
        state.protected[layer, expert] = hit
        state.since[layer, expert] = event.tick
    if state.options[1]:
        _count(state, table, event)
    if promoted:
        _demote(state, table, event)


@compiled
def _count(state: SlruState, table: Any, event: EventView) -> None:
    """Add this event's tokens at today's weight, 2 to the power of now / half-life."""
    now = table.passes[event.layer] / state.options[2]
    for i in range(len(event.experts)):
        expert = event.experts[i]
        kept = 2.0 ** (state.level[event.layer, expert] - now)
        state.level[event.layer, expert] = now + math.log2(kept + event.counts[i])


@compiled
def _demote(state: SlruState, table: Any, event: EventView) -> None:
    """The least recent protected experts go back on probation, to its most recent end."""
    group = table.group_of[event.layer]
    first, last = table.bounds[group], table.bounds[group + 1]
    room = int(state.options[0] * (last - first))
    held = 0
    for slot in range(first, last):
        expert = table.expert_in[slot]
        held += expert >= 0 and state.protected[table.layer_in[slot], expert]
    while held > room:
        oldest, oldest_layer, oldest_expert = np.inf, -1, -1
        for slot in range(first, last):
            layer, expert = table.layer_in[slot], table.expert_in[slot]
            if expert < 0 or not state.protected[layer, expert]:
                continue
            since = state.since[layer, expert]
            lower = layer < oldest_layer or (layer == oldest_layer and expert < oldest_expert)
            if since < oldest or (since == oldest and lower):
                oldest, oldest_layer, oldest_expert = since, layer, expert
        state.protected[oldest_layer, oldest_expert] = False
        state.since[oldest_layer, oldest_expert] = event.tick
        held -= 1


@compiled
def score(state: SlruState, table: Any, event: EventView, layer: int, expert: int) -> Any:
    """Recency within the segment, protected above all; with the hint, uses decide among the probationary."""
    if state.protected[layer, expert]:
        return ABOVE + state.since[layer, expert]
    if state.options[1]:
        return state.level[layer, expert] - table.passes[layer] / state.options[2]
    return state.since[layer, expert]


@dataclass(frozen=True, kw_only=True)
class Slru(Policy, name="slru", observe=observe, score=score):
    """Segmented LRU (Karedla 1994); `hint` lets frequency decide among probationary victims.

    The hint forgets: uses lose half their weight in `hint_half_life` forward passes, or never when that is inf.
    """

    protected: float = 0.75
    hint: bool = False
    hint_half_life: float = 16.0

    def check(self) -> None:
        """The protected segment is a share of the slots, and the half-life is positive."""
        self.require(0 <= self.protected <= 1, "protected must be a share of the slots, 0 to 1")
        self.require(self.hint_half_life > 0, "hint_half_life must be a positive number of tokens, or inf")

    def start(self, shape: ModelShape) -> SlruState:
        """Both segments are empty."""
        grid = (shape.layers, shape.experts)
        options = np.array([self.protected, float(self.hint), self.hint_half_life])
        return SlruState(np.zeros(grid), np.zeros(grid, np.bool_), np.full(grid, -np.inf), options)


POLICY = Slru

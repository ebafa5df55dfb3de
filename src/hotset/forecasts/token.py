"""The token itself: an id that comes again uses much the same experts, and it is known before the first layer."""

# ruff: noqa: ARG001 - every forecast's functions take the same arguments
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hotset.forecasts._learnt import Rates, count, learnt, mix_rates, spread, start_rates, tokens_ahead
from hotset.forecasts.base import Forecast, Seen, compiled
from hotset.shape import ModelShape

WAYS = 4
"""How many occurrences of an id are remembered."""

_WEIGHT = 8.0  # trials that a cell's start counts for
_TABLE_BYTES = 64 << 20  # the table has as many slots as fit


class TokenState(NamedTuple):
    """The experts of the last occurrences of each id, and how often a vote of so many of them was right."""

    rates: Rates
    ids: Any  # int32 [slots], -1: empty
    held: Any  # int32 [slots, layers], occurrences so far
    table: Any  # int16 [slots, layers, ways, top_k], -1: none
    cells: Any  # float64 [layers, ways + 1, ways + 1, 2]: by occurrences held and votes; uses, and uses expected
    votes: Any  # int32 [experts]


@compiled
def observe(state: TokenState, seen: Seen) -> None:
    """Judge the votes by this token, then remember its experts; passes of several tokens only move the rates."""
    if seen.token >= 0 and seen.tokens == 1:
        slot = seen.token % len(state.ids)
        if state.ids[slot] != seen.token:
            _claim(state, slot, seen.token)
        if state.held[slot, seen.layer] > 0:
            _judge(state, slot, seen)
        _write(state, slot, seen)
    mix_rates(state.rates, seen)


@compiled
def probabilities(state: TokenState, seen: Seen, target: int, distance: int, out: Any) -> None:
    """The rate of use, times what such a vote has meant in the target layer; the next pass's token is not known."""
    rate = state.rates.rate[target]
    for e in range(len(out)):
        out[e] = rate[e]
    if target > seen.layer and seen.tokens == 1 and seen.token >= 0:
        slot = seen.token % len(state.ids)
        if state.ids[slot] == seen.token and state.held[slot, target] > 0:
            held = _vote(state, slot, target)
            for e in range(len(out)):
                out[e] = expected(state, target, held, state.votes[e], rate[e])
    spread(out, tokens_ahead(seen, target))


@compiled
def expected(state: TokenState, layer: int, held: int, votes: int, rate: float) -> Any:
    """The probability of an expert: without a vote in proportion to its rate, else what its votes were worth."""
    cell = state.cells[layer, held, votes]
    if votes == 0:
        return min(rate * learnt(cell, 0.7, _WEIGHT), 1.0)
    return learnt(cell, 0.2 + 0.5 * votes / held, _WEIGHT)


@compiled
def _claim(state: TokenState, slot: int, token: int) -> None:
    state.ids[slot] = token
    for layer in range(state.held.shape[1]):
        state.held[slot, layer] = 0


@compiled
def _vote(state: TokenState, slot: int, layer: int) -> Any:
    """Count the occurrences that used each expert; return how many are held."""
    for e in range(len(state.votes)):
        state.votes[e] = 0
    held = min(state.held[slot, layer], WAYS)
    for way in range(held):
        for k in range(state.table.shape[3]):
            expert = state.table[slot, layer, way, k]
            if expert >= 0:
                state.votes[expert] += 1
    return held


@compiled
def _judge(state: TokenState, slot: int, seen: Seen) -> None:
    held, rate = _vote(state, slot, seen.layer), state.rates.rate[seen.layer]
    cells = state.cells[seen.layer, held]
    for e in range(len(state.votes)):
        votes = state.votes[e]
        count(cells[votes], 0.0, 1.0 if votes else rate[e])
    for i in range(len(seen.experts)):
        cells[state.votes[seen.experts[i]], 0] += 1.0


@compiled
def _write(state: TokenState, slot: int, seen: Seen) -> None:
    row = state.table[slot, seen.layer, state.held[slot, seen.layer] % WAYS]
    for k in range(len(row)):
        row[k] = seen.experts[k] if k < len(seen.experts) else -1
    state.held[slot, seen.layer] += 1


@dataclass(frozen=True, kw_only=True)
class Token(Forecast, name="token", observe=observe, probabilities=probabilities, needs="token_ids", uses_tokens=True):
    """The probability of each expert by how many of the last four occurrences of the token's id used it.

    An id has one place, id modulo slots, and takes it from the id that is there. A slot takes layers x top_k x 8 bytes
    and a little; there are fewer than asked for where they would take more than 64 MiB.
    """

    slots: int = 8192

    def check(self) -> None:
        """There must be a place for an id."""
        self.require(self.slots >= 1, f"slots must be at least 1, not {self.slots}")

    def start(self, shape: ModelShape) -> TokenState:
        """No id was ever seen."""
        slots = max(min(self.slots, _TABLE_BYTES // (shape.layers * (shape.top_k * WAYS * 2 + 4))), 1)
        return TokenState(
            start_rates(shape),
            np.full(slots, -1, np.int32),
            np.zeros((slots, shape.layers), np.int32),
            np.full((slots, shape.layers, WAYS, shape.top_k), -1, np.int16),
            np.zeros((shape.layers, WAYS + 1, WAYS + 1, 2)),
            np.zeros(shape.experts, np.int32),
        )


FORECAST = Token

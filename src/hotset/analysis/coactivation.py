"""Which experts are chosen together: within a layer, and by the same token in the layer that follows.

Lift is P(a and b) / (P(a) P(b)). Experts of one layer exclude each other's places, so lift within a layer is by chance
E (k - 1) / (k (E - 1)), a little below 1; between layers it is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.analysis.tallies import Floats, Ints, ratio
from hotset.shape import ModelShape
from hotset.trace import Trace

ENOUGH = 20
"""A pair is compared that has, or would have by chance, so many tokens."""
MAX_TOKENS = 1 << 18
"""Of longer traces, tokens at even distances are taken."""
PAIRS = 12
_ROWS_AT_ONCE = 1 << 13


@dataclass(frozen=True, eq=False)
class PairCounts:
    """How many tokens chose each pair, and each expert alone, of two layers or of one."""

    layer: int
    other: int  # the same layer, or the next
    together: Ints  # [experts, experts]
    first: Ints  # [experts]
    second: Ints  # [experts]
    tokens: int

    @property
    def expected(self) -> Floats:
        """Tokens that would choose each pair if each expert were chosen on its own."""
        return np.outer(self.first, self.second) / max(self.tokens, 1)

    @property
    def lift(self) -> Floats:
        """Together over expected; not a number for an expert with itself, and where there are too few tokens."""
        expected = self.expected
        told = np.maximum(self.together, expected) >= ENOUGH
        if self.layer == self.other:
            np.fill_diagonal(told, False)
        return np.where(told, ratio(self.together, expected), np.nan)

    def strongest(self, number: int) -> list[dict[str, Any]]:
        """The pairs that are chosen together most above chance."""
        lift = np.triu(self.lift, 1) if self.layer == self.other else self.lift
        order = np.argsort(-np.nan_to_num(lift), axis=None, kind="stable")[:number]
        places = np.stack(np.unravel_index(order, lift.shape), axis=1).tolist()
        return [
            {
                "layer": self.layer, "expert": a, "other_layer": self.other, "other_expert": b,
                "tokens": int(self.together[a, b]), "expected": float(self.expected[a, b]), "lift": float(lift[a, b]),
            }
            for a, b in places
            if lift[a, b] > 0
        ]  # fmt: skip

    def spread(self, chance: float) -> float:
        """The mean of |log2(lift / chance)| over all pairs that are told, weighted by the tokens expected."""
        lift, expected = self.lift, self.expected
        told = np.isfinite(lift)
        if not told.any() or chance <= 0:
            return float("nan")
        least = 0.5 / np.maximum(expected[told], 0.5)  # a pair that was never seen counts as half a token
        bits = np.abs(np.log2(np.maximum(lift[told], least) / chance))
        return float(np.average(bits, weights=expected[told]))


@dataclass(frozen=True, eq=False)
class Coactivation:
    """Co-activation of all layers in figures, and of the layer with the most of it in full."""

    chance: float
    spread: Floats  # [layers] or [layers - 1], mean |log2(lift / chance)|
    strongest: list[dict[str, Any]]
    shown: PairCounts | None
    tokens: int


def chance_within(shape: ModelShape) -> float:
    """The lift within a layer when choices are random."""
    k, experts = shape.top_k, shape.experts
    return experts * (k - 1) / (k * (experts - 1)) if experts > 1 else 0.0


def within_layers(trace: Trace) -> Coactivation | None:
    """Pairs of one layer; None where a token has one expert."""
    if trace.shape.top_k < 2:
        return None
    pairs = [(layer, layer) for layer in range(trace.shape.layers)]
    return _measure(trace, pairs, chance_within(trace.shape))


def between_layers(trace: Trace) -> Coactivation | None:
    """Pairs of consecutive layers; None where there is one layer."""
    if trace.shape.layers < 2:
        return None
    return _measure(trace, [(layer, layer + 1) for layer in range(trace.shape.layers - 1)], 1.0)


def _measure(trace: Trace, pairs: list[tuple[int, int]], chance: float) -> Coactivation:
    rows = np.arange(0, trace.tokens, -(-trace.tokens // MAX_TOKENS))
    spread, found, shown = np.full(len(pairs), np.nan), [], None
    for i, (layer, other) in enumerate(pairs):
        counts = count_pairs(trace, layer, other, rows)
        spread[i] = counts.spread(chance)
        found += counts.strongest(PAIRS)
        if spread[i] >= np.nanmax(spread[: i + 1], initial=0.0):
            shown = counts
    strongest = sorted(found, key=lambda pair: -pair["lift"])
    return Coactivation(chance, spread, strongest, shown, len(rows))


def count_pairs(trace: Trace, layer: int, other: int, rows: npt.NDArray[np.int64]) -> PairCounts:
    """Count the pairs of tokens that ran through both layers."""
    experts = trace.shape.experts
    together = np.zeros((experts, experts), np.int64)
    first, second = np.zeros(experts, np.int64), np.zeros(experts, np.int64)
    tokens = 0
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[start : start + _ROWS_AT_ONCE]
        a = _chosen(trace.experts[some, layer], experts)
        b = a if layer == other else _chosen(trace.experts[some, other], experts)
        both = a.any(axis=1) & b.any(axis=1)
        a, b = a[both], b[both]
        together += (a.T @ b).astype(np.int64)  # whole numbers far below 2 ** 24 are exact in float32
        first += a.sum(axis=0).astype(np.int64)
        second += b.sum(axis=0).astype(np.int64)
        tokens += len(a)
    return PairCounts(layer, other, together, first, second, tokens)


def _chosen(chosen: npt.NDArray[np.int16], experts: int) -> npt.NDArray[np.float32]:
    """A row of zeros and ones per token."""
    rows = np.zeros((len(chosen), experts + 1), np.float32)  # the last column takes what was not computed
    np.put_along_axis(rows, np.where(chosen >= 0, chosen, experts).astype(np.int64), 1.0, axis=1)
    return rows[:, :experts]


def alike_order(lift: Floats, chance: float) -> tuple[Ints, Ints]:
    """Orders of rows and columns that put experts with the same partners side by side."""
    strength = np.log2(np.clip(np.nan_to_num(lift, nan=chance) / max(chance, 1e-9), 1 / 16, 16))
    left, _, right = np.linalg.svd(strength, full_matrices=False)
    return np.argsort(left[:, 0], kind="stable"), np.argsort(right[0], kind="stable")

"""How evenly the experts of each layer are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hotset.analysis.tallies import Floats, Ints, ratio, tokens_of_layers, uses_by
from hotset.shape import ModelShape
from hotset.trace import Phase, Trace
from hotset.trace.summary import entropy


@dataclass(frozen=True, eq=False)
class Usage:
    """The uses of every expert: a use is one token that chose the expert."""

    shape: ModelShape
    by_phase: Ints  # [phases, layers, experts]
    tokens: Ints  # [layers], tokens that ran through each

    @property
    def uses(self) -> Ints:
        """Uses of both phases, as a grid."""
        return np.asarray(self.by_phase.sum(axis=0))

    @property
    def share(self) -> Floats:
        """The part of a layer's uses that each expert takes; not a number where a layer never ran."""
        return ratio(self.uses, self.uses.sum(axis=1, keepdims=True))

    @property
    def entropy_bits(self) -> Floats:
        """The entropy of each layer's uses."""
        return np.asarray(entropy(self.uses) * np.log2(self.shape.experts))

    @property
    def effective(self) -> Floats:
        """How many evenly used experts would have the same entropy."""
        return np.exp2(self.entropy_bits)

    @property
    def gini(self) -> Floats:
        """0 where all experts of a layer are used alike, near 1 where one takes everything."""
        experts = self.shape.experts
        rank = 2 * np.arange(1, experts + 1) - experts - 1
        return np.asarray((rank * np.sort(self.share, axis=1)).sum(axis=1) / experts)

    def covering(self, part: float) -> Ints:
        """How few experts of each layer make this part of its uses; 0 where a layer never ran."""
        ordered = np.sort(self.uses, axis=1)[:, ::-1]
        reached = np.cumsum(ordered, axis=1) >= part * ordered.sum(axis=1, keepdims=True) - 1e-9
        return np.where(self.uses.sum(axis=1) > 0, reached.argmax(axis=1) + 1, 0)

    @property
    def dead(self) -> Ints:
        """How many experts of each layer no token chose."""
        return np.asarray(np.count_nonzero(self.uses == 0, axis=1).astype(np.int64))

    @property
    def dead_by_chance(self) -> Floats:
        """How many would be unused if every token chose at random: E (1 - k/E) ^ tokens.

        Not a number where a layer never ran.
        """
        experts, top_k = self.shape.experts, self.shape.top_k
        expected: Floats = experts * (1 - top_k / experts) ** self.tokens.astype(np.float64)
        return np.where(self.tokens > 0, expected, np.nan)

    def by_layer(self) -> list[dict[str, Any]]:
        """Each layer in numbers."""
        columns = {
            "tokens": self.tokens,
            "entropy_bits": self.entropy_bits,
            "effective_experts": self.effective,
            "gini": self.gini,
            "experts_of_50_percent": self.covering(0.5),
            "experts_of_90_percent": self.covering(0.9),
            "dead": self.dead,
            "dead_by_chance": self.dead_by_chance,
        }
        return [
            {"layer": layer, **{name: column[layer].item() for name, column in columns.items()}}
            for layer in range(self.shape.layers)
        ]


def measure_usage(trace: Trace) -> Usage:
    """Count the uses of every expert in a trace."""
    return Usage(trace.shape, uses_by(trace, trace.phase, len(Phase)), tokens_of_layers(trace))

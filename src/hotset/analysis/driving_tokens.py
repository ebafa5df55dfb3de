"""Tokens that drive an expert: those whose occurrences choose it far more often than others do.

A token and an expert are compared by the log-likelihood ratio of their 2 x 2 table (Dunning 1993): how surprising it
would be if the choice did not depend on the token. Only tokens that choose the expert more often than average count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.analysis.tallies import Floats, computed, layer_uses
from hotset.analysis.token_text import Decode
from hotset.trace import Trace

LEAST_OCCURRENCES = 5
LEAST_SURPRISE = 20.0
"""The least log-likelihood ratio; by chance one pair in 130,000 has it."""
TOKENS = 8
_MAX_CELLS = 1 << 24


class Driver(NamedTuple):
    """A token and how it uses one expert."""

    token: int
    occurrences: int
    uses: int  # occurrences that chose the expert
    surprise: float


@dataclass(frozen=True)
class DrivenExpert:
    """An expert and the tokens that drive it most, most surprising first."""

    layer: int
    expert: int
    uses: int
    tokens: int  # that ran through the layer
    drivers: tuple[Driver, ...]

    @property
    def surprise(self) -> float:
        """That of the tokens that are named, per use of the expert: high where few tokens explain most of its uses."""
        return sum(driver.surprise for driver in self.drivers) / max(self.uses, 1)

    def as_dict(self, text_of: Decode | None = None) -> dict[str, Any]:
        """The expert as plain values, for JSON; the text of its tokens is None where it is not known."""
        texts = [None if text_of is None else text_of(driver.token) for driver in self.drivers]
        return {
            "layer": self.layer, "expert": self.expert, "uses": self.uses, "tokens": self.tokens,
            "drivers": [
                driver._asdict() | {"text": text} for driver, text in zip(self.drivers, texts, strict=True)
            ],
        }  # fmt: skip


def find_drivers(trace: Trace, most: int = TOKENS) -> list[DrivenExpert] | None:
    """For every expert the tokens that drive it, by layer and expert; None where the trace has no token ids."""
    if trace.token_ids is None:
        return None
    kinds, of_token = np.unique(trace.token_ids, return_inverse=True)
    found = []
    for layer in range(trace.shape.layers):
        found += _find_in_layer(trace, layer, kinds, of_token, most)
    return found


def _find_in_layer(
    trace: Trace, layer: int, kinds: npt.NDArray[Any], of_token: npt.NDArray[Any], most: int
) -> list[DrivenExpert]:
    ran = computed(trace, layer)
    occurrences = np.bincount(of_token[ran], minlength=len(kinds))
    told = np.flatnonzero(occurrences >= LEAST_OCCURRENCES)
    room = max(1, _MAX_CELLS // trace.shape.experts)
    if len(told) > room:  # the most frequent ones
        told = np.sort(told[np.argsort(-occurrences[told], kind="stable")[:room]])
    place = np.full(len(kinds), -1, np.int64)
    place[told] = np.arange(len(told))
    tokens = int(ran.sum())
    total = layer_uses(trace, layer, np.zeros(trace.tokens, np.int64), 1)[0]
    uses = layer_uses(trace, layer, place[of_token], len(told))
    surprise = log_likelihood(uses, occurrences[told][:, None], total[None], tokens)
    ranked = np.argsort(-surprise, axis=0, kind="stable")[:most]
    found = []
    for expert in range(trace.shape.experts):
        drivers = [
            Driver(int(kinds[told[t]]), int(occurrences[told[t]]), int(uses[t, expert]), float(surprise[t, expert]))
            for t in ranked[:, expert].tolist()
            if surprise[t, expert] >= LEAST_SURPRISE
        ]
        if drivers:
            found.append(DrivenExpert(layer, expert, int(total[expert]), tokens, tuple(drivers)))
    return found


def log_likelihood(
    uses: npt.NDArray[Any], occurrences: npt.NDArray[Any], total: npt.NDArray[Any], tokens: int
) -> Floats:
    """Twice the log-likelihood ratio of "uses depend on the token" against "they do not"; 0 for uses below average."""
    rest = [
        (uses, occurrences * total),
        (occurrences - uses, occurrences * (tokens - total)),
        (total - uses, (tokens - occurrences) * total),
        (tokens - occurrences - total + uses, (tokens - occurrences) * (tokens - total)),
    ]
    ratio = sum(_term(np.asarray(seen, np.float64), expected / max(tokens, 1)) for seen, expected in rest)
    above = uses * tokens > occurrences * total
    return np.where(above, 2 * np.asarray(ratio), 0.0)


def _term(seen: Floats, expected: Floats) -> Floats:
    there = (seen > 0) & (expected > 0)
    return seen * np.log(np.divide(seen, expected, out=np.ones_like(seen), where=there))


def most_driven(found: list[DrivenExpert], per_layer: int, most: int) -> list[DrivenExpert]:
    """The experts of each layer that tokens drive most, evenly over layers where there are many."""
    best: dict[int, list[DrivenExpert]] = {}
    for each in sorted(found, key=lambda one: -one.surprise):
        own = best.setdefault(each.layer, [])
        if len(own) < per_layer:
            own.append(each)
    layers = sorted(best)
    while sum(len(best[layer]) for layer in layers) > most and any(len(best[layer]) > 1 for layer in layers):
        for layer in layers:
            del best[layer][max(1, len(best[layer]) - 1) :]
    kept = layers[:: max(1, -(-sum(len(best[layer]) for layer in layers) // most))]
    return [each for layer in kept for each in best[layer]]

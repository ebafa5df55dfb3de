"""What several forecasts share: rates of use, probabilities by counting, and the step from one token to a pass."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from hotset.forecasts.base import Seen, compiled
from hotset.policies.base import Grid
from hotset.shape import ModelShape

_MEMORY = 4096.0  # tokens; a rate of use is a mean over about so many
_CREDIT = 8.0  # tokens that the even start of a rate counts for
MAX_TRIALS = 8192.0
"""At so many trials a count is halved, so that the learnt probability can still move."""
_TINY = 1e-4  # no probability is nearer to 0 or 1 than this when it becomes odds


class Rates(NamedTuple):
    """How often a token uses each expert."""

    rate: Grid
    seen: Any  # float64 [layers], tokens that the rates rest on


def start_rates(shape: ModelShape) -> Rates:
    """Every expert alike, until counts say otherwise."""
    return Rates(
        np.full((shape.layers, shape.experts), shape.top_k / shape.experts),
        np.full(shape.layers, _CREDIT),
    )


@compiled
def mix_rates(rates: Rates, seen: Seen) -> None:
    """Take one event into its layer's rates."""
    rates.seen[seen.layer] = min(rates.seen[seen.layer] + seen.tokens, _MEMORY)
    fresh = min(seen.tokens / rates.seen[seen.layer], 1.0)
    row = rates.rate[seen.layer]
    for e in range(len(row)):
        row[e] *= 1.0 - fresh
    for i in range(len(seen.experts)):
        row[seen.experts[i]] += fresh * seen.counts[i] / seen.tokens


@compiled
def count(cell: Any, hits: float, trials: float) -> None:
    """Add to a pair of hits and trials; one that has grown long forgets half."""
    cell[0] += hits
    cell[1] += trials
    if cell[1] > MAX_TRIALS:
        cell[0] *= 0.5
        cell[1] *= 0.5


@compiled
def learnt(cell: Any, prior: float, weight: float) -> Any:
    """The share of hits, beginning at a prior that counts for `weight` trials."""
    return (cell[0] + weight * prior) / (cell[1] + weight)


@compiled
def tokens_ahead(seen: Seen, target: int) -> Any:
    """The tokens that the target's event will hold: of this pass as now, of the next after a prompt one."""
    return 1 if target <= seen.layer and seen.phase == 0 else seen.tokens


@compiled
def spread(out: Any, tokens: int) -> None:
    """From the probability that one token uses an expert to the probability that any of several does."""
    for e in range(len(out)):
        out[e] = min(max(out[e], 0.0), 1.0)
    if tokens > 1:
        for e in range(len(out)):
            out[e] = 1.0 - (1.0 - out[e]) ** tokens


@compiled
def log_odds(probability: float) -> Any:
    """The logit, kept finite."""
    bounded = min(max(probability, _TINY), 1.0 - _TINY)
    return math.log(bounded / (1.0 - bounded))

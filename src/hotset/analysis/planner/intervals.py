"""How far a token's time may be off: of the workload, the machine's rates, and the planner's own model."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from hotset.analysis.planner.hits import HitCurve
from hotset.analysis.planner.rates import Engine
from hotset.analysis.planner.times import TokenTimes

MODEL_SPREAD, GPU_MODEL_SPREAD = 0.165, 0.28
"""What the model of a token's time leaves out: fitted for nine in ten to lie inside to the committed settings of one
domain on a CPU, and of one model on a GPU; judged on those of another (11 of 12, 5 of 5; docs/results/planner.md)."""
_DRAWS = 200
_QUANTILE = 1.645  # nine in ten of a normal distribution lie within so many deviations
_WIDEST = 0.9
_ONE_REQUEST_SPREAD = 0.15  # of a workload whose requests cannot be compared


def share_of(times: TokenTimes, curve: HitCurve, slots: int, token_s: float, misses_spread: float) -> float:
    """How far a token's time may be off, as a share of it; `misses_spread`: as a share of the misses.

    The parts are taken to have nothing to do with each other.
    """
    requests = _bootstrap_s(times, curve, slots) / token_s
    workload = misses_spread * max(token_s - times.resident_s, 0.0) / token_s
    own = MODEL_SPREAD if times.rates.engine is Engine.CPU else GPU_MODEL_SPREAD
    return min(math.hypot(requests, workload, times.rates.spread, own), _WIDEST)


def interval(
    times: TokenTimes, curve: HitCurve, slots: int, token_s: float, misses_spread: float = 0.0
) -> tuple[float, float]:
    """Between which times a token is expected to lie, in about nine of ten cases (`MODEL_SPREAD` says in how many)."""
    share = share_of(times, curve, slots, token_s, misses_spread)
    return token_s / (1 + share), token_s * (1 + share)


def _bootstrap_s(times: TokenTimes, curve: HitCurve, slots: int) -> float:
    """How far a token's time lies from its mean, in seconds, were the requests others of the same kind."""
    costs = times.by_missing()
    at = np.interp(slots, curve.slots, np.arange(len(curve.slots)))
    below, above = math.floor(at), math.ceil(at)
    events: npt.NDArray[np.float64] = curve.events[below] + (at - below) * (curve.events[above] - curve.events[below])
    spent, tokens = events @ costs, curve.tokens
    counted = tokens > 0
    spent, tokens = spent[counted], tokens[counted]
    if len(tokens) < 3:
        return 0.0 if slots >= curve.slots[-1] else _ONE_REQUEST_SPREAD * float(spent.sum() / tokens.sum())
    draws = np.random.default_rng(0).integers(0, len(tokens), (_DRAWS, len(tokens)))
    return _QUANTILE * float((spent[draws].sum(axis=1) / tokens[draws].sum(axis=1)).std())

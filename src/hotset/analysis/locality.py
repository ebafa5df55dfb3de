"""How soon experts are used again: repeats by lag and reuse distances, each against chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.analysis.tallies import Floats, Ints, Mask, layer_uses, ratio
from hotset.trace import Phase, Trace

LAGS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_BINS = 24


@dataclass(frozen=True, eq=False)
class Repeats:
    """The share of a token's experts that the token so many places before it in the request used, too."""

    phase: Phase  # the tokens that were looked at: those of answers, or of prompts where there are no answers
    lags: tuple[int, ...]
    rate: Floats  # [lags, layers]
    overall: Floats  # [lags]
    even: float  # chance if all experts were used alike: k / E
    popularity: float  # chance if tokens chose on their own with the shares of the whole workload
    request: float  # and with the shares of their own request


@dataclass(frozen=True, eq=False)
class Reuse:
    """How far apart two uses of one expert are, summed over layers."""

    steps: Ints  # [bins], uses of which the last use was 2^(b-1)+1 to 2^b steps ago
    steps_by_chance: Floats  # [bins], if every step used it with its own share
    depth: Ints  # [experts], uses found at this depth of the layer's stack of last uses
    first: int  # first uses


def measure_repeats(trace: Trace) -> Repeats:
    """Repeats at every lag that a request is long enough for."""
    phase = Phase.DECODE if trace.count(Phase.DECODE) else Phase.PREFILL
    order = np.argsort(trace.request, kind="stable")
    longest = int(np.bincount(trace.request).max())
    lags = tuple(lag for lag in LAGS if lag < longest)
    repeated, asked = np.zeros((2, len(lags), trace.shape.layers), np.int64)
    for i, lag in enumerate(lags):
        later, sooner = order[lag:], order[:-lag]
        pairs = (trace.request[later] == trace.request[sooner]) & (trace.phase[later] == phase)
        for layer in range(trace.shape.layers):
            repeated[i, layer], asked[i, layer] = _compare(trace, layer, later[pairs], sooner[pairs])
    popularity, request = _chances(trace, trace.phase == phase)
    shape = trace.shape
    overall = ratio(repeated.sum(axis=1), asked.sum(axis=1))
    return Repeats(phase, lags, ratio(repeated, asked), overall, shape.top_k / shape.experts, popularity, request)


def _compare(trace: Trace, layer: int, later: npt.NDArray[Any], sooner: npt.NDArray[Any]) -> tuple[int, int]:
    """How many uses of later tokens repeat one of the sooner token, of how many."""
    now, before = trace.experts[later, layer], trace.experts[sooner, layer]
    known = (now >= 0) & (before >= 0).any(axis=1)[:, None]
    same = np.zeros(now.shape, np.bool_)
    for k in range(before.shape[1]):
        same |= now == before[:, k : k + 1]
    return int(np.count_nonzero(known & same)), int(np.count_nonzero(known))


def _chances(trace: Trace, chosen: Mask) -> tuple[float, float]:
    """Repeats of two different tokens drawn at random: from the whole workload, and from one request."""
    group = np.where(chosen, trace.request, -1)
    both, own, uses, own_uses = 0.0, 0.0, 0.0, 0.0
    for layer in range(trace.shape.layers):
        counts = layer_uses(trace, layer, group, trace.requests).astype(np.float64)
        ran = chosen & (trace.experts[:, layer] >= 0).any(axis=1)
        tokens = np.bincount(trace.request[ran], minlength=trace.requests)
        several = tokens > 1
        total, everyone = counts.sum(axis=0), int(tokens.sum())
        if everyone > 1:
            both += float((total * (total - 1)).sum()) / (everyone - 1)
            uses += float(total.sum())
        pairs = (counts * (counts - 1)).sum(axis=1)[several] / (tokens[several] - 1)
        own += float(pairs.sum())
        own_uses += float(counts[several].sum())
    return both / uses if uses else float("nan"), own / own_uses if own_uses else float("nan")


def measure_reuse(trace: Trace) -> Reuse:
    """Steps and stack depths between two uses, of decode steps, or of prompts where there are no others."""
    from hotset.sim.curve import lru_curve

    events = trace.events()
    phase = Phase.DECODE if (events.phase == Phase.DECODE).any() else Phase.PREFILL
    sizes = np.diff(events.start)
    of_entry, expert = np.repeat(np.arange(len(events)), sizes), events.expert
    steps, chance = np.zeros(_BINS, np.int64), np.zeros(_BINS)
    for layer in range(trace.shape.layers):
        own = (events.layer == layer) & (events.phase == phase)
        number = np.cumsum(own) - 1
        entries = own[of_entry]
        more, more_chance = _intervals(number[of_entry[entries]], expert[entries], int(own.sum()))
        steps += more
        chance += more_chance
    curve = lru_curve(events, phase=phase)
    depth = curve.found.sum(axis=0)
    return Reuse(steps, chance, depth, curve.accesses - int(depth.sum()))


def _intervals(step: npt.NDArray[Any], expert: npt.NDArray[Any], steps: int) -> tuple[Ints, Floats]:
    """Steps since the last use of the same expert in bins that double, and what chance would give."""
    order = np.lexsort((step, expert))
    step, expert = step[order], expert[order]
    since = np.diff(step)[np.diff(expert) == 0]
    found = np.bincount(np.ceil(np.log2(since)).astype(int), minlength=_BINS)[:_BINS]
    uses = np.bincount(expert)
    uses = uses[uses > 1]
    rate = uses / max(steps, 1)
    ends = np.append(0, 2.0 ** np.arange(_BINS))  # bin 0 is the very next step, bin b ends with step 2^b
    survive = (1 - rate)[:, None] ** ends[None]
    likely = ((uses - 1)[:, None] * -np.diff(survive, axis=1)).sum(axis=0)
    return found.astype(np.int64), likely

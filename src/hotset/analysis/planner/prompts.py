"""The time to the first token of a prompt: what its tokens have read, moved, decoded and computed, part after part."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotset.analysis.planner.model import BFLOAT16, PLAIN
from hotset.analysis.planner.rates import FEW_TOKENS, MANY_TOKENS, Engine, ExpertPoint, Matrices, Rates, weights_of
from hotset.analysis.planner.tiers import staging_rows
from hotset.analysis.planner.times import TokenTimes, together_s

CHUNK_TOKENS = 2048
"""Tokens of a prompt that are computed together, where memory is not short."""
FEW_RATIO = 3.5
"""The time of a packed expert with `FEW_TOKENS` over that with one, where it was not measured: 3.2 to 3.8 were seen."""
_PLAIN_BYTES = 2

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PromptTimes:
    """The times of prompts, from those of tokens and how unevenly experts are chosen."""

    times: TokenTimes
    popularity: Floats | None = None  # [experts], falling: the share of tokens that choose it; None: all alike

    def first_token_s(self, tokens: int, resident_share: float, far_share: float = 0.0) -> float:
        """The first token of a prompt of so many tokens; of the experts these shares are resident, and on disk alone.

        `far_share` is what RAM behind a GPU does not hold.
        """
        parts = math.ceil(tokens / CHUNK_TOKENS)
        return parts * self._part_s(max(round(tokens / parts), 1), resident_share, far_share)

    def _part_s(self, tokens: int, resident_share: float, far_share: float) -> float:
        """Tokens that go through the model together: every expert that one of them needs is read once per layer."""
        times, rates = self.times, self.times.rates
        model, size = times.model, times.precision.expert_bytes
        chances = self._chances()
        used, held = -np.expm1(tokens * np.log1p(-chances)), resident_share * model.experts
        absent = _beyond(model.experts, resident_share)
        missing = float(used @ absent)
        far = min(float(used @ _beyond(model.experts, 1 - far_share)), missing)
        moved_s = missing * size / (rates.prompt_miss_bytes_per_s or rates.miss_bytes_per_s)
        moved_s += far * size / rates.far_bytes_per_s
        each_s = _over_tokens(chances, expert_times_s(rates, times.precision.name, model.matrices, size, tokens))
        events_s = rates.event_s + float(each_s @ (1 - absent)) + float(each_s @ absent)
        if missing > 0:
            free = held - float(used @ (1 - absent)) + staging_rows(model.shape, rates.engine)
            early = min(free / missing, 1.0)  # has a row while residents are computed; the others wait for one
            events_s = rates.event_s + rates.partial_s + missing * rates.miss_s + rates.read_s
            events_s += together_s(float(each_s @ (1 - absent)), early * moved_s, rates)
            events_s += together_s(float(each_s @ absent), (1 - early) * moved_s, rates)
        events_s *= model.layers
        dense_s = max(model.read_bytes * tokens / rates.flops_per_s, model.read_bytes / rates.rest_bytes_per_s)
        layers_s = model.all_layers * (rates.prompt_layer_s or rates.layer_s)
        if rates.engine is not Engine.CPU and not missing > 0:
            return max(layers_s, dense_s + events_s)  # the host launches what comes next while the GPU computes
        return layers_s + dense_s + events_s

    def _chances(self) -> Floats:
        """How likely a token chooses each expert of a layer, the most popular first."""
        model = self.times.model
        if self.popularity is None:
            return np.full(model.experts, min(model.top_k / model.experts, 1 - 1e-12))
        return np.clip(self.popularity, 0.0, 1 - 1e-12)


def expert_times_s(rates: Rates, precision: str, matrices: Matrices, expert_bytes: int, most: int) -> Floats:
    """One expert with 0 to `most` tokens.

    Plain numbers take a time for their bytes and one for each token. Of packed ones few tokens are multiplied with the
    codes; for more a matrix is decoded once and multiplied as plain numbers are (always so on a GPU).
    """
    tokens = np.arange(most + 1)
    plain = precision if precision in PLAIN else BFLOAT16
    found = _plain_times_s(rates, plain, matrices, tokens)
    if precision not in PLAIN:
        found = found + _decode_s(rates, precision, matrices)
        if rates.engine is Engine.CPU:
            few_s = _few_times_s(rates, precision, matrices, expert_bytes, tokens)
            found = np.where(tokens <= FEW_TOKENS, few_s, found)
    found[0] = 0.0
    return found


def _plain_times_s(rates: Rates, precision: str, matrices: Matrices, tokens: npt.NDArray[np.int64]) -> Floats:
    """By the line through the times with one token and with many, or by the speeds of memory and products."""
    point, weights = rates.nearest(precision, matrices), weights_of(matrices)
    if point is None:
        one_s = rates.expert_s(precision, matrices, _PLAIN_BYTES * weights)
        return one_s + 2 * weights * tokens / rates.flops_per_s
    one_s, many_s = (_scaled(seconds, point, matrices) for seconds in (point.one_s, point.many_s))
    line: Floats = one_s + max(many_s - one_s, 0.0) * (tokens - 1) / (MANY_TOKENS - 1)
    return line


def _few_times_s(
    rates: Rates, precision: str, matrices: Matrices, expert_bytes: int, tokens: npt.NDArray[np.int64]
) -> Floats:
    """Packed matrices multiplied with few tokens: decoding in registers is hidden behind memory for the first alone."""
    one_s, point = rates.expert_s(precision, matrices, expert_bytes), rates.nearest(precision, matrices)
    ratio = FEW_RATIO if point is None or point.few_s is None else max(point.few_s / point.one_s, 1.0)
    line: Floats = one_s * (1 + (ratio - 1) * (tokens - 1) / (FEW_TOKENS - 1))
    return line


def _decode_s(rates: Rates, precision: str, matrices: Matrices) -> float:
    """Packed matrices written out as plain numbers: what they take more than plain ones where many tokens are measured.

    Where nothing is measured the plain numbers are written at the memory's speed, and on a GPU read again from there.
    """
    own, plain = rates.nearest(precision, matrices), rates.nearest(BFLOAT16, matrices)
    if own is not None and plain is not None and own.matrices == plain.matrices:
        return _scaled(max(own.many_s - plain.many_s, 0.0), own, matrices)
    passes = 1 if rates.engine is Engine.CPU else 2
    return passes * _PLAIN_BYTES * weights_of(matrices) / rates.memory_bytes_per_s


def _scaled(seconds: float, point: ExpertPoint, matrices: Matrices) -> float:
    """A time of a measured expert for one of another size."""
    return seconds * weights_of(matrices) / weights_of(point.matrices)


def _over_tokens(chances: Floats, each_s: Floats) -> Floats:
    """The time of each expert of a layer, by how many of the tokens choose it: independent draws."""
    most = len(each_s) - 1
    numbers = np.arange(most + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, most + 1)))])
    ways = logs[-1] - logs - logs[::-1]
    kinds, places = np.unique(chances, return_inverse=True)
    found = [
        np.exp(ways + numbers * math.log(chance) + (most - numbers) * math.log1p(-chance)) @ each_s if chance else 0.0
        for chance in kinds.tolist()
    ]
    return np.array(found)[places]


def _beyond(experts: int, share: float) -> Floats:
    """Of each expert, the most popular first, how much of it lies beyond a share of them all."""
    found: Floats = np.clip(np.arange(1, experts + 1) - share * experts, 0.0, 1.0)
    return found

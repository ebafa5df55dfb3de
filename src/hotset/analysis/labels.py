"""Which experts serve which kind of request: uses by label, distances between labels, and both against chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.analysis.tallies import Floats, Ints, ratio, uses_by
from hotset.trace import Trace

MAX_VALUES = 24
"""The most values of a label that are told apart; the values with fewest tokens become one."""
ENOUGH = 20
"""An expert is compared for a label it has, or would have by chance, so many uses from."""
PERMUTATIONS = 20
OTHERS = "(others)"
TRACE = "trace"
"""The label that tells several traces apart."""
_MAX_CELLS = 1 << 24


@dataclass(frozen=True, eq=False)
class Chance:
    """What the same figures are when labels are dealt to the requests at random."""

    divergence: Floats  # [permutations], mean over all pairs and layers, in bits
    of_pairs: Floats  # [values, values], mean over permutations and layers
    largest_lift: Floats  # [permutations, values]


@dataclass(frozen=True, eq=False)
class LabelStudy:
    """The uses of every expert by the values of one label."""

    key: str
    values: tuple[str, ...]
    requests: Ints  # [values]
    tokens: Ints  # [values]
    uses: Ints  # [values, layers, experts]
    chance: Chance | None = field(default=None)  # None where all values have one request, or the trace is too large

    @property
    def divergence(self) -> Floats:
        """The corrected Jensen-Shannon divergence of each pair of values in each layer, in bits: [n, n, layers]."""
        return corrected_divergence(self.uses)

    @property
    def mean_divergence(self) -> Floats:
        """The mean divergence over all pairs, by layer."""
        return _mean(self.divergence[np.triu_indices(len(self.values), 1)], axis=0)

    @property
    def distance(self) -> Floats:
        """The Jensen-Shannon distance of each pair: the root of the mean divergence over layers, 0 to 1."""
        mean = _mean(self.divergence, axis=2)
        return np.sqrt(np.maximum(mean, 0))

    @property
    def distance_by_chance(self) -> Floats | None:
        """The same with labels dealt at random to the requests."""
        return None if self.chance is None else np.sqrt(np.maximum(self.chance.of_pairs, 0))

    def mean_distances(self) -> tuple[float, float | None]:
        """The mean distance over all pairs, and by chance."""
        pairs, chance = np.triu_indices(len(self.values), 1), self.distance_by_chance
        return float(np.nanmean(self.distance[pairs])), None if chance is None else float(np.nanmean(chance[pairs]))

    @property
    def above_chance_by(self) -> float:
        """How far the mean distance is above chance; minus infinity where chance is not known."""
        mean, chance = self.mean_distances()
        return -np.inf if chance is None or not np.isfinite(mean - chance) else mean - chance

    @property
    def lift(self) -> Floats:
        """The part of an expert's uses that is a value's, over the value's part of all uses of the layer."""
        return lift_of(self.uses)

    @property
    def lift_by_chance(self) -> Floats | None:
        """The largest lift that each value had in any dealing of labels."""
        return None if self.chance is None else np.asarray(self.chance.largest_lift.max(axis=0))

    def above_chance(self) -> Ints:
        """How many experts of each layer serve some value more than any did by chance."""
        limit = np.inf if self.lift_by_chance is None else self.lift_by_chance[:, None, None]
        above = (self.lift > limit) & _enough(self.uses)
        return np.asarray(np.count_nonzero(above.any(axis=0), axis=1).astype(np.int64))

    def strongest(self, number: int) -> list[dict[str, Any]]:
        """The experts that serve one value most above its share, and above what the value has by chance."""
        lift = np.where(_enough(self.uses), self.lift, -1.0)
        limit = self.lift_by_chance
        over = lift if limit is None else lift / np.maximum(limit, 1)[:, None, None]
        order = np.argsort(-over, axis=None, kind="stable")[:number]
        places = np.stack(np.unravel_index(order, lift.shape), axis=1).tolist()
        all_uses = self.uses.sum(axis=0)
        return [
            {
                "layer": layer,
                "expert": expert,
                "value": self.values[value],
                "uses": int(self.uses[value, layer, expert]),
                "share": float(self.uses[value, layer, expert] / all_uses[layer, expert]),
                "lift": float(lift[value, layer, expert]),
                "largest_by_chance": None if limit is None else float(limit[value]),
            }
            for value, layer, expert in places
            if lift[value, layer, expert] > 1
        ]

    def specialised(self, lift: float = 2.0) -> Ints:
        """How many experts of each layer serve some value so many times more than its share."""
        above = (self.lift >= lift) & _enough(self.uses)
        return np.asarray(np.count_nonzero(above.any(axis=0), axis=1).astype(np.int64))


def corrected_divergence(uses: Ints) -> Floats:
    """The Jensen-Shannon divergence of all pairs in bits, less what samples of these sizes have by chance.

    `uses` is [n, layers, experts]; the result [n, n, layers] is not a number where one of the two has no uses. The bias
    is (E - 1) / (8 ln 2) (1/n_p + 1/n_q), and what is left can be slightly below 0.
    """
    sizes = uses.sum(axis=2)
    share = np.nan_to_num(ratio(uses, sizes[:, :, None]))
    n, layers, experts = uses.shape
    found = np.full((n, n, layers), np.nan)
    for a in range(n):
        for b in range(a, n):
            known = (sizes[a] > 0) & (sizes[b] > 0)
            bias = (experts - 1) / (8 * np.log(2)) * (1 / np.maximum(sizes[a], 1) + 1 / np.maximum(sizes[b], 1))
            value = np.zeros(layers) if a == b else jensen_shannon(share[a], share[b]) - bias
            found[a, b] = found[b, a] = np.where(known, value, np.nan)
    return found


def jensen_shannon(p: Floats, q: Floats) -> Floats:
    """The Jensen-Shannon divergence of distributions along the last axis, in bits."""
    middle = (p + q) / 2
    return (_relative_entropy(p, middle) + _relative_entropy(q, middle)) / 2


def _relative_entropy(p: Floats, q: Floats) -> Floats:
    there = p > 0
    quotient = np.divide(p, q, out=np.ones_like(p), where=there)
    bits: Floats = (p * np.log2(quotient)).sum(axis=-1)
    return bits


def lift_of(uses: Ints) -> Floats:
    """The part of each expert's uses by a value, over the value's part of all uses of the layer."""
    of_expert = ratio(uses, uses.sum(axis=0)[None])
    of_layer = ratio(uses.sum(axis=2), uses.sum(axis=(0, 2))[None])
    return np.where(of_layer[:, :, None] > 0, ratio(of_expert, of_layer[:, :, None]), np.nan)


def _enough(uses: Ints) -> npt.NDArray[np.bool_]:
    """Where uses, or those expected by chance, suffice to compare."""
    expected = np.nan_to_num(uses.sum(axis=0)[None] * ratio(uses.sum(axis=2), uses.sum(axis=(0, 2))[None])[:, :, None])
    enough: npt.NDArray[np.bool_] = np.maximum(uses, expected) >= ENOUGH
    return enough


def _mean(values: Floats, axis: int) -> Floats:
    """The mean of what is known."""
    known = np.isfinite(values)
    return ratio(np.where(known, values, 0).sum(axis=axis), known.sum(axis=axis))


def study_label(trace: Trace, key: str, *, permutations: int = PERMUTATIONS, seed: int = 0) -> LabelStudy | None:
    """Tell requests apart by one label; None where it has fewer than two values."""
    told = _values_of(trace, key)
    values = [value for value, _ in told.most_common(MAX_VALUES if len(told) <= MAX_VALUES else MAX_VALUES - 1)]
    if len(told) < 2:
        return None
    names = [*sorted(values), OTHERS] if len(told) > len(values) else sorted(values)
    place = {value: names.index(value if value in values else OTHERS) for value in told}
    of_request = np.array([place[label[key]] if key in label else -1 for label in trace.labels])
    group = of_request[trace.request]
    known = of_request >= 0
    return LabelStudy(
        key,
        tuple(names),
        np.bincount(of_request[known], minlength=len(names)).astype(np.int64),
        np.bincount(group[group >= 0], minlength=len(names)).astype(np.int64),
        uses_by(trace, group, len(names)),
        _chance(trace, of_request, len(names), permutations, seed),
    )


def _values_of(trace: Trace, key: str) -> Counter[str]:
    """The tokens of each value of a label."""
    tokens = np.bincount(trace.request, minlength=trace.requests)
    found: Counter[str] = Counter()
    for label, size in zip(trace.labels, tokens.tolist(), strict=False):
        if key in label:
            found[label[key]] += size
    return found


def _chance(trace: Trace, of_request: npt.NDArray[Any], values: int, permutations: int, seed: int) -> Chance | None:
    """Deal the labels to the requests at random, several times: tokens of one request stay together."""
    known = np.flatnonzero(of_request >= 0)
    cells = trace.requests * trace.shape.layers * trace.shape.experts
    if permutations < 1 or cells > _MAX_CELLS or np.bincount(of_request[known]).max() < 2:
        return None
    uses = uses_by(trace, trace.request, trace.requests)[known]
    random = np.random.default_rng(seed)
    divergence, largest = np.zeros(permutations), np.zeros((permutations, values))
    of_pairs, pairs = np.zeros((values, values)), np.triu_indices(values, 1)
    for i in range(permutations):
        dealt = random.permutation(of_request[known])
        mixed = np.stack([uses[dealt == value].sum(axis=0) for value in range(values)])
        by_pair = _mean(corrected_divergence(mixed), axis=2)
        of_pairs += by_pair / permutations
        divergence[i] = _mean(by_pair[pairs], axis=0)
        largest[i] = np.where(_enough(mixed), lift_of(mixed), 0.0).max(axis=(1, 2))
    return Chance(divergence, of_pairs, largest)


def study_labels(trace: Trace, keys: Sequence[str], most: int = 3) -> list[LabelStudy]:
    """Tell requests apart by each of these labels, and keep those with the largest distances above chance.

    Of labels that do tell something, the one that only tells traces apart comes last: the prompts' own say more.
    """
    found = [study for key in keys if (study := study_label(trace, key)) is not None]
    return sorted(found, key=lambda s: (s.above_chance_by <= 0, s.key == TRACE, -s.above_chance_by))[:most]


def keys_to_study(trace: Trace, most: int = 8) -> list[str]:
    """The labels that tell requests apart by a few values, those with more values first."""
    found: dict[str, tuple[str, ...]] = {}
    there = dict.fromkeys(key for label in trace.labels for key in label)
    for key in sorted(there, key=lambda key: key == TRACE):  # a label of the prompts' own says more
        column = tuple(label.get(key, "") for label in trace.labels)
        different = len(set(column) - {""})
        several = different < len(column) or key == TRACE  # not one value for each request
        new = _partition(column) not in {_partition(other) for other in found.values()}
        if 2 <= different <= MAX_VALUES and several and new:
            found[key] = column
    return sorted(found, key=lambda key: (key == TRACE, -len(set(found[key]))))[:most]


def _partition(column: tuple[str, ...]) -> tuple[int, ...]:
    """A column of labels without their names: alike for two labels that tell the same requests apart."""
    first: dict[str, int] = {}
    return tuple(first.setdefault(value, len(first)) for value in column)

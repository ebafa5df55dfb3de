"""How long a token takes, by how many experts of each event are missing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotset.analysis.planner.hits import HitCurve
from hotset.analysis.planner.model import PlannedModel, Precision
from hotset.analysis.planner.rates import Rates

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TokenTimes:
    """The times of one model in one precision on one machine."""

    model: PlannedModel
    precision: Precision
    rates: Rates

    @property
    def expert_s(self) -> float:
        """One resident expert with one token."""
        return self.rates.expert_s(self.precision.name, self.model.matrices, self.precision.expert_bytes)

    @property
    def rest_s(self) -> float:
        """A token without what its experts take."""
        model, rates = self.model, self.rates
        return model.all_layers * rates.layer_s + model.read_bytes / rates.rest_bytes_per_s

    @property
    def resident_s(self) -> float:
        """A token with every expert resident."""
        return self.rest_s + self.model.layers * self.event_s(0, partial=False)

    def event_s(self, missing: int, *, partial: bool = True) -> float:
        """One event with so many experts missing; `partial`: whether the cache holds less than all."""
        rates = self.rates
        fixed_s = rates.event_s + (rates.partial_s if partial else 0.0) + missing * rates.miss_s
        moved_s = missing * self.precision.expert_bytes / rates.miss_bytes_per_s + (rates.read_s if missing else 0.0)
        return fixed_s + together_s(self.model.top_k * self.expert_s, moved_s, rates)

    def by_missing(self, *, partial: bool = True) -> Floats:
        """The time of an event for 0 to top_k missing experts."""
        return np.array([self.event_s(missing, partial=partial) for missing in range(self.model.top_k + 1)])

    def token_s(self, curve: HitCurve, weights: Floats | None = None, far: Floats | None = None) -> Floats:
        """A token at every size of the curve; more memory never takes longer, since it can be left alone.

        `far`, by size, is how many of its missing experts lie on disk only, behind the RAM of a GPU.
        """
        events = curve.per_token(weights)
        times_s = events @ self.by_missing()
        if far is not None:
            times_s = times_s + far * self.precision.expert_bytes / self.rates.far_bytes_per_s
        times_s[-1] = events[-1].sum() * self.event_s(0, partial=False)
        found: Floats = np.minimum.accumulate(self.rest_s + times_s)
        return found

    def floor_s(self, missed: float, far: float = 0.0) -> float:
        """The least time of a token: its bytes at the memory's speed, or the missed ones at the link's or disk's.

        Where products were seen to read faster than the memory was (other programs ran meanwhile), theirs is the speed.
        """
        model, rates, size = self.model, self.rates, self.precision.expert_bytes
        read_s = model.read_bytes / max(rates.memory_bytes_per_s, rates.rest_bytes_per_s)
        read_s += model.layers * model.top_k * min(size / rates.memory_bytes_per_s, self.expert_s)
        moved_s = max(missed * size / rates.miss_bytes_per_s, far * size / rates.far_bytes_per_s)
        return max(read_s, moved_s)


def together_s(compute_s: float, transfer_s: float, rates: Rates) -> float:
    """Compute and transfer that share a machine: both are slower as long as both go on.

    With `kept` of zero they follow each other.
    """
    if not transfer_s or not compute_s:
        return compute_s + transfer_s
    slow_transfer_s = transfer_s / rates.busy
    if rates.kept * slow_transfer_s <= compute_s:  # the transfer ends first
        return compute_s + slow_transfer_s * (1 - rates.kept)
    slow_compute_s = compute_s / rates.kept
    return slow_compute_s + transfer_s * (1 - slow_compute_s / slow_transfer_s)

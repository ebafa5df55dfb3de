"""Notices when a workload gives way to another: the experts in use are no longer those of a moment ago."""

from __future__ import annotations

import math

import numpy as np

from hotset.profile.statistics import Grid

_MEMORY = 0.8  # of the baseline: a span counts for half after three more
_SETTLE = 4  # spans before a shift can be told from noise
_DROP = 0.15
_SIGMAS = 4.0
_SIGMA_PER_MAD = 1.4826  # of a normal distribution


class WorkloadShiftDetector:
    """Compares each span of tokens with the baseline of the spans before it."""

    def __init__(self) -> None:
        self._baseline: Grid | None = None
        self._last: Grid | None = None  # not part of the baseline yet: a change in its middle would hide itself
        self._likeness: list[float] = []

    def take(self, uses: Grid) -> bool:
        """Take in the uses of one span, [layers, experts]; true if they break with the baseline."""
        if self._baseline is None:
            self._begin(uses)
            return False
        likeness = _cosine(self._baseline, uses)
        if self._is_break(likeness):
            self._begin(uses)
            return True
        self._likeness.append(likeness)
        if self._last is not None:
            self._baseline = _MEMORY * self._baseline + self._last
        self._last = uses.astype(float)
        return False

    def _begin(self, uses: Grid) -> None:
        self._baseline, self._last = uses.astype(float), None
        self._likeness = []

    def _is_break(self, likeness: float) -> bool:
        if len(self._likeness) < _SETTLE:
            return False
        usual = float(np.median(self._likeness[-16:]))
        spread = _SIGMA_PER_MAD * float(np.median(np.abs(np.array(self._likeness[-16:]) - usual)))
        return likeness < usual - max(_DROP, _SIGMAS * spread)


def _cosine(a: Grid, b: Grid) -> float:
    norm = math.sqrt(float((a * a).sum()) * float((b * b).sum()))
    return float((a * b).sum()) / norm if norm else 0.0

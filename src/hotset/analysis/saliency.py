"""Saliency: how much each expert of a model contributes, from a few sums over the tokens that reached it.

With X the tokens that chose an expert, g the weight its output gets and f the output before that weight, the sums are
those of 1, g, ||f||, ||f||^2 and g ||f|| over X, and the largest |f|; all measures follow from them. Sums can be added
up, so that runs can be merged and an interrupted run can go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hotset.errors import HotsetError
from hotset.profile import Fingerprint
from hotset.trace import Phase

Grid = npt.NDArray[np.float64]
SUMS = ("count", "gate", "norm", "square", "gated_norm")
"""What is summed over the tokens of an expert: 1, g, ||f||, ||f||^2, g ||f||."""
MIN_TOKENS = 30
"""Means over fewer tokens say little."""
SUPER_PERCENTILE, SUPER_SHARE, SUPER_LAYERS = 99.5, 0.1, 0.75
"""A super expert's largest activation is above this percentile of all, and this share of the largest; it lies in the
first layers, this share of them."""


@dataclass(frozen=True, eq=False)
class Saliency:
    """The sums of one model over some text, by phase, layer and expert."""

    fingerprint: Fingerprint
    sums: Grid  # [sums, phases, layers, experts]
    largest: Grid  # [phases, layers, experts]: the largest |f|
    tokens: npt.NDArray[np.int64]  # [phases]
    meta: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _, phases, layers, experts = wanted = (len(SUMS), len(Phase), *self.largest.shape[1:])
        if self.sums.shape != wanted or self.largest.shape != (phases, layers, experts):
            raise HotsetError(f"the sums have shape {self.sums.shape}, not {wanted}")
        if self.tokens.shape != (phases,) or (self.tokens < 0).any():
            raise HotsetError("the numbers of tokens must be one per phase, and not negative")
        if not np.isfinite(self.sums).all() or not (self.largest >= 0).all() or (self.sums[[0, 2, 3]] < 0).any():
            raise HotsetError("a sum is negative or no number: the model computes numbers that are not finite")

    @classmethod
    def empty(cls, fingerprint: Fingerprint, layers: int, experts: int, meta: dict[str, str]) -> Saliency:
        """Of a model that has seen nothing yet."""
        grid = (len(Phase), layers, experts)
        sums, largest = np.zeros((len(SUMS), *grid)), np.zeros(grid)
        return cls(fingerprint, sums, largest, np.zeros(len(Phase), np.int64), meta)

    @property
    def layers(self) -> int:
        """How many MoE layers the model has."""
        return int(self.largest.shape[1])

    @property
    def experts(self) -> int:
        """How many experts each layer has."""
        return int(self.largest.shape[2])

    def counts(self, phase: Phase | None = None) -> Grid:
        """How many tokens reached each expert [layers, experts], in one phase or in all."""
        return self._sum("count", phase)

    def scores(self, name: str, phase: Phase | None = None) -> Grid:
        """One measure of every expert [layers, experts], in one phase or over all; an expert without tokens has 0."""
        if name not in MEASURES:
            raise HotsetError(f"no measure is called {name:.40}: there are {', '.join(MEASURES)}")
        return MEASURES[name](self, phase)

    def measures(self) -> dict[str, Grid]:
        """All measures of every expert, over both phases, by name."""
        return {name: self.scores(name) for name in MEASURES}

    def super_experts(self) -> npt.NDArray[np.bool_]:
        """Experts [layers, experts] whose activations are far above all others: without them a model falls apart."""
        peaks = self.scores("largest")
        limit = max(float(np.percentile(peaks, SUPER_PERCENTILE)), SUPER_SHARE * float(peaks.max(initial=0.0)))
        early = np.arange(self.layers) < SUPER_LAYERS * self.layers
        return (peaks > limit) & early[:, None]

    def few(self) -> int:
        """How many experts were reached by so few tokens that their means say little."""
        return int((self.counts() < MIN_TOKENS).sum())

    def merged(self, others: Sequence[Saliency]) -> Saliency:
        """What this and other runs of the same model came to together."""
        for other in others:
            other.check(self.fingerprint, self.layers, self.experts)
        every = (self, *others)
        texts = [one.meta.get("text", "") for one in every]
        return Saliency(
            self.fingerprint,
            np.sum([one.sums for one in every], axis=0),
            np.max([one.largest for one in every], axis=0),
            np.sum([one.tokens for one in every], axis=0),
            self.meta | {"text": "; ".join(text for text in texts if text)},
        )

    def check(self, fingerprint: Fingerprint, layers: int, experts: int) -> None:
        """Raise HotsetError unless this is of the model given."""
        if (self.layers, self.experts) != (layers, experts):
            raise HotsetError(
                f"the saliency is of a model with {self.layers} x {self.experts} experts, and this one has "
                f"{layers} x {experts}: record it of this model"
            )
        if self.fingerprint != fingerprint:
            raise HotsetError(
                f"the saliency is of another model ({self.fingerprint.architecture}, other weights): record it of this "
                "model"
            )

    def save(self, path: str | Path) -> None:
        """Write it, whole or not at all."""
        from hotset.analysis.saliency_file import save_saliency

        save_saliency(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Saliency:
        """Read what was saved; any other file raises HotsetError."""
        from hotset.analysis.saliency_file import load_saliency

        return load_saliency(Path(path))

    def _sum(self, name: str, phase: Phase | None) -> Grid:
        found = self.sums[SUMS.index(name)]
        total: Grid = found.sum(axis=0) if phase is None else found[phase]
        return total

    def _mean(self, name: str, phase: Phase | None) -> Grid:
        return self._sum(name, phase) / np.maximum(self.counts(phase), 1)

    def _per_token(self, name: str, phase: Phase | None) -> Grid:
        tokens = int(self.tokens.sum() if phase is None else self.tokens[phase])
        return self._sum(name, phase) / max(tokens, 1)

    def _largest(self, phase: Phase | None) -> Grid:
        found: Grid = self.largest.max(axis=0) if phase is None else self.largest[phase]
        return found


MEASURES: dict[str, Callable[[Saliency, Phase | None], Grid]] = {
    "frequency": lambda s, p: s._per_token("count", p),
    "gate": lambda s, p: s._per_token("gate", p),
    "man": lambda s, p: s._mean("norm", p),
    "msan": lambda s, p: s._mean("square", p),
    "ean": lambda s, p: s._sum("norm", p),
    "reap": lambda s, p: s._mean("gated_norm", p),
    "largest": lambda s, p: s._largest(p),
}
"""Frequency, gate-weighted frequency, mean norm, mean square norm, sum of norms, mean of gate times norm, max |f|."""

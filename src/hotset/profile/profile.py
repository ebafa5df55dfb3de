"""A profile: which experts a workload uses, and what the policy learnt of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.errors import ProfileError
from hotset.shape import ExpertKey, ModelShape
from hotset.trace import Phase

Grid = npt.NDArray[np.float64]
State = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Which model a profile is of: its architecture, and a digest of a few of its tensors."""

    architecture: str
    digest: str

    def refuse(self, other: Fingerprint, *, allow_foreign: bool) -> str | None:
        """Why a profile of this model does not serve the other, if it does not."""
        if self.architecture != other.architecture:
            return f"it is of a {self.architecture} model, and this is a {other.architecture}"
        if self.digest != other.digest and not allow_foreign:
            return "it is of other weights: --allow-foreign uses it all the same, for a fine-tune of the same model"
        return None


@dataclass(frozen=True, eq=False)
class Profile:
    """What was learnt of one workload on one model."""

    shape: ModelShape
    fingerprint: Fingerprint
    uses: Grid  # [phases, layers, experts]: decayed counts of tokens that used an expert
    tokens: npt.NDArray[np.int64]  # [phases], all tokens ever seen
    created: str  # dates as 2026-11-15
    updated: str
    policy: str = ""
    learnt: State = field(default_factory=dict)  # the policy's state by name
    meta: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wanted = (len(Phase), self.shape.layers, self.shape.experts)
        if self.uses.shape != wanted:
            raise ProfileError(f"the counts have shape {self.uses.shape}, not {wanted}")
        if self.tokens.shape != (len(Phase),) or (self.tokens < 0).any():
            raise ProfileError("the numbers of tokens must be one per phase, and not negative")
        if not np.isfinite(self.uses).all() or (self.uses < 0).any():
            raise ProfileError("a count is negative or no number: the file was edited, or is damaged")

    def hotness(self) -> Grid:
        """How likely each expert is used by a token, as far as the counts tell: [layers, experts]; decode counts most."""
        decode, prefill = self.uses[Phase.DECODE], self.uses[Phase.PREFILL]
        total = decode + (prefill if not decode.any() else 0.1 * prefill)
        mass = total.sum(axis=1, keepdims=True)
        share: Grid = np.divide(total, mass, out=np.zeros_like(total), where=mass > 0)
        return share * self.shape.top_k

    def top(self, layer: int, count: int) -> list[tuple[ExpertKey, float]]:
        """The hottest experts of a layer, hottest first."""
        row = self.hotness()[layer]
        order = np.argsort(-row, kind="stable")[:count]
        return [(ExpertKey(layer, int(expert)), float(row[expert])) for expert in order]

    def check(self, shape: ModelShape, fingerprint: Fingerprint, *, allow_foreign: bool = False) -> None:
        """Raise ProfileError unless this profile serves the model given."""
        mine, theirs = self.shape, shape
        if (mine.layers, mine.experts) != (theirs.layers, theirs.experts):
            raise ProfileError(
                f"the profile is of a model with {mine.layers} x {mine.experts} experts, and this one has "
                f"{theirs.layers} x {theirs.experts}: use a profile of this model"
            )
        if why := self.fingerprint.refuse(fingerprint, allow_foreign=allow_foreign):
            raise ProfileError(f"the profile does not fit: {why}")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile; a file that is not a valid one raises ProfileError."""
        from hotset.profile.format import load_profile

        return load_profile(Path(path))

    def save(self, path: str | Path) -> None:
        """Write the profile, whole or not at all; equal profiles give equal bytes."""
        from hotset.profile.format import save_profile

        save_profile(self, Path(path))

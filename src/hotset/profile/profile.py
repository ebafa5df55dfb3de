"""A profile: which experts a workload uses, and what the policy learnt of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.checks import renamed
from hotset.errors import ProfileError
from hotset.profile.matrices import Matrices
from hotset.profile.statistics import NEVER, Counts, Grid, History, Statistics
from hotset.shape import ExpertKey, ModelShape
from hotset.trace import Phase

State = dict[str, npt.NDArray[Any]]
UNKNOWN = "unknown"
"""The architecture of a model without a name."""
RESIDENT, PINNED = 1, 2
"""What the residency of an expert says, bit by bit."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Which model a profile is of: its architecture, and a digest of a few of its tensors."""

    architecture: str
    digest: str

    def refuse(self, other: Fingerprint, *, allow_foreign: bool) -> str | None:
        """Why a profile of this model does not serve the other, if it does not."""
        unknown = UNKNOWN in (self.architecture, other.architecture)
        if self.architecture != other.architecture and not (unknown and allow_foreign):
            if unknown:
                return "the model that it is of is not known: --allow-foreign uses it all the same"
            return f"it is of a {self.architecture} model, and this is a {other.architecture}"
        if self.digest != other.digest and not allow_foreign:
            return "it is of other weights: --allow-foreign uses it all the same, for a fine-tune of the same model"
        return None


@renamed(seats="residency")
@dataclass(frozen=True, eq=False)
class Profile:
    """What was learnt of one workload on one model."""

    shape: ModelShape
    fingerprint: Fingerprint
    uses: Grid  # [phases, layers, experts]: decayed counts of tokens that used an expert
    tokens: Counts  # [phases], all tokens ever seen
    created: str  # times as 2026-11-15T09:30:00Z
    updated: str
    policy: str = ""
    learnt: State = field(default_factory=dict)  # of the policy; merged by "sum." or "mean.", as each name begins
    hits: Counts | None = None  # [phases, layers, experts], all ever counted
    misses: Counts | None = None
    residency: npt.NDArray[np.uint8] | None = None  # [layers, experts]: which were resident or pinned when it was saved
    history: History = field(default_factory=History.empty)
    matrices: Matrices | None = None  # what single requests used
    meta: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        grid = (self.shape.layers, self.shape.experts)
        wanted = (len(Phase), *grid)
        if self.uses.shape != wanted:
            raise ProfileError(f"the counts have shape {self.uses.shape}, not {wanted}")
        if self.tokens.shape != (len(Phase),) or (self.tokens < 0).any():
            raise ProfileError("the numbers of tokens must be one per phase, and not negative")
        if not np.isfinite(self.uses).all() or (self.uses < 0).any():
            raise ProfileError("a count is negative or no number: the file was edited, or is damaged")
        for counts in (self.hits, self.misses):
            if counts is not None and (counts.shape != wanted or (counts < 0).any()):
                raise ProfileError(f"hits and misses must be counts of shape {wanted}")
        if self.residency is not None and self.residency.shape != grid:
            raise ProfileError(f"the residency has shape {self.residency.shape}, not {grid}")
        if self.matrices is not None:
            self.matrices.check(self.shape)

    def hotness(self) -> Grid:
        """The probability that a token uses each expert, by the counts: [layers, experts]; decode counts most."""
        decode, prefill = self.uses[Phase.DECODE], self.uses[Phase.PREFILL]
        total = decode + (prefill if not decode.any() else 0.1 * prefill)
        mass = total.sum(axis=1, keepdims=True)
        share: Grid = np.divide(total, mass, out=np.zeros_like(total), where=mass > 0)
        return share * self.shape.top_k

    def statistics(self) -> Statistics:
        """The same as grids for tables and plots; what a profile does not keep is zero, and ages are unknown."""
        nothing = np.zeros_like(self.uses, np.int64)
        misses = nothing if self.misses is None else self.misses
        residency = np.zeros(self.uses.shape[1:], np.uint8) if self.residency is None else self.residency
        loads = misses.sum(axis=0)
        return Statistics(
            shape=self.shape,
            uses=self.uses,
            hits=nothing if self.hits is None else self.hits,
            misses=misses,
            tokens=self.tokens,
            loads=loads,
            loaded_bytes=loads * (self.shape.expert_bytes or 0),
            rate=self.hotness(),
            window=np.zeros_like(loads),
            age=np.full_like(loads, NEVER),
            resident=(residency & RESIDENT) > 0,
            pinned=(residency & PINNED) > 0,
            history=self.history,
        )

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

"""How every expert was used: the grids that tables, plots and profiles are made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.shape import ExpertKey, ModelShape
from hotset.trace import Phase

Grid = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
NEVER = -1
"""The age of an expert that was never used."""
MAX_SPANS = 4096
"""The most spans of time that are kept; older ones are forgotten."""


class Mark(NamedTuple):
    """A moment in a history, such as a change of workload, with a name."""

    tokens: int  # decode tokens since the history began
    label: str


@dataclass(frozen=True, eq=False)
class History:
    """Hits over time: one row per span of decode tokens, oldest first."""

    spans: Counts  # [rows, 3]: tokens, hits, misses
    marks: tuple[Mark, ...] = ()

    @classmethod
    def empty(cls) -> History:
        """A history in which nothing happened."""
        return cls(np.zeros((0, 3), np.int64))

    @property
    def tokens(self) -> Counts:
        """Decode tokens since the beginning, at the end of each span."""
        ends: Counts = np.cumsum(self.spans[:, 0])
        return ends

    @property
    def hit_rate(self) -> Grid:
        """The share of hits in each span; not a number where nothing was asked for."""
        hits, asked = self.spans[:, 1].astype(float), self.spans[:, 1:].sum(axis=1).astype(float)
        rates: Grid = np.divide(hits, asked, out=np.full(len(asked), np.nan), where=asked > 0)
        return rates


@dataclass(frozen=True, eq=False)
class Statistics:
    """What is known of every expert; arrays are [phases, layers, experts] or [layers, experts]."""

    shape: ModelShape
    uses: Grid  # [phases, layers, experts]: tokens that used it; decayed where they come from a profile
    hits: Counts  # [phases, layers, experts]
    misses: Counts  # [phases, layers, experts]
    tokens: Counts  # [phases]
    loads: Counts  # [layers, experts]: demand and background together
    loaded_bytes: Counts  # [layers, experts]
    rate: Grid  # [layers, experts]: decayed probability of use by a token
    window: Counts  # [layers, experts]: uses by the last tokens
    age: Counts  # [layers, experts]: tokens of its layer since the last use, or NEVER
    resident: npt.NDArray[np.bool_]
    pinned: npt.NDArray[np.bool_]
    history: History = field(default_factory=History.empty)

    def top(self, layer: int, count: int) -> list[dict[str, Any]]:
        """The hottest experts of a layer by decayed rate, each with all that is known of it."""
        order = np.argsort(-self.rate[layer], kind="stable")[:count]
        return [self.of(ExpertKey(layer, int(expert))) for expert in order]

    def of(self, key: ExpertKey) -> dict[str, Any]:
        """All that is known of one expert, as plain values."""
        whole = ("rate", "window", "age", "loads", "loaded_bytes", "resident", "pinned")
        found: dict[str, Any] = key._asdict() | {name: getattr(self, name)[key].item() for name in whole}
        for phase in (Phase.DECODE, Phase.PREFILL):
            counts = {name: getattr(self, name)[phase, *key].item() for name in ("uses", "hits", "misses")}
            found[phase.name.lower()] = counts
        return found

    def layer_hit_rates(self, phase: Phase = Phase.DECODE) -> Grid:
        """The hit rate of each layer; not a number where nothing was asked for."""
        hits = self.hits[phase].sum(axis=1).astype(float)
        asked = hits + self.misses[phase].sum(axis=1)
        rates: Grid = np.divide(hits, asked, out=np.full(len(hits), np.nan), where=asked > 0)
        return rates

    def covered_by(self, share: float) -> Grid:
        """The share of each layer's uses that its hottest experts take, so many of them."""
        count = max(1, round(share * self.shape.experts))
        uses = np.sort(self.uses.sum(axis=0), axis=1)[:, ::-1]
        total = uses.sum(axis=1)
        found: Grid = np.divide(uses[:, :count].sum(axis=1), total, out=np.zeros(len(total)), where=total > 0)
        return found

"""A modelled link: turns the misses of a replay into time. docs/design.md states the model."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.checks import number, put, text
from hotset.errors import HotsetError
from hotset.shape import ModelShape, parse_size
from hotset.trace import Phase
from hotset.trace.events import EventTable

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
_MAX = 1e18  # bytes and seconds beyond which nothing is modelled
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|ms|us|µs)")


class Times(NamedTuple):
    """What one phase of a replay would have taken."""

    stall_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Link:
    """A link that carries missing experts while resident ones compute."""

    bytes_per_s: float
    compute_s: float  # one pass with every expert resident
    latency_s: float = 0.0  # per event with a miss
    expert_share: float = 0.5  # of the compute that is experts

    def __post_init__(self) -> None:
        endless = isinstance(self.bytes_per_s, float) and self.bytes_per_s == math.inf  # what an oracle is held against
        for name in ("compute_s", "latency_s") if endless else ("bytes_per_s", "compute_s", "latency_s"):
            put(self, **{name: number(getattr(self, name), f"{name} of a link", 0, _MAX)})
        put(self, expert_share=number(self.expert_share, "expert_share of a link", 0, 1))
        if not (self.bytes_per_s > 0 and self.compute_s > 0):
            raise HotsetError("a link needs a speed and a compute time above 0, and an expert share from 0 to 1")

    def times(self, events: EventTable, misses: npt.NDArray[np.int32], phase: Phase) -> Times:
        """Stall and total time of all events of a phase."""
        chosen = events.phase == phase
        asked = np.diff(events.start)[chosen]
        missing = misses[chosen]
        layer_s = self.compute_s / events.shape.layers
        transfer_s = missing * ((events.shape.expert_bytes or 0) / self.bytes_per_s) + self.latency_s * (missing > 0)
        resident_s = layer_s * self.expert_share * (asked - missing) / asked
        stall_s = float(np.maximum(transfer_s - resident_s, 0.0).sum())
        return Times(stall_s, stall_s + layer_s * len(asked))

    def least_s(self, num_events: int, num_loads: int, shape: ModelShape) -> float:
        """The least time for so many events that load so many experts: all transfers travel while others compute."""
        compute_s = self.compute_s / shape.layers * num_events
        return max(compute_s, num_loads * ((shape.expert_bytes or 0) / self.bytes_per_s))


def parse_speed(speed: str) -> float:
    """Read a speed such as "25GB/s", in bytes per second."""
    word = text(speed, "a speed").strip()
    if not word.endswith("/s"):
        raise HotsetError(f'cannot read the speed "{speed}": write it as 25GB/s')
    return float(parse_size(word.removesuffix("/s")))


def parse_duration(duration: str) -> float:
    """Read a duration such as "4ms" or "250us", in seconds."""
    match = _DURATION.fullmatch(text(duration, "a duration").strip())
    if not match:
        raise HotsetError(f'cannot read the duration "{duration}": write it as 4ms, 250us or 0.5s')
    return float(match[1]) * _SECONDS[match[2]]

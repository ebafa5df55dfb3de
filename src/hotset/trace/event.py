"""The atom of every replay: all that one MoE layer asks for in one forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Phase(IntEnum):
    """Whether a forward pass reads a prompt or writes a new token."""

    PREFILL = 0
    DECODE = 1


@dataclass(frozen=True, slots=True)
class Event:
    """All distinct experts that one MoE layer needs in one forward pass; served together or not at all."""

    step: int
    layer: int
    experts: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: int
    phase: Phase

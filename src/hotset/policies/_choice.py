"""Options that choose themselves: of several, the one by which events were least surprising lately."""

from __future__ import annotations

from typing import Any

from hotset.policies.base import compiled

SMOOTH = 0.03
"""Uses that every expert is granted, so that a first use is no endless surprise."""
_MEMORY = 150.0  # tokens over which surprise is averaged, about


@compiled
def note_surprise(surprise: Any, choice: int, bits_per_use: float, layers: int) -> None:
    """Take the surprise of one event into the mean of a choice."""
    fresh = 1.0 / (_MEMORY * layers)
    surprise[choice] += fresh * (bits_per_use - surprise[choice])


@compiled
def choose(surprise: Any, chosen: Any) -> None:
    """The choice with the least surprise; the first of equals."""
    best = 0
    for choice in range(1, len(surprise)):
        if surprise[choice] < surprise[best]:
            best = choice
    chosen[0] = best

"""What moves experts into rows of memory: a `Mover` starts, a `Transfer` is waited for piece by piece.

An event owns its transfer. A mover knows no policy and no compute: it is told which experts go to which rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from hotset.trace import Phase


class Fetch(NamedTuple):
    """What one event needs brought in: experts in rising order, and where each of them goes."""

    layer: int
    experts: Sequence[int]
    rows: Sequence[int]  # of each expert; -1 for one that passes through staging
    counts: Sequence[int]  # the tokens that use each
    phase: Phase
    prefetched: Mapping[int, Any] = {}
    together: bool = False  # a single computation of all experts is cheaper than two
    timed: bool = True  # the time that is waited counts as stall


class Transfer(Protocol):
    """The experts of one event on their way."""

    awaited: Sequence[int]
    """The experts to wait for, in rising order; all others of the event can be computed with at once."""
    is_short: bool
    """Whether to wait for all and compute once: the transfer takes less time than a second computation costs."""
    moved_bytes: int
    stalled_s: float

    @property
    def all_started(self) -> bool:
        """Whether nothing waits for staging any more."""

    @property
    def done(self) -> bool:
        """Whether nothing is left to wait for."""

    def wait_any(self) -> dict[int, int]:
        """Wait for some experts, and return their rows; a failed transfer raises here."""

    def release(self, arrived: Mapping[int, int]) -> None:
        """Say that these experts were computed: their staging rows take the next."""


class Mover(Protocol):
    """Brings the experts of events into rows."""

    def start(self, fetch: Fetch) -> Transfer:
        """Put experts on their way."""

    def stop(self) -> None:
        """After a failure: cancel what can be, and return once nothing is written to a row any more."""


class Prefetching(Protocol):
    """One expert, or several, on their way before they are asked for."""

    @property
    def done(self) -> bool:
        """Whether nothing of it is under way any more."""

    def cancel(self) -> None:
        """Cancel what has not begun."""

    def cancel_and_wait(self) -> None:
        """Cancel, and return once nothing is written any more."""

"""What a recording holds, written beside its target again and again: a kill loses the last seconds of it at most."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from hotset.trace import Trace

EVERY_S = 2.0
AT_LEAST_EVERY_S = 60.0
_MAX_SHARE = 0.05  # of the time that may go into writing, as long as the last minute is safe


def part_of(out: Path) -> Path:
    """Where a recording is kept while it goes on: a trace like any other, next to where it will be."""
    return out.with_name(f"{out.stem}.part{out.suffix}")


class Checkpoints:
    """Writes a trace to its part file from time to time, and removes that at the end."""

    def __init__(self, out: Path, every_s: float = EVERY_S) -> None:
        self.path = part_of(out)
        self._every_s, self._wait_s = every_s, every_s
        self._last_s = time.monotonic()

    def offer(self, make: Callable[[], Trace]) -> None:
        """Write what has been recorded, if it is time for it."""
        began = time.monotonic()
        if began - self._last_s < self._wait_s:
            return
        make().save(self.path)
        self._last_s = time.monotonic()
        took_s = self._last_s - began
        self._wait_s = min(max(self._every_s, took_s / _MAX_SHARE), AT_LEAST_EVERY_S - took_s)

    def end(self) -> None:
        """Remove the part file: the whole is in its place."""
        self.path.unlink(missing_ok=True)

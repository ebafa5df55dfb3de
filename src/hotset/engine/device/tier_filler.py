"""Fills the RAM tier behind a device: kernels copy from it without asking whether an expert is there."""

from __future__ import annotations

import numpy as np

from hotset.engine.preload import BackgroundLoader
from hotset.engine.tiers import RamTier
from hotset.shape import ExpertKey


class TierFiller:
    """Reads all experts into a tier in the background; until that is done the host drives."""

    def __init__(self, tier: RamTier) -> None:
        self._tier = tier
        self._running: BackgroundLoader | None = None
        self._full = False

    def start(self) -> None:
        """Begin to read what is not there yet."""
        if self._tier.loader is not None:
            slot_of = self._tier.cache.table.slot_of
            order = [ExpertKey(*key) for key in np.ndindex(slot_of.shape)]
            self._running = BackgroundLoader(self._tier.loader.steps(order))

    def is_done(self) -> bool:
        """Whether every expert is there; goes on reading where an interrupted event has emptied slots again."""
        if self._running is not None and not self._running.busy:
            failed, self._running = self._running.error is not None, None
            if not failed and not self._is_full:
                self.start()
        return self._running is None and self._is_full

    def wait(self, timeout_s: float) -> bool:
        """Wait until the reading has ended; false if it has not in that time."""
        return self._running is None or self._running.wait(timeout_s)

    def stop(self) -> None:
        """Read nothing any more."""
        if self._running is not None:
            self._running.stop()

    @property
    def _is_full(self) -> bool:
        if not self._full:  # once it is, it stays so: the tier has a slot for each
            self._full = bool((self._tier.cache.table.slot_of >= 0).all())
        return self._full

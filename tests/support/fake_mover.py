"""A mover without disks and streams: experts arrive when, in which order and as slowly as a test wants, or fail."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence

from hotset.errors import StoreError
from hotset.transfer.mover import Fetch


class FakeMover:
    """Writes (layer, expert) into the rows of `memory`, a few at a time; `faults` fail once each."""

    def __init__(
        self,
        memory: dict[int, tuple[int, int]],
        staging: Sequence[int],
        *,
        at_once: int = 2,
        delay_s: float = 0.0,
        expert_bytes: int = 1,
        bytes_per_s: float = float("inf"),
        faults: Sequence[tuple[int, int]] = (),
        short: bool = False,
        seed: int = 0,
    ) -> None:
        self.memory, self.staging, self.at_once, self.short = memory, staging, at_once, short
        self.delay_s, self.expert_bytes, self.bytes_per_s = delay_s, expert_bytes, bytes_per_s
        self.faults = set(faults)
        self.stops = 0
        self.fetches: list[Fetch] = []
        self.random = random.Random(seed)  # noqa: S311

    def start(self, fetch: Fetch) -> FakeTransfer:
        self.fetches.append(fetch)
        return FakeTransfer(self, fetch)

    def stop(self) -> None:
        self.stops += 1


class FakeTransfer:
    """One event's experts: those that have a row in any order, then the others through staging."""

    def __init__(self, mover: FakeMover, fetch: Fetch) -> None:
        self.awaited = fetch.experts
        self.is_short = mover.short and fetch.together
        self.moved_bytes, self.stalled_s = 0, 0.0
        self._mover, self._layer = mover, fetch.layer
        self._pending = {expert: row for expert, row in zip(fetch.experts, fetch.rows, strict=True) if row >= 0}
        self._waiting = [expert for expert in fetch.experts if expert not in self._pending]
        self._free = list(mover.staging)
        self._stage()

    @property
    def all_started(self) -> bool:
        return not self._waiting

    @property
    def done(self) -> bool:
        return not self._pending

    def wait_any(self) -> dict[int, int]:
        mover, began = self._mover, time.perf_counter()
        most = len(self._pending) if self.is_short else min(mover.at_once, len(self._pending))
        arrived = {expert: self._pending.pop(expert) for expert in mover.random.sample(sorted(self._pending), most)}
        size = len(arrived) * mover.expert_bytes
        time.sleep(mover.delay_s + size / mover.bytes_per_s)
        for expert, row in arrived.items():
            if (self._layer, expert) in mover.faults:
                mover.faults.discard((self._layer, expert))
                raise StoreError(f"expert {expert} of layer {self._layer} cannot be moved")
            mover.memory[row] = (self._layer, expert)
        self.moved_bytes += size
        self.stalled_s += time.perf_counter() - began
        return arrived

    def release(self, arrived: Mapping[int, int]) -> None:
        self._free += [row for row in arrived.values() if row in self._mover.staging]
        self._stage()

    def _stage(self) -> None:
        while self._waiting and self._free:
            self._pending[self._waiting.pop(0)] = self._free.pop()

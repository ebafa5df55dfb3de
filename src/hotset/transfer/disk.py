"""The experts of events from disk: those that have a row at once, the others into staging as it becomes free."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from hotset.store.catalog import Bytes
from hotset.transfer.mover import Fetch
from hotset.transfer.readers import Rank, Readers
from hotset.transfer.reads import Load, ReadTransfer


class DiskMover:
    """Reader threads behind rows of ordinary memory."""

    def __init__(self, readers: Readers, staging: Sequence[int]) -> None:
        self.readers, self.staging = readers, staging

    def start(self, fetch: Fetch) -> DiskTransfer:
        """Have the experts of an event read; what was prefetched for it arrives with them."""
        return DiskTransfer(self, fetch)

    def stop(self) -> None:
        """Cancel all that events wait for or may ask for, and return once no thread writes to its rows any more."""
        self.readers.cancel_and_wait()

    def read(self, layer: int, expert: int) -> Bytes:
        """The bytes of one expert, in a staging row: good until that is used again."""
        transfer = ReadTransfer()
        self.readers.start(transfer, [Load(layer, expert, self.staging[0])])
        transfer.wait_any()
        return self.readers.memory_of(self.staging[0])

    def waited_s(self) -> float:
        """Of a device's compute, for copies: a disk has none."""
        return 0.0

    def close(self) -> None:
        """End the threads, and close the files."""
        self.readers.close()


class DiskTransfer:
    """Reads of one event: all of them are queued that have a row."""

    is_short = False

    def __init__(self, mover: DiskMover, fetch: Fetch) -> None:
        self.awaited = fetch.experts
        self.moved_bytes, self.stalled_s = 0, 0.0
        self._mover, self._layer = mover, fetch.layer
        self._source = mover.readers.catalog.layers[fetch.layer]
        self._transfer = ReadTransfer()
        self._pending = {expert: row for expert, row in zip(fetch.experts, fetch.rows, strict=True) if row >= 0}
        self._waiting = [expert for expert in fetch.experts if expert not in self._pending]
        self._free = list(mover.staging)
        self._read([expert for expert in self._pending if expert not in fetch.prefetched])
        for expert, transfer in fetch.prefetched.items():
            self.moved_bytes += self._source.read_bytes(expert)
            transfer.forward_to(self._transfer)
        self._stage()

    @property
    def all_started(self) -> bool:
        """Whether nothing waits for staging any more."""
        return not self._waiting

    @property
    def done(self) -> bool:
        """Whether nothing is left to wait for."""
        return not self._pending

    def wait_any(self) -> dict[int, int]:
        """Wait for at least one expert, and return the rows of all that have arrived."""
        began = time.perf_counter()
        arrived = sorted(self._transfer.wait_any())
        self.stalled_s += time.perf_counter() - began
        return {expert: self._pending.pop(expert) for expert in arrived}

    def release(self, arrived: Mapping[int, int]) -> None:
        """Have the next experts read into the staging rows of those that were computed."""
        self._free += [row for row in arrived.values() if row in self._mover.staging]
        self._stage()

    def _stage(self) -> None:
        """Have as many of the experts that only pass through read as there is staging for."""
        now = self._waiting[: len(self._free)]
        if now:
            del self._waiting[: len(now)]
            self._pending.update({expert: self._free.pop() for expert in now})
            self._read(now)

    def _read(self, experts: Sequence[int]) -> None:
        if experts:
            self.moved_bytes += sum(self._source.read_bytes(expert) for expert in experts)
            loads = [Load(self._layer, expert, self._pending[expert]) for expert in experts]
            self._mover.readers.start(self._transfer, loads)


class DiskPrefetch:
    """Experts that are read before they are asked for, each by itself, behind all that events wait for."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers

    def has(self, layer: int, expert: int) -> bool:  # noqa: ARG002 - a disk has every expert
        """Whether an expert can be prefetched."""
        return True

    def size_bytes(self, layer: int, expert: int) -> int:
        """What is moved for an expert."""
        return self._readers.catalog.layers[layer].read_bytes(expert)

    def start(self, loads: Sequence[Load]) -> list[ReadTransfer]:
        """Have experts read, in this order; returns the transfer of each."""
        transfers = [ReadTransfer() for _ in loads]
        for transfer, load in zip(transfers, loads, strict=True):
            self._readers.start(transfer, [load], Rank.PREFETCH)
        return transfers

    def promote(self, transfer: ReadTransfer) -> None:
        """Move a transfer among those that an event waits for."""
        self._readers.promote(transfer)

    def failed(self, transfer: ReadTransfer, expert: int) -> bool:
        """Whether a transfer met a fault: it is fetched again on demand, which says so if it meets it, too."""
        return transfer.done and transfer.error_of(expert) is not None

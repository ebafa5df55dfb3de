"""Copies from the RAM tier to the rows of a GPU, beside the compute; what the tier misses is read from disk first."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hotset.engine.arena import Arena
from hotset.engine.guard import Batch, Guard
from hotset.engine.host.streams import Streams
from hotset.engine.slots import SlotCache
from hotset.engine.tiers import RamTier
from hotset.shape import ExpertKey
from hotset.store.catalog import Bytes
from hotset.trace import Phase
from hotset.transfer.mover import Fetch
from hotset.transfer.reads import Load

SPLIT_BYTES = 24 << 20
"""Where less is missing, the copy takes no longer than the launch of a computation of its own for the residents."""
GROUP = 8
"""The experts that are copied together: few enough that the first of them compute while the next are on their way."""


class Group(NamedTuple):
    """Experts that are copied and computed together, and the half of the staging that they use, if any."""

    experts: list[int]
    rows: list[int]
    half: int | None


class CopyMover:
    """Copies from the RAM tier, on a stream of their own."""

    def __init__(self, tier: RamTier, arena: Arena, streams: Streams, staging: Sequence[int]) -> None:
        self.tier, self.streams, self.staging = tier, streams, staging
        self._rows = arena.memory.view(arena.slots, arena.slot_bytes)
        self._tier_rows = tier.arena.memory.view(tier.arena.slots, tier.arena.slot_bytes)

    def start(self, fetch: Fetch) -> CopyTransfer:
        """Put the first group of an event's experts on its way; the next ones follow as it is computed."""
        return CopyTransfer(self, fetch)

    def stop(self) -> None:
        """Wait for the device, and let the RAM tier put in order what was broken off."""
        self.streams.wait_for_all()
        self.tier.repair()

    def read(self, layer: int, expert: int) -> Bytes:
        """The bytes of one expert, in the RAM tier: good until it loads another."""
        ((_, row),) = self.tier.load(layer, [expert], [1], Phase.PREFILL, self.streams.wait_for_copies)
        block: Bytes = self.tier.arena.rows()[row]
        return block

    def waited_s(self) -> float:
        """The time that the compute waited for copies since the last call."""
        return self.streams.waited_s()

    def close(self) -> None:
        """End the tier's threads once nothing is copied out of it any more."""
        self.streams.wait_for_copies()
        self.tier.close()

    def used_bytes(self, layer: int) -> int:
        """What is copied of an expert's row."""
        return self.tier.catalog.layers[layer].layout.used_bytes

    def copy(self, used: int, row: int, source: int) -> None:
        """Copy so many bytes of a row of the tier to a row of the device, on the current stream."""
        self._rows[row, :used].copy_(self._tier_rows[source, :used], non_blocking=True)


class CopyTransfer:
    """The copies of one event, group by group: the disk behind the RAM tier makes the host wait for each."""

    def __init__(self, mover: CopyMover, fetch: Fetch) -> None:
        self.stalled_s = 0.0
        self._mover, self._fetch = mover, fetch
        self.moved_bytes = mover.used_bytes(fetch.layer) * len(fetch.prefetched)
        for copy in set(fetch.prefetched.values()):  # the compute from here on waits for what is still on its way
            if not copy.done:
                mover.streams.compute_waits_for(copy.copied)
        missing = [pair for pair in zip(fetch.experts, fetch.rows, strict=True) if pair[0] not in fetch.prefetched]
        self.awaited: Sequence[int] = [expert for expert, _ in missing]
        groups = _groups(missing, mover.staging, together=fetch.together)
        size = len(missing) * mover.tier.catalog.slot_bytes
        self.is_short = fetch.together and len(groups) == 1 and size < SPLIT_BYTES
        self._groups = deque(groups)
        self._computed: list[Any] = [None, None]  # marks the end of the compute with each half of the staging
        self._group: Group | None = None  # that is on its way
        self._copied: Any = None  # marks its end
        self._start_next()

    @property
    def all_started(self) -> bool:
        """Whether nothing waits for staging any more."""
        return not self._groups

    @property
    def done(self) -> bool:
        """Whether nothing is left to wait for."""
        return self._group is None

    def wait_any(self) -> dict[int, int]:
        """Let the compute from here on wait for the group that is on its way, and return its rows."""
        streams, group = self._mover.streams, self._group
        assert group is not None  # noqa: S101 - not after `done`
        if self._fetch.timed:
            streams.compute_waits_for(self._copied)
        else:
            streams.wait_for(self._copied)
        return dict(zip(group.experts, group.rows, strict=True))

    def release(self, arrived: Mapping[int, int]) -> None:  # noqa: ARG002 - groups are computed as a whole
        """Say that a group was computed, and put the next one on its way."""
        if self._group is not None and self._group.half is not None:
            self._computed[self._group.half] = self._mover.streams.mark()
        self._start_next()

    def _start_next(self) -> None:
        streams, self._group = self._mover.streams, None
        if not self._groups:
            return
        group = self._groups.popleft()
        if group.half is not None and self._computed[group.half] is not None:
            streams.copies_wait_for(self._computed[group.half])
        used = self._mover.used_bytes(self._fetch.layer)
        self.moved_bytes += used * len(group.experts)
        ready = self._mover.tier.where(self._fetch.layer, group.experts)
        if ready is None:
            self._copy_as_read(group, used)
        else:
            with streams.copying():
                for row, source in zip(group.rows, ready, strict=True):
                    self._mover.copy(used, row, source)
        self._copied = streams.mark_copies()
        self._group = group

    def _copy_as_read(self, group: Group, used: int) -> None:
        """Copy each expert as soon as the RAM tier has it."""
        mover, fetch = self._mover, self._fetch
        target = dict(zip(group.experts, group.rows, strict=True))
        count = dict(zip(fetch.experts, fetch.counts, strict=True))
        counts = [count[expert] for expert in group.experts]
        began = time.perf_counter()
        for expert, source in mover.tier.load(
            fetch.layer, group.experts, counts, fetch.phase, mover.streams.wait_for_copies
        ):
            self.stalled_s += time.perf_counter() - began
            with mover.streams.copying():
                mover.copy(used, target[expert], source)
            began = time.perf_counter()


def _groups(missing: Sequence[tuple[int, int]], staging: Sequence[int], *, together: bool) -> list[Group]:
    """What is copied together: experts that have a row, then others in two alternating halves of the staging."""
    placed = [pair for pair in missing if pair[1] >= 0]
    staged = [expert for expert, row in missing if row < 0]
    if together and missing and len(staged) <= len(staging):
        rows = [row for _, row in placed] + list(staging[: len(staged)])
        return [Group([expert for expert, _ in placed] + staged, rows, None)]
    width = min(GROUP, max(len(staging) // 2, 1))
    halves = 2 if len(staging) >= 2 else 1
    groups = [Group([e for e, _ in some], [row for _, row in some], None) for some in _chunks(placed, GROUP)]
    for number, some in enumerate(_chunks(staged, width)):
        half = number % halves
        groups.append(Group(some, list(staging[half * width : half * width + len(some)]), half))
    return groups


class Copy:
    """Copies for prefetch that began together: on their way at once, and not to be cancelled."""

    def __init__(self, copied: Any) -> None:
        self.copied = copied  # marks their end

    @property
    def done(self) -> bool:
        """Whether it is done."""
        return self.copied is None or bool(self.copied.query())

    def cancel(self) -> None:
        """Nothing: what was launched arrives."""

    def cancel_and_wait(self) -> None:
        """Wait for its end."""
        if self.copied is not None:
            self.copied.synchronize()


class CopyPrefetch:
    """Experts that are copied from the RAM tier before they are asked for, on a stream of their own."""

    def __init__(self, mover: CopyMover) -> None:
        self._mover = mover

    def has(self, layer: int, expert: int) -> bool:
        """Whether an expert can be prefetched: the RAM tier has it."""
        return self._mover.tier.cache.is_resident(ExpertKey(layer, expert))

    def size_bytes(self, layer: int, expert: int) -> int:  # noqa: ARG002 - all experts of a layer are alike
        """What is moved for an expert."""
        return self._mover.used_bytes(layer)

    def start(self, loads: Sequence[Load]) -> list[Copy]:
        """Copy experts, in this order, with one mark for all: marks cost the host time."""
        with self._mover.streams.prefetching():
            for layer, expert, row in loads:
                source = int(self._mover.tier.cache.rows_of(layer, expert))
                self._mover.copy(self._mover.used_bytes(layer), row, source)
        return [Copy(self._mover.streams.mark_prefetch())] * len(loads)

    def promote(self, transfer: Copy) -> None:
        """Nothing: it is on its way."""

    def failed(self, transfer: Copy, expert: int) -> bool:  # noqa: ARG002 - copies in memory do not fail
        """Whether a transfer met a fault."""
        return False


class CopyLoader:
    """Fills slots of a GPU while events are served; what the RAM tier misses is read into it first."""

    def __init__(self, cache: SlotCache, mover: CopyMover, guard: Guard) -> None:
        self.moved_bytes = 0
        self._cache, self._mover, self._guard = cache, mover, guard

    def steps(self, order: Sequence[ExpertKey], *, pin: bool = False) -> Iterator[object]:
        """Bring experts into empty slots, a batch at every step; pins evict the experts of lowest score.

        What the RAM tier does not hold goes on being read once the device is full.
        """
        tier_loader = self._mover.tier.loader
        for batch in [list(order)] if pin else _chunks(order, GROUP):
            if tier_loader is not None:
                tier_loader.load(batch, evict=pin, before_reading=self._mover.streams.wait_for_copies)
            yield self._copy_in(batch, pin)

    def _undo(self, batch: Batch) -> None:
        """Under the lock: free slots reserved for experts that a thread was interrupted in copying."""
        self._mover.streams.wait_for_copies()
        self._cache.cancel_all(batch)

    def _copy_in(self, keys: Sequence[ExpertKey], pin: bool) -> int:
        """Copy from the RAM tier what it holds of these; a slot is committed once its bytes are there."""
        batch = Batch(self._undo)
        with batch.alive:
            self._guard.add(batch)
            copied = self._copy_batch(batch, keys, pin)
        self._guard.forget(batch)
        return copied

    def _copy_batch(self, batch: Batch, keys: Sequence[ExpertKey], pin: bool) -> int:
        streams, tier = self._mover.streams, self._mover.tier.cache
        with self._guard.lock:
            self._guard.repair()
            if pin:
                streams.wait_for_all()  # what is evicted may still be computed with
            self._cache.controller.residency.changing()
            held = self._cache.reserve([key for key in keys if tier.is_resident(key)], evict=pin, owner=batch)
            with streams.copying():
                for key, row in held.items():
                    used = self._mover.used_bytes(key.layer)
                    self._mover.copy(used, row, int(tier.rows_of(*key)))
                    self.moved_bytes += used
            copied = streams.mark_copies()
        streams.block_until(copied)
        with self._guard.lock:
            self._guard.repair()
            self._cache.controller.residency.changing()
            return sum(self._cache.commit(key, pin=pin) for key in held)


def _chunks(items: Any, size: int) -> list[Any]:
    return [items[start : start + size] for start in range(0, len(items), size)]

"""The engine on a GPU, driven by the host: slots on the device, a RAM tier behind them, copies beside arithmetic."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hotset.cache.controller import Controller
from hotset.engine.kernels import ExpertKernels, ExpertSpec, gpu_kernels
from hotset.engine.slots import Loads
from hotset.runtime.ahead import AheadSlots, Guess
from hotset.runtime.arena import Arena
from hotset.runtime.background import Batch, forget, is_left, left_of
from hotset.runtime.caching import Begun, CachingEngine, Work, mending
from hotset.runtime.event import LiveEvent, Which
from hotset.runtime.host import HostTier
from hotset.runtime.pinned import page_lock
from hotset.runtime.step import Step
from hotset.shape import ExpertKey
from hotset.store import Catalog, SlotLayout
from hotset.store.catalog import Bytes
from hotset.trace import Phase

SPLIT_BYTES = 24 << 20
"""Where less is missing, the copy takes no longer than the launch of a computation of its own for the residents."""
GROUP = 8
"""The experts that travel together: few enough that the first of them compute while the next are on their way."""

MakeKernels = Callable[[Arena, SlotLayout, ExpertSpec, int], ExpertKernels]
"""Of an arena, the layout of a layer, what its experts compute and how many of them a token uses."""


class Group(NamedTuple):
    """Experts that are copied and computed together, and the half of the staging that they use, if any."""

    experts: list[int]
    slots: list[int]
    half: int | None


class DeviceEngine(CachingEngine):
    """Slots on a GPU with host memory behind them."""

    kind = "cuda"

    def __init__(
        self,
        controller: Controller,
        catalog: Catalog,
        maths: Sequence[ExpertSpec],
        host: HostTier,
        device: torch.device,
        *,
        kernels: MakeKernels = gpu_kernels,
        pinned: bool = False,
    ) -> None:
        super().__init__(controller, catalog)
        plan = controller.plan
        self.kind = device.type
        self.device = device
        self.host = host
        self.arena = Arena.on_device(self.cache.num_rows, catalog.slot_bytes, device)
        self.layers = [
            kernels(self.arena, source.layout, math, self.shape.top_k)
            for source, math in zip(catalog.layers, maths, strict=True)
        ]
        self._rows = self.arena.memory.view(self.arena.slots, catalog.slot_bytes)
        self._host_rows = host.arena.memory.view(host.arena.slots, catalog.slot_bytes)
        self.streams = Streams(device)
        if plan.ahead:
            self.ahead = AheadOfHost(self)
        self._passing: dict[int, Guess[Copy]] = {}
        self.pinned = pinned or (device.type == "cuda" and page_lock(host.arena, device))
        host.before_reading = self.streams.wait_for_copies
        self._host_reader = host.background(self._lock, mending(weakref.ref(self)))
        if self._host_reader is not None:
            self._host_reader.before_reading = self.streams.wait_for_copies
        self._background_bytes = 0
        self._copying_in: list[Batch] = []

    def compute(self, layer: int, event: LiveEvent, which: Which) -> None:
        """Compute some of the event's experts, all of them resident, or all."""
        experts = event.experts if which is None else event.experts[which]
        self._compute_in(layer, event, experts, self._rows_of(layer, experts))

    def _rows_of(self, layer: int, experts: Any) -> Any:
        """Where experts lie: in their slots, or where a guess has brought them that only pass through."""
        rows = self.cache.rows_of(layer, experts)
        for expert, guess in self._passing.items():
            rows[experts == expert] = guess.row
        return rows

    def _compute_in(self, layer: int, event: LiveEvent, experts: Any, rows: Any) -> None:
        self.layers[layer].run(event, experts, rows)

    def fetch_and_compute(self, step: Step, layer: int, event: LiveEvent, loads: Loads) -> None:
        """Copy in what is missing and compute everything."""
        order = loads[loads[:, 0].argsort()]
        order = self._claim(layer, order)
        few = self.layers[layer].few(event)
        groups = self._groups(order, few)
        missing_bytes = len(order) * self.catalog.slot_bytes
        if not groups:
            self.look_ahead(step, layer, event)
            self.compute(layer, event, None)
        elif few and len(groups) == 1 and missing_bytes < SPLIT_BYTES:
            self._copy_then_compute(step, layer, event, groups[0])
        else:
            self._compute_while_copying(step, layer, event, order, groups)
        self._give_back()

    def _claim(self, layer: int, order: Loads) -> Loads:
        """Take over what was guessed, to be computed like residents once it is there; returns what is still missing."""
        if self.ahead is None:
            return order
        claimed: dict[int, Guess[Copy]] = self.ahead.claim(layer, order[:, 0].tolist())
        for expert, slot in order[:, :2].tolist():
            guess = claimed.get(expert)
            if guess is None:
                continue
            self.clock.loaded_bytes += guess.size_bytes
            if slot < 0:
                self._passing[expert] = guess
            else:
                self.cache.claim(slot, guess.row)
                self.arrived.add(expert)  # not before: the row that the slot had holds another expert
        for flight in {guess.flight for guess in claimed.values()}:
            if not flight.settled:
                self.streams.arithmetic_waits_for(flight.landed)
        return order[[expert not in claimed for expert in order[:, 0].tolist()]] if claimed else order

    def _give_back(self) -> None:
        """Return the rows of guesses that only passed through; nobody fills them before the next event's sync."""
        for guess in self._passing.values():
            self.cache.return_row(guess.row)
        self._passing.clear()

    def _copy_then_compute(self, step: Step, layer: int, event: LiveEvent, group: Group) -> None:
        """Compute all experts in one go: the copies take less time than it takes to launch a computation twice."""
        landed = self._copy(step, layer, event, group)
        self.look_ahead(step, layer, event)
        self.streams.arithmetic_waits_for(landed)
        rows = self._rows_of(layer, event.experts)
        rows[event.positions(group.experts)] = group.slots
        self._compute_in(layer, event, event.experts, rows)

    def _compute_while_copying(
        self, step: Step, layer: int, event: LiveEvent, order: Loads, groups: list[Group]
    ) -> None:
        """Compute residents first, the rest group by group as it arrives."""
        residents = event.others(order[:, 0])
        computed: list[Any] = [None, None]
        for number, group in enumerate(groups):
            if group.half is not None and computed[group.half] is not None:
                self.streams.copies_wait_for(computed[group.half])
            landed = self._copy(step, layer, event, group)
            if number == len(groups) - 1:
                self.look_ahead(step, layer, event)
            if number == 0 and len(residents):
                self.compute(layer, event, residents)
            self.streams.arithmetic_waits_for(landed)
            self._compute_in(layer, event, np.array(group.experts, np.int32), np.array(group.slots, np.int32))
            if group.half is not None:
                computed[group.half] = self.streams.mark()

    def _groups(self, order: Loads, together: bool) -> list[Group]:
        """What travels together: seated experts, then staged ones in two alternating halves of the staging."""
        cached, staging = self.cache.staging.start, len(self.cache.staging)
        seated = order[order[:, 1] >= 0]
        seated[:, 1] = self.cache.rows[seated[:, 1]]
        staged = order[order[:, 1] < 0, 0].tolist()
        if together and len(staged) <= staging:
            slots = seated[:, 1].tolist() + list(range(cached, cached + len(staged)))
            return [Group(seated[:, 0].tolist() + staged, slots, None)]
        width = min(GROUP, max(staging // 2, 1))
        halves = 2 if staging >= 2 else 1
        groups = [Group(s[:, 0].tolist(), s[:, 1].tolist(), None) for s in _chunks(seated, GROUP)]
        for number, some in enumerate(_chunks(staged, width)):
            half = number % halves
            groups.append(Group(some, [cached + half * width + i for i in range(len(some))], half))
        return groups

    def _copy(self, step: Step, layer: int, event: LiveEvent, group: Group) -> Any:
        """Put a group's copies on their way; returns what marks their end."""
        used = self.catalog.layers[layer].layout.used_bytes
        self.clock.loaded_bytes += used * len(group.experts)
        ready = self.host.where(layer, group.experts)
        if ready is None:
            self._copy_as_read(step, layer, event, group, used)
        else:
            with self.streams.copying():
                for slot, row in zip(group.slots, ready, strict=True):
                    self._rows[slot, :used].copy_(self._host_rows[row, :used], non_blocking=True)
            self.arrived.update(group.experts)
        return self.streams.mark_copies()

    def _copy_as_read(self, step: Step, layer: int, event: LiveEvent, group: Group, used_bytes: int) -> None:
        """Copy each expert as soon as the RAM tier has it."""
        target = dict(zip(group.experts, group.slots, strict=True))
        counts = event.counts[event.positions(group.experts)].tolist()
        began = time.perf_counter()
        for expert, row in self.host.bring(layer, group.experts, counts, step.phase):
            self.clock.stall_s += time.perf_counter() - began
            with self.streams.copying():
                self._rows[target[expert], :used_bytes].copy_(self._host_rows[row, :used_bytes], non_blocking=True)
            self.arrived.add(expert)
            began = time.perf_counter()

    def pass_through(self, layer: int, experts: list[int], work: Work, meanwhile: Callable[[], None]) -> None:
        """Bring experts into staging and work with them, and do something else while the first are on their way."""
        unseated = np.array([[expert, -1] for expert in experts], np.int32).reshape(-1, 2)
        computed: list[Any] = [None, None]
        groups = self._groups(unseated, together=False)
        try:
            for number, group in enumerate(groups):
                assert group.half is not None  # noqa: S101 - none of them has a slot
                if computed[group.half] is not None:
                    self.streams.copies_wait_for(computed[group.half])
                landed = self._copy_through(layer, group)
                if number == 0:
                    meanwhile()
                self.streams.wait_for(landed)
                work(group.experts, group.slots)
                computed[group.half] = self.streams.mark()
            if not groups:
                meanwhile()
        except BaseException:
            self.streams.wait_for_all()  # nothing may be written to staging any more
            raise

    def _copy_through(self, layer: int, group: Group) -> Any:
        """Copy a group from the RAM tier, which reads what it does not hold; returns what marks the end."""
        used, ready = self.catalog.layers[layer].layout.used_bytes, self.host.where(layer, group.experts)
        if ready is not None:
            found: Iterable[tuple[int, int]] = zip(group.experts, ready, strict=True)
        else:
            found = self.host.bring(layer, group.experts, [1] * len(group.experts), Phase.PREFILL)
        target = dict(zip(group.experts, group.slots, strict=True))
        for expert, row in found:
            with self.streams.copying():
                self._rows[target[expert], :used].copy_(self._host_rows[row, :used], non_blocking=True)
        return self.streams.mark_copies()

    def compute_rows(self, layer: int, event: LiveEvent, experts: Sequence[int], rows: Sequence[int]) -> None:
        """Compute some of the event's experts, which lie in these rows."""
        self._compute_in(layer, event, np.array(experts, np.int32), np.array(rows, np.int32))

    def copy_ahead(self, row: int, source: int, used_bytes: int) -> None:
        """Copy a row of the RAM tier to a row, on the stream of whoever calls."""
        self._rows[row, :used_bytes].copy_(self._host_rows[source, :used_bytes], non_blocking=True)

    def fetch(self, layer: int, expert: int) -> Bytes:
        """The bytes of one expert as in a slot, good until the next call of anything; for use between passes."""
        with self._lock:
            self.mend()
            found: list[tuple[int, int]] = []
            bring = self.host.bring(layer, [expert], [1], Phase.PREFILL)
            self.recorded(Begun.nothing(), lambda: found.extend(bring))
        block: Bytes = self.host.arena.rows()[found[0][1]]
        return block

    def controllers(self) -> list[Controller]:
        """The caches that hold experts, the fastest first."""
        return [self.controller, self.host.controller]

    def bring_in(self, order: Sequence[ExpertKey], *, pin: bool = False) -> Iterator[object]:
        """Bring experts into empty slots in the background, a batch at every step; pins evict the weakest.

        What the RAM tier does not hold is read into it first, and goes on being read once the device is full.
        """
        for batch in [list(order)] if pin else _chunks(order, GROUP):
            if self._host_reader is not None:
                self._host_reader.bring(batch, evict=pin)
            yield self._copy_in(batch, pin)

    def _copy_in(self, keys: Sequence[ExpertKey], pin: bool) -> int:
        """Copy from the RAM tier what it holds of these; a slot is taken once its bytes are there."""
        batch = Batch()
        with batch.alive:
            self._copying_in.append(batch)
            copied = self._copy_batch(batch, keys, pin)
        forget(self._copying_in, batch)
        return copied

    def _copy_batch(self, batch: Batch, keys: Sequence[ExpertKey], pin: bool) -> int:
        with self._lock:
            self.mend()
            if pin:
                self.streams.wait_for_all()  # what leaves may still be computed with
            self.controller.changing()
            held = self.cache.reserve([key for key in keys if self.host.cache.is_resident(key)], evict=pin, owner=batch)
            with self.streams.copying():
                for key, row in held.items():
                    used = self.catalog.layers[key.layer].layout.used_bytes
                    source = int(self.host.cache.rows_of(*key))
                    self._rows[row, :used].copy_(self._host_rows[source, :used], non_blocking=True)
                    self._background_bytes += used
            landed = self.streams.mark_copies()
        self.streams.block_until(landed)
        with self._lock:
            self.mend()
            self.controller.changing()
            return sum(self.cache.commit(key, pin=pin) for key in held)

    def load_bytes(self) -> npt.NDArray[np.int64]:
        """What is copied for each expert: [layers, experts]."""
        used = [[source.layout.used_bytes] for source in self.catalog.layers]
        return np.repeat(np.array(used, np.int64), self.shape.experts, axis=1)

    @property
    def background_bytes(self) -> int:
        """The bytes that were copied without anybody waiting for them."""
        return self._background_bytes

    def stop_transfers(self) -> None:
        """After a failure: wait for all copies, let the RAM tier do the same, and take the rows of guesses back."""
        self.streams.wait_for_all()
        self.host.mend()
        self._passing = {}
        if self.ahead is not None:
            self.ahead.reset()

    def mend_background(self) -> None:
        """Give back slots held for experts that a thread was interrupted in bringing."""
        if self._host_reader is not None:
            self._host_reader.mend()
        if is_left(self._copying_in):
            self.streams.wait_for_copies()
            for batch in left_of(self._copying_in):
                self.cache.cancel_all(batch)
                forget(self._copying_in, batch)

    def driven(self) -> dict[str, str]:
        """Who says what happens on the device."""
        return {"driven_by": "host"}

    def settle(self) -> None:
        """Add up the time that the arithmetic waited for copies."""
        self.clock.stall_s += self.streams.waited_s()

    def resident_bytes(self) -> dict[str, int]:
        """The bytes held, by what for."""
        plan = self.controller.plan
        return {
            "slots": plan.cached * self.catalog.slot_bytes,
            "staging": plan.staging * self.catalog.slot_bytes,
            "host": self.host.arena.size_bytes,
            **({"ahead": plan.ahead * self.catalog.slot_bytes} if plan.ahead else {}),
        }

    def close(self) -> None:
        """Give back threads, files and memory."""
        if self.warmer is not None:
            self.warmer.stop()
        if self.ahead is not None:
            self.ahead.clear()
        self.streams.wait_for_copies()
        self.host.close()
        self.host.arena.release()
        self.layers = []


class Copy:
    """Copies from host memory that departed together: under way at once, and not to be called off."""

    def __init__(self) -> None:
        self.landed: Any = None

    @property
    def settled(self) -> bool:
        """Whether it is done."""
        return self.landed is None or bool(self.landed.query())

    def cancel(self) -> None:
        """Nothing: what was launched comes."""

    def abandon(self) -> None:
        """Wait for its end."""
        if self.landed is not None:
            self.landed.synchronize()


class AheadOfHost(AheadSlots[Copy]):
    """Guesses that are copied from the RAM tier on a stream of their own."""

    def __init__(self, engine: DeviceEngine) -> None:
        super().__init__(engine.cache)
        self._engine = weakref.proxy(engine)
        self._departing = Copy()

    def send(self, keys: Iterable[ExpertKey]) -> int:
        """Copy experts, in this order, as far as there are rows, with one mark for all: marks cost the host time."""
        self._departing = Copy()
        with self._engine.streams.guessing():
            sent = super().send(keys)
        if sent:
            self._departing.landed = self._engine.streams.mark_guesses()
        return sent

    def prepare(self, key: ExpertKey, row: int) -> Guess[Copy] | None:
        """A guess that is copied, if the RAM tier has the expert."""
        if not self._engine.host.cache.is_resident(key):
            return None
        return Guess(key, row, self._departing, self._engine.catalog.layers[key.layer].layout.used_bytes)

    def depart(self, guess: Guess[Copy]) -> None:
        """Copy an expert to its row."""
        source = int(self._engine.host.cache.rows_of(*guess.key))
        self._engine.copy_ahead(guess.row, source, guess.size_bytes)


class Streams:
    """Copies beside the arithmetic, and who waits for whom; a device without streams does all in order anyway."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda: Any = torch.cuda
        self._copies = self._cuda.Stream(device) if device.type == "cuda" else None
        self._guesses = self._cuda.Stream(device) if device.type == "cuda" else None
        self._waits: deque[tuple[Any, Any]] = deque(maxlen=1 << 14)

    def copying(self) -> Any:
        """A context in which copies go to their own stream."""
        return torch.cuda.stream(self._copies)  # does nothing for None

    def guessing(self) -> Any:
        """A context in which copies go to the stream of guesses, which demand does not wait for."""
        return torch.cuda.stream(self._guesses)  # does nothing for None

    def mark_guesses(self) -> Any:
        """What marks the end of all guesses so far."""
        return None if self._guesses is None else self._guesses.record_event(self._cuda.Event(enable_timing=True))

    def mark_copies(self) -> Any:
        """What marks the end of all copies so far."""
        return None if self._copies is None else self._copies.record_event(self._cuda.Event(enable_timing=True))

    def mark(self) -> Any:
        """What marks the end of all arithmetic so far."""
        return None if self._copies is None else torch.cuda.current_stream(self.device).record_event()

    def moment(self) -> Any:
        """A mark in the arithmetic that knows its time."""
        if self._copies is None:
            return time.perf_counter()
        return torch.cuda.current_stream(self.device).record_event(self._cuda.Event(enable_timing=True))

    def seconds_between(self, began: Any, over: Any) -> float:
        """The time from one moment to a later one, which must have passed."""
        if self._copies is None:
            return float(over - began)
        return float(began.elapsed_time(over)) / 1000

    def arithmetic_waits_for(self, landed: Any) -> None:
        """Let the arithmetic from here on begin after a mark, and note for how long it had nothing to do."""
        if landed is None:
            return
        stream = torch.cuda.current_stream(self.device)
        idle = stream.record_event(self._cuda.Event(enable_timing=True))
        stream.wait_event(landed)
        self._waits.append((idle, landed))

    def wait_for(self, landed: Any) -> None:
        """Let the arithmetic from here on begin after a mark, off the books."""
        if landed is not None:
            torch.cuda.current_stream(self.device).wait_event(landed)

    def copies_wait_for(self, mark: Any) -> None:
        """Let the copies from here on begin after a mark."""
        if self._copies is not None:
            self._copies.wait_event(mark)

    def wait_for_copies(self) -> None:
        """Block until all copies are done."""
        if self._copies is not None and self._guesses is not None:
            self._copies.synchronize()
            self._guesses.synchronize()

    def wait_for_all(self) -> None:
        """Block until the device has nothing left to do."""
        if self._copies is not None:
            torch.cuda.synchronize(self.device)

    def block_until(self, landed: Any) -> None:
        """Block the calling thread until a mark is reached."""
        if landed is not None and self._copies is not None:
            landed.synchronize()

    def waited_s(self) -> float:
        """The time that the arithmetic spent waiting for copies since the last call."""
        if self._copies is None:
            return 0.0
        torch.cuda.synchronize(self.device)
        total_ms = 0.0
        while self._waits:
            idle, landed = self._waits.popleft()
            total_ms += max(idle.elapsed_time(landed), 0.0)
        return total_ms / 1000


def _chunks(items: Any, size: int) -> list[Any]:
    return [items[start : start + size] for start in range(0, len(items), size)]

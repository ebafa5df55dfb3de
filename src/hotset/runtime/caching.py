"""The engine's heart on every device: route an event, fetch what is missing, and keep the slots honest on failure."""

from __future__ import annotations

import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotset.cache.controller import Controller
from hotset.engine.kernels import ExpertKernels
from hotset.engine.slots import Loads, SlotCache
from hotset.errors import BudgetError, ClosedError, HotsetError, StoreError
from hotset.runtime.ahead import AheadSlots
from hotset.runtime.background import BATCH_BYTES, Warmer
from hotset.runtime.engine import Engine
from hotset.runtime.event import LiveEvent, Which
from hotset.runtime.guessing import Guesser
from hotset.runtime.step import Step
from hotset.shape import ExpertKey
from hotset.store import Catalog, SlotLayout
from hotset.store.catalog import Bytes
from hotset.trace import Phase

Tensor = torch.Tensor
LoadListener = Callable[[int, Loads], None]
"""Told of every event that had to load: its layer, and rows of expert, slot, layer and expert that left."""

Work = Callable[[Sequence[int], Sequence[int]], None]
"""Computes with some experts of an event, and the rows of memory in which they lie."""

_PIN_TRIES = 3  # what the RAM tier has just read for a pin may have to leave it before it is copied


@dataclass(slots=True)
class Begun:
    """An event under way: what must be known to put the cache in order if it is broken off, wherever that is."""

    layer: int
    absent: npt.NDArray[np.int32]  # the experts that were not resident when it began
    arrived: set[int] = field(default_factory=set)  # those of them whose bytes are in their slots

    @classmethod
    def nothing(cls) -> Begun:
        """Transfers under way to staging alone."""
        return cls(0, np.zeros(0, np.int32))


class CachingEngine(Engine):
    """Experts under a budget; subclasses know how bytes and arithmetic are done on a device."""

    def __init__(self, controller: Controller, catalog: Catalog) -> None:
        super().__init__(controller)
        self.catalog = catalog
        self.listener: LoadListener | None = None
        self.cache = SlotCache(controller)
        self.ahead: AheadSlots[Any] | None = None
        self.guesser: Guesser | None = None
        self.warmer: Warmer | None = None
        self._experts = [len(layer.experts) for layer in catalog.layers]
        self._broken = False  # the device has failed
        self._closed = False
        self.layers: Sequence[ExpertKernels] = ()
        self._begun: Begun | None = None
        self._serving = threading.Lock()  # locked while an event is served, whatever ends that

    def forward(self, step: Step, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The output of one layer's experts for hidden [tokens, width], index and weights [tokens, top_k]."""
        if not index.numel():
            return torch.zeros_like(hidden)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.forward(step, layer, hidden, index, weights)
        with self._lock:
            self._refuse_if_broken()
            self.mend()
            began = time.perf_counter()
            event = LiveEvent(hidden, index, weights, self._experts[layer], self._ask_device(step, layer, hidden))
            if len(event.experts):
                self._serve(step, layer, event)
            self.record(step, layer, hidden, index, weights)
            total = event.total()
            self.clock.experts_s += time.perf_counter() - began
            return total

    def refuse_calls(self) -> None:
        """Serve nothing from here on; what is under way ends first."""
        self._closed = True
        with self._lock:
            pass

    def check_usable(self) -> None:
        """Refuse a call that finds no experts any more, or came into another process by a fork."""
        if self._closed:
            raise ClosedError
        self.owner.check()

    def _refuse_if_broken(self) -> None:
        self.check_usable()
        if self._broken:
            raise HotsetError("an earlier failure left this engine unusable: load the model again")

    def recorded(self, begun: Begun, work: Callable[[], None]) -> None:
        """Do what fills rows, with what puts them in order again written down first: an interrupt may come anywhere."""
        self._begun = begun
        try:
            with self._serving:
                work()
        except BaseException:
            with suppress(StoreError):  # a disk that hangs: the next call says so
                self.mend()
            raise
        self._begun = None

    def _serve(self, step: Step, layer: int, event: LiveEvent) -> None:
        self.recorded(
            Begun(layer, self.cache.absent(layer, event.experts)), lambda: self._serve_begun(step, layer, event)
        )

    def _serve_begun(self, step: Step, layer: int, event: LiveEvent) -> None:
        stalled_s = self.clock.stall_s
        guessed = None if self.ahead is None else (self.ahead.counts.in_time, self.ahead.counts.late)
        self.serve_request(step.first_request, layer)
        placement = self.cache.look_up(layer, event.experts, event.counts, event.tokens, step.phase, step.first_request)
        if len(placement.loads):
            self._fetch(step, layer, event, placement.loads)
        else:
            if self.ahead is not None:
                self.ahead.claim(layer, ())  # guesses for this layer were wrong, or not needed
            self.look_ahead(step, layer, event)
            self.compute(layer, event, None)
        self.cache.release(placement)
        if guessed is not None:
            self._note_payoff(step, layer, self.clock.stall_s - stalled_s, guessed)

    @property
    def arrived(self) -> set[int]:
        """The experts of the event under way whose bytes are in their slots, to be added to as they arrive."""
        return set() if self._begun is None else self._begun.arrived

    def mend(self) -> None:
        """Put the cache in order after whatever was broken off; under the lock, and before anything else there.

        It may be broken off itself: the record of an event is kept until all is done, and doing it again does no harm.
        """
        begun = self._begun
        if begun is not None:
            if self._serving.locked():  # by this thread, since it has the lock
                raise HotsetError("the model was called while it computes: not from a signal handler or a hook")
            self.stop_transfers()
            self.cache.recover()
            self.cache.invalidate(begun.layer, [one for one in begun.absent.tolist() if one not in begun.arrived])
            self._begun = None
        self.controller.rebuild()
        self.mend_background()

    def _fetch(self, step: Step, layer: int, event: LiveEvent, loads: Loads) -> None:
        if self.listener is not None:
            self.listener(layer, loads)
        self.fetch_and_compute(step, layer, event, loads)

    def note_time(self, step: Step, seconds: float) -> None:
        """Take in how long a step took; the guesser compares."""
        super().note_time(step, seconds)
        self.tell_guesser(step, seconds)

    def tell_guesser(self, step: Step, seconds: float) -> None:
        """Tell the guesser how long a decode step took."""
        if self.guesser is not None and step.phase == Phase.DECODE:
            self.guesser.note_pass(step, seconds)

    def _ask_device(self, step: Step, layer: int, hidden: Tensor) -> Tensor | None:
        """What the guesser wants to know of a layer's input, in decode."""
        if self.guesser is None or step.phase != Phase.DECODE:
            return None
        return self.guesser.look(layer, hidden, step)

    def quiet(self) -> AbstractContextManager[Any]:
        """A context in which no event is served: for whoever looks at the slots, or changes them, in between."""
        self.owner.check()  # in a child the lock may be held for ever
        return self._lock

    def look_ahead(self, step: Step, layer: int, event: LiveEvent) -> None:
        """Send for what the next layers will probably ask for, once all that this one needs is on its way."""
        if self.guesser is None or self.ahead is None:
            return
        if step.phase != Phase.DECODE:
            self.guesser.observe(layer, event, step)
            return
        keys = self.guesser.after(layer, event, step, self.ahead.room, self._is_near)
        if keys:
            self.ahead.send(keys)

    def _note_payoff(self, step: Step, layer: int, stall_s: float, before: tuple[int, int]) -> None:
        """Tell the guesser how this event went."""
        if self.guesser is None or self.ahead is None or step.phase != Phase.DECODE:
            return
        now = self.ahead.counts
        self.guesser.note(layer, step, stall_s, now.in_time - before[0], now.late - before[1])

    def _is_near(self, key: ExpertKey) -> bool:
        """Whether an expert need not be guessed: it is here, or on its way."""
        return self.cache.is_resident(key) or (self.ahead is not None and key in self.ahead)

    def controllers(self) -> list[Controller]:
        """The caches that hold experts, the fastest first."""
        return [self.controller]

    def warm(self, order: Sequence[ExpertKey], pins: Sequence[ExpertKey] = ()) -> None:
        """Fill empty slots in the background, in this order, after pinning some; events go on meanwhile."""
        if self.warmer is not None:
            self.warmer.stop()
        with self._lock:
            self.mend()
            self.controller.check_pins(pins)
        self.warmer = Warmer(self._warming(order, pins))

    def _warming(self, order: Sequence[ExpertKey], pins: Sequence[ExpertKey]) -> Iterator[object]:
        yield from self._pinning(pins)
        yield from self.bring_in(order)

    def pin(self, keys: Sequence[ExpertKey]) -> None:
        """Keep these experts for good; those that are not here are read now, in the place of the weakest."""
        with self._lock:
            self.mend()
            self.controller.check_pins(keys)
        for _ in self._pinning(keys):
            pass

    def _pinning(self, keys: Sequence[ExpertKey]) -> Iterator[object]:
        step = max(1, BATCH_BYTES // self.catalog.slot_bytes)
        for at in range(0, len(keys), step):
            absent = self._pin_residents(keys[at : at + step])
            for _ in range(_PIN_TRIES):
                yield from self.bring_in(absent, pin=True)
                self._wait_for(absent)
                absent = self._pin_residents(absent)
            if absent:
                raise BudgetError(
                    f"{len(absent)} experts to pin find no slot: pin fewer, or give the cache more memory"
                )

    def _wait_for(self, keys: Sequence[ExpertKey]) -> None:
        """Wait until none of these is on its way any more: another thread may be bringing it."""
        while any(key in self.controller.coming for key in keys):
            time.sleep(0.002)

    def _pin_residents(self, keys: Sequence[ExpertKey]) -> list[ExpertKey]:
        """Pin those that are here; returns the others."""
        with self._lock:
            self.mend()
            self.controller.changing()
            here = {key for key in keys if self.cache.is_resident(key)}
            self.controller.pin(here)
        return [key for key in keys if key not in here]

    def num_experts(self, layer: int) -> int:
        """How many experts a layer has."""
        return self._experts[layer]

    def serve_again(self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The output of one layer's experts for an event that was served before, past the policy."""
        if not index.numel():
            return torch.zeros_like(hidden)
        with torch.no_grad():
            event = LiveEvent(hidden, index, weights, self._experts[layer])
            if len(event.experts):
                self.revisit(layer, event, lambda experts, rows: self.compute_rows(layer, event, experts, rows))
            return event.total()

    def revisit(self, layer: int, event: LiveEvent, work: Work) -> None:
        """Compute with the experts of an event once more: with residents where they lie, with others in staging.

        The policy does not hear of it: no expert comes or goes, and it is neither a hit nor a miss.
        """
        with self._lock:
            self._refuse_if_broken()
            self.mend()
            slots = self.controller.table.slot_of[layer, event.experts]
            here, absent = event.experts[slots >= 0], event.experts[slots < 0].tolist()
            count, source = self.clock.backward, self.catalog.layers[layer]
            count.events += 1
            count.resident += len(here)
            count.fetched += len(absent)
            count.fetched_bytes += sum(source.read_bytes(expert) for expert in absent)
            rows = self.cache.rows_of(layer, here).tolist()

            def meanwhile() -> None:
                if len(here):
                    work(here.tolist(), rows)

            self.recorded(Begun.nothing(), lambda: self.pass_through(layer, absent, work, meanwhile))

    @abstractmethod
    def pass_through(self, layer: int, experts: list[int], work: Work, meanwhile: Callable[[], None]) -> None:
        """Bring experts into staging and work with them, and do something else while the first are on their way."""

    @abstractmethod
    def compute_rows(self, layer: int, event: LiveEvent, experts: Sequence[int], rows: Sequence[int]) -> None:
        """Compute some of the event's experts, which lie in these rows."""

    @abstractmethod
    def bring_in(self, order: Sequence[ExpertKey], *, pin: bool = False) -> Iterator[object]:
        """Bring experts into empty slots in the background, a batch at every step; pins evict the weakest."""

    @abstractmethod
    def load_bytes(self) -> npt.NDArray[np.int64]:
        """What one load of each expert moves: [layers, experts]."""

    @property
    @abstractmethod
    def background_bytes(self) -> int:
        """The bytes that were moved without anybody waiting for them."""

    @property
    def layouts(self) -> list[SlotLayout]:
        """How the experts of each layer lie in a slot."""
        return [layer.layout for layer in self.catalog.layers]

    @abstractmethod
    def fetch(self, layer: int, expert: int) -> Bytes:
        """The bytes of one expert as in a slot, good until the next call of anything; for use between passes."""

    @abstractmethod
    def compute(self, layer: int, event: LiveEvent, which: Which) -> None:
        """Compute some of the event's experts, all of them resident, or all."""

    @abstractmethod
    def fetch_and_compute(self, step: Step, layer: int, event: LiveEvent, loads: Loads) -> None:
        """Bring in what is missing and compute everything, residents first."""

    @abstractmethod
    def stop_transfers(self) -> None:
        """After a failure: wait until nothing is written to a row any more, and take the rows of guesses back."""

    @abstractmethod
    def mend_background(self) -> None:
        """Give back slots held for experts that a thread was interrupted in bringing."""


def mending(engine: weakref.ref[Any]) -> Callable[[], None]:
    """What puts an engine in order, without keeping it alive."""

    def mend() -> None:
        found: CachingEngine | None = engine()
        if found is not None:
            found.mend()

    return mend

"""The engine on a GPU whose decode steps the device may drive; prompts, and all else, are the host's."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from hotset.cache.shadow import log_is_full
from hotset.engine.device.capture import CapturedStep
from hotset.engine.device.driver import DeviceDriver
from hotset.engine.device.follow import Ints
from hotset.engine.device.prefetch_state import PrefetchTallies
from hotset.engine.device.variant import Predict
from hotset.engine.support import DeviceSupport
from hotset.runtime.background import Warmer
from hotset.runtime.caching import Work
from hotset.runtime.device import DeviceEngine
from hotset.runtime.event import LiveEvent
from hotset.runtime.forecasting import ForecastGuesser
from hotset.runtime.step import Step
from hotset.shape import ExpertKey
from hotset.trace import Phase

Tensor = torch.Tensor


class GraphEngine(DeviceEngine):
    """Slots on a GPU that the host and the device take turns to change: whoever does has the lease of the cache."""

    def __init__(self, *args: Any, predict: Predict | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lease = self.controller.lease
        self.driver = DeviceDriver(
            self.cache, self.lease, self.host, self.catalog, [local.spec for local in self.layers], self.arena,
            self.streams, weakref.proxy(self), prefetch=self.ahead, predict=predict,
        )  # fmt: skip
        self._served: set[int] = set()  # the steps under way that the device was given
        self._last_driver = "host"
        self._filler: Warmer | None = None
        self._full = False

    # Whether the device can drive.

    def unsupported_reasons(self) -> list[str]:
        """What keeps this engine from being driven by the device, in words."""
        plan, guesser = self.controller.plan, self.guesser
        named = isinstance(guesser, ForecastGuesser) and not guesser.payoff.state.options[0]  # else ours to choose
        return DeviceSupport.check(
            self.controller.policy,
            plan.scope,
            zip(self.driver.specs, self.layouts, strict=True),
            page_locked=self.pinned,
            ram_holds_all=self.host.controller.plan.cached >= plan.shape.total_experts,
            forecast=guesser.forecast.name if named and isinstance(guesser, ForecastGuesser) else None,
        )

    def fill_host(self) -> None:
        """Read all experts into the RAM tier in the background; until that is done the host drives."""
        if self._host_reader is None:
            return
        order = [ExpertKey(*key) for key in np.ndindex(self.shape.layers, self.shape.experts)]
        self._filler = Warmer(self._host_reader.steps(order))

    @property
    def ready(self) -> bool:
        """Whether the device can take over: the RAM tier is full, and nothing is on its way to a slot."""
        if self._filler is not None and not self._filler.busy:
            failed, self._filler = self._filler.error is not None, None
            if not failed and not self._host_is_full:  # an interrupted event has emptied slots again
                self.fill_host()
        warming = self.warmer is not None and self.warmer.busy
        return self._filler is None and not warming and not self.controller.coming and self._host_is_full

    @property
    def _host_is_full(self) -> bool:
        if not self._full:
            self._full = bool((self.host.controller.table.slot_of >= 0).all())
        return self._full

    def prefetches_in(self, step: Step) -> bool:
        """Whether the device prefetches in a step: `auto` compares steps that do and steps that do not."""
        if not self.driver.can_prefetch or not isinstance(self.guesser, ForecastGuesser):
            return self.driver.can_prefetch
        return not self.guesser.payoff.goes_without(step.number)

    # What the host serves: it recalls the cache first.

    def forward(self, step: Step, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The output of one layer's experts, by the host."""
        with self._lock:  # until a capture under way is done
            self.lease.recall()
            return super().forward(step, layer, hidden, index, weights)

    def revisit(self, layer: int, event: LiveEvent, work: Work) -> None:
        """Compute with the experts of an event once more."""
        with self._lock:
            self.lease.recall()
            super().revisit(layer, event, work)

    # What the device serves.

    def exclusive(self) -> AbstractContextManager[Any]:
        """A context in which nothing else changes the slots; the device may be ahead of the host."""
        return self._lock

    def run(self, step: Step, captured: CapturedStep, inputs: dict[str, Tensor]) -> Any:
        """Have the device serve a step; returns its outputs, which the next run overwrites."""
        with self._lock, self.driver.faults_told():
            self._refuse_if_broken()
            self.mend()
            self._served.add(step.number)
            return self.driver.run(step, captured, inputs, self.recorder_of(step))

    def discard(self) -> None:
        """Give up what was made on the device; the host goes on from there."""
        with self._lock:
            self.driver.discard()

    # What the host follows.

    def follow_event(self, step: Step, layer: int, experts: Ints, counts: Ints, tokens: int, stalled_s: float) -> int:
        """Serve an event that the device has served; returns how many experts it missed."""
        self.serve_request(step.first_request, layer)
        missing = self.controller.route(layer, experts, counts, tokens, step.phase, step.first_request)
        if missing:
            if self.listener is not None:
                self.listener(layer, self.controller.table.loads[:missing].copy())
            self.clock.loaded_bytes += missing * self.catalog.layers[layer].layout.used_bytes
            self.clock.stall_s += stalled_s
        return missing

    def follow_step(self, step: Step, seconds: float) -> None:  # noqa: ARG002 - all steps are one sum
        """Take in how long the device took for a step."""
        self.clock.pass_s += seconds

    def is_comparable(self, step: Step, prefetched: bool) -> bool:
        """Whether the trial takes a step for what it was: all may have been decided anew since it was launched."""
        if not isinstance(self.guesser, ForecastGuesser):
            return True
        return prefetched != self.guesser.payoff.goes_without(step.number)

    def compare(self, step: Step, seconds: float) -> None:
        """Take in the adjusted time of a step, for the trial of prefetch."""
        self.tell_guesser(step, seconds)

    def count_prefetches(self, since: PrefetchTallies) -> None:
        """Add what came of prefetches since the last time."""
        if self.ahead is not None:
            for name, more in since._asdict().items():
                setattr(self.ahead.counts, name, getattr(self.ahead.counts, name) + more)

    def break_down(self) -> None:
        """Serve nothing any more: what the device has done is unknown."""
        self._broken = True

    def catch_up(self) -> None:
        """Follow what the device has served last; waits for it."""
        with self._lock:
            self.driver.drain()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """A context in which no event is served, and the host knows of all that were."""
        self.owner.check()  # in a child the lock may be held for ever
        with self._lock:
            self.driver.drain()
            yield

    def end(self, step: Step, seconds: float) -> None:
        """Say that a step is over, or on its way, and how long it took the host."""
        if not self.owner.is_here:
            return
        with self._lock:
            if step.phase == Phase.DECODE:
                self._last_driver = "device" if step.number in self._served else "host"
            if log_is_full(self.controller.usage, self.shape):
                self.driver.drain()  # the supervisor looks at it next
            super().end(step, seconds)
            self._served.discard(step.number)

    def abandon(self, step: Step) -> None:
        """Say that a step was broken off."""
        super().abandon(step)
        self._served.discard(step.number)

    def note_time(self, step: Step, seconds: float) -> None:
        """Take in how long a step took; what the device serves is timed by it, and followed later."""
        if step.number not in self._served:
            super().note_time(step, seconds)

    def driven(self) -> dict[str, str]:
        """Who drove the last decode step."""
        return {"driven_by": self._last_driver}

    def settle(self) -> None:
        """Bring the clock and the statistics up to date."""
        self.catch_up()
        state = None if self.driver.state is None or self._broken else self.driver.state.prefetch
        if state is not None and isinstance(self.guesser, ForecastGuesser):
            with self.driver.faults_told():
                self.guesser.payoff.state.budget[:-1] = state.max_queued.cpu().numpy()
        super().settle()

    def close(self) -> None:
        """Give back threads, files and memory."""
        if self._filler is not None:
            self._filler.stop()
        self.driver.close()
        super().close()

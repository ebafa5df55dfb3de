"""Decode steps by the device on the slots of one engine: when it can take over, and what the host does then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hotset.engine.device.capture import CapturedStep
from hotset.engine.device.follow import Follower
from hotset.engine.device.step_kernels import StepParts
from hotset.engine.device.steps import DeviceSteps
from hotset.engine.device.tier_filler import TierFiller
from hotset.engine.device.variant import Predict
from hotset.engine.guard import Guard
from hotset.engine.host.copies import CopyMover
from hotset.engine.host.forecasting import ForecastPredictor
from hotset.engine.slots import SlotCache
from hotset.engine.stats import EngineStats
from hotset.engine.step import Step
from hotset.engine.support import DeviceSupport
from hotset.errors import HotsetError
from hotset.prefetch import Driver, PrefetchPlan
from hotset.trace import Phase

if TYPE_CHECKING:
    from hotset.engine.engine import Offload

Tensor = torch.Tensor


class DeviceDecode:
    """Host and device take turns to change the slots: the one that does has the lease of the cache."""

    def __init__(
        self,
        device: torch.device,
        cache: SlotCache,
        stats: EngineStats,
        guard: Guard,
        offload: Offload,
        plan: PrefetchPlan,
        predict: Predict | None = None,
    ) -> None:
        if offload.tier is None or not isinstance(offload.mover, CopyMover):
            raise HotsetError("only a device with a RAM tier behind it can drive")
        self.device, self.cache, self.stats, self.lease = device, cache, stats, cache.controller.residency.lease
        self.guard, self._offload = guard, offload
        streams, prefetcher = offload.mover.streams, offload.prefetcher
        specs = [local.spec for local in offload.driver.kernels]
        parts = StepParts(offload.catalog, specs, offload.arena, offload.tier.arena, plan, predict)
        follower = Follower(cache.controller, stats, offload.catalog, prefetcher, streams)
        self.steps = DeviceSteps(cache, offload.tier, parts, streams, follower, guard, prefetcher)
        self.filler = TierFiller(offload.tier)
        self._served: set[int] = set()  # the steps under way that the device was given
        self.page_locked = offload.pinned
        self.last_driver = Driver.HOST  # of decode steps

    # Whether the device can drive.

    def unsupported_reasons(self, *, encoder_decoder: bool = False) -> list[str]:
        """What keeps this engine, of such a model, from being driven by the device, in words."""
        controller, forecast = self.cache.controller, self._forecast
        named = forecast is not None and not forecast.trial.state.options[0]  # else ours to choose
        return DeviceSupport.check(
            controller.policy,
            controller.plan.scope,
            zip(self.steps.parts.specs, (layer.layout for layer in self._offload.catalog.layers), strict=True),
            page_locked=self.page_locked,
            ram_holds_all=self.steps.tier.controller.plan.cached >= controller.plan.shape.total_experts,
            forecast=forecast.forecast if forecast is not None and named else None,
            encoder_decoder=encoder_decoder,
        )

    @property
    def _forecast(self) -> ForecastPredictor | None:
        """What decides whether a step prefetches, where that is asked."""
        predictor = None if self._offload.prefetcher is None else self._offload.prefetcher.predictor
        return predictor if isinstance(predictor, ForecastPredictor) else None

    @property
    def ready(self) -> bool:
        """Whether the device can take over: the RAM tier is full, and nothing is on its way to a slot."""
        running = self._offload.preloader.running
        preloading = running is not None and running.busy
        return self.filler.is_done() and not preloading and not self.cache.controller.residency.reserved

    @property
    def all_resident(self) -> bool:
        """Whether all experts have a slot; they keep it, since there is one for each."""
        plan, table = self.cache.controller.plan, self.cache.controller.table
        return plan.cached >= plan.shape.total_experts and not (table.slot_of < 0).any()

    def prefetches_in(self, step: Step) -> bool:
        """Whether the device prefetches in a step: `auto` compares steps that do and steps that do not."""
        forecast = self._forecast
        if not self.steps.can_prefetch or forecast is None or not self.steps.parts.prefetch.trial:
            return self.steps.can_prefetch
        return not forecast.trial.is_control_step(step.number)

    # What the device serves.

    def run(self, step: Step, captured: CapturedStep, inputs: dict[str, Tensor]) -> Any:
        """Have the device serve a step; returns its outputs, which the next run overwrites."""
        with self.guard.lock, self.steps.faults_translated():
            self.guard.check()
            self._served.add(step.number)
            return self.steps.run(step, captured, inputs, self.stats.recorder_of(step))

    def discard(self) -> None:
        """Give up what was made on the device; the host goes on from there."""
        with self.guard.lock:
            self.steps.discard()

    # What the host follows.

    def drain(self) -> None:
        """Follow what the device has served last; waits for it."""
        with self.guard.lock:
            self.steps.drain()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which no event is served, and the host knows of all that were."""
        with self.guard.lock:
            self.steps.drain()
            yield

    def end(self, step: Step) -> bool:
        """Say that a step is over, or on its way; whether the device serves it, times it, and is followed later."""
        on_device = step.number in self._served
        if step.phase == Phase.DECODE:
            self.last_driver = Driver.DEVICE if on_device else Driver.HOST
        self._served.discard(step.number)
        return on_device

    def abandon(self, step: Step) -> None:
        """Say that a step was broken off."""
        self._served.discard(step.number)

    def sync(self) -> None:
        """Bring the clock and the statistics up to date."""
        self.drain()
        state = None if self.steps.state is None or self.guard.is_broken else self.steps.state.prefetch
        if state is not None and self._forecast is not None:
            with self.steps.faults_translated():
                self._forecast.trial.state.budget[:-1] = state.max_queued.cpu().numpy()

    def close(self) -> None:
        """Follow what is left, and give the memory back."""
        self.filler.stop()
        self.steps.close()

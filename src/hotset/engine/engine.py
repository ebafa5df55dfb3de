"""One engine, made of parts: the cache, what moves experts into its rows, what computes there, and who drives."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hotset.cache.controller import Controller
from hotset.cache.monitor import CacheMonitor
from hotset.engine.arena import Arena
from hotset.engine.driver import Driver
from hotset.engine.guard import STAGING, Guard
from hotset.engine.host.copies import CopyMover
from hotset.engine.host.driver import HostDriver
from hotset.engine.host.prefetcher import Prefetcher
from hotset.engine.preload import Preloader
from hotset.engine.slots import SlotCache
from hotset.engine.stats import EngineStats
from hotset.engine.step import Step
from hotset.engine.tiers import RamTier
from hotset.errors import HotsetError
from hotset.shape import ExpertKey, ModelShape
from hotset.store import Catalog
from hotset.store.catalog import Bytes
from hotset.transfer.disk import DiskMover

if TYPE_CHECKING:
    from hotset.engine.device.decode import DeviceDecode  # needs Triton

Tensor = torch.Tensor


class Offload(NamedTuple):
    """The parts of an engine whose experts do not all fit: where they lie, and how they come into rows."""

    catalog: Catalog
    arena: Arena
    mover: DiskMover | CopyMover
    driver: HostDriver
    prefetcher: Prefetcher | None
    preloader: Preloader
    tier: RamTier | None = None  # behind a GPU
    pinned: bool = False  # the tier's memory is page-locked

    def load_bytes(self, shape: ModelShape) -> npt.NDArray[np.int64]:
        """What one load of each expert moves: [layers, experts], 0 for experts that a layer lacks."""
        sizes = np.zeros((shape.layers, shape.experts), np.int64)
        for layer, source in enumerate(self.catalog.layers):
            for expert in range(len(source.experts)):
                copied = self.tier is not None
                sizes[layer, expert] = source.layout.used_bytes if copied else source.read_bytes(expert)
        return sizes

    def untouched_bytes(self) -> int:
        """What the slots will take of free memory once they are filled."""
        return 0 if self.tier is not None else self.arena.untouched_bytes()


class Engine:
    """Serves the experts of all layers of a model, from slots under a budget or where transformers put them."""

    def __init__(
        self,
        device: torch.device,
        cache: SlotCache,
        stats: EngineStats,
        guard: Guard,
        driver: Driver,
        offload: Offload | None = None,
        monitor: CacheMonitor | None = None,
        device_decode: DeviceDecode | None = None,
    ) -> None:
        self.device, self.cache, self.stats, self.guard, self.driver = device, cache, stats, guard, driver
        self.offload = offload
        self.monitor = monitor
        self.device_decode = device_decode  # where the device may drive decode steps

    @property
    def controller(self) -> Controller:
        """The fastest tier's cache under its policy."""
        return self.cache.controller

    @property
    def shape(self) -> ModelShape:
        """The shape of the model served."""
        return self.cache.controller.plan.shape

    @property
    def tiers(self) -> list[SlotCache]:
        """The caches that hold experts, the fastest first."""
        tier = None if self.offload is None else self.offload.tier
        return [self.cache] if tier is None else [self.cache, tier.cache]

    @property
    def prefetcher(self) -> Prefetcher | None:
        """What brings experts before they are asked for, if anything does."""
        return None if self.offload is None else self.offload.prefetcher

    def offloaded(self, what: str) -> Offload:
        """The parts that offload experts; refuses something that there is no use for where all of them fit."""
        if self.offload is None:
            raise HotsetError(f"all experts are in memory: there is nothing to {what}")
        return self.offload

    @property
    def wants_tokens(self) -> bool:
        """Whether steps should say which tokens they compute."""
        return self.stats.recorder is not None or (self.prefetcher is not None and self.prefetcher.needs_tokens)

    def paused(self) -> AbstractContextManager[Any]:
        """A context in which no event is served: for whatever reads the slots, or changes them, in between."""
        if self.offload is None and not self.guard.owner.is_here:
            return nullcontext()
        self.guard.owner.check()  # in a child the lock may be held for ever
        return self.guard.lock if self.device_decode is None else self.device_decode.paused()

    def end(self, step: Step, seconds: float) -> None:
        """Say that a step is over, and how long it took."""
        if not self.guard.owner.is_here:
            return
        with self.guard.lock:
            by_device = self.device_decode is not None and self.device_decode.end(step)
            self.stats.end_step(step, 0.0 if by_device else seconds)
            if not by_device and self.prefetcher is not None:
                self.prefetcher.note_step(step, seconds)
            if self.monitor is not None and self.monitor.is_due:
                self.catch_up()  # it may change the cache
                self.monitor.poll()

    def abandon(self, step: Step) -> None:
        """Say that a step was broken off: what it has served stays counted, but it is no pass and leaves no record."""
        if self.guard.owner.is_here:
            with self.guard.lock:
                self.stats.abandon_step(step)
                if self.device_decode is not None:
                    self.device_decode.abandon(step)

    def catch_up(self) -> None:
        """Take in all that was served so far; a device that drives itself may be a step further than the host."""
        if self.device_decode is not None:
            self.device_decode.drain()

    def sync_clock(self) -> None:
        """Bring the clock up to date: add the time that a device's compute waited for copies."""
        if self.device_decode is not None:
            self.device_decode.sync()
        if self.offload is not None:
            self.stats.clock.stall_s += self.offload.mover.waited_s()

    def fetch(self, layer: int, expert: int) -> Bytes:
        """The bytes of one expert as in a row, good until the next call of anything; for use between steps."""
        mover = self.offloaded("fetch").mover
        with self.guard.lock:
            self.guard.repair()
            found: list[Bytes] = []
            self.guard.run(STAGING, lambda: found.append(mover.read(layer, expert)))
        return found[0]

    def resident_bytes(self) -> dict[str, int]:
        """The bytes held, by what for."""
        plan = self.controller.plan
        if self.offload is None:
            return {"slots": plan.shape.total_experts * (plan.shape.expert_bytes or 0)}
        size, tier = self.offload.catalog.slot_bytes, self.offload.tier
        return {
            "slots": plan.cached * size,
            "staging": plan.staging * size,
            **({"host": tier.arena.size_bytes} if tier is not None else {}),
            **({"prefetch": plan.prefetch_rows * size} if plan.prefetch_rows else {}),
        }

    def preload(self, order: Sequence[ExpertKey], pins: Sequence[ExpertKey] = ()) -> None:
        """Fill empty slots in the background, in this order, after pinning some; events go on meanwhile."""
        self.offloaded("warm").preloader.preload(order, pins)

    def pin(self, keys: Sequence[ExpertKey]) -> None:
        """Keep these experts for good; those that are absent are loaded now, in the place of those of lowest score."""
        self.offloaded("pin").preloader.pin(keys)

    def close(self) -> None:
        """Give back threads, files and memory."""
        if self.offload is None:
            return
        if self.device_decode is not None:
            self.device_decode.close()
        self.offload.preloader.stop()
        if self.offload.prefetcher is not None:
            self.offload.prefetcher.clear()
        self.offload.mover.close()
        (self.offload.arena if self.offload.tier is None else self.offload.tier.arena).release()

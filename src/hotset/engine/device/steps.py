"""Steps on the device: it takes the cache, runs captured steps, and gives the cache back when the host recalls it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from hotset.engine.device.capture import CapturedStep
from hotset.engine.device.follow import Follower
from hotset.engine.device.replay import Replay
from hotset.engine.device.state import DeviceCacheState
from hotset.engine.device.step_kernels import StepKernels, StepParts, make_step_kernels
from hotset.engine.guard import Guard
from hotset.engine.host.prefetcher import Prefetcher
from hotset.engine.host.streams import Streams
from hotset.engine.slots import SlotCache
from hotset.engine.step import Step
from hotset.engine.tiers import RamTier
from hotset.errors import HotsetError
from hotset.text import one_line
from hotset.trace.recorder import Recorder

Tensor = torch.Tensor


class DeviceSteps:
    """Serves decode steps on the slots of one cache; callers hold the engine's lock."""

    def __init__(
        self,
        cache: SlotCache,
        tier: RamTier,
        parts: StepParts,
        streams: Streams,
        follower: Follower,
        guard: Guard,
        prefetch: Prefetcher | None = None,
    ) -> None:
        self.cache, self.lease, self.tier, self.parts = cache, cache.controller.residency.lease, tier, parts
        self.follower, self.prefetch, self._guard = follower, prefetch, guard
        self.state: DeviceCacheState | None = None
        self.versions = 0  # of the state: graphs that were captured with an earlier one are of no use
        self.replay = Replay(follower, streams)
        self._kernels: dict[int, StepKernels] = {}

    @property
    def can_prefetch(self) -> bool:
        """Whether the device can prefetch at all: there are rows for it, and routers that predict."""
        return self.prefetch is not None and self.parts.prefetch.reach > 0 and self.parts.predict is not None

    @property
    def is_outdated(self) -> bool:
        """Whether what was made on the device is for another policy than the cache has now, or for other staging."""
        state, cache = self.state, self.cache
        if state is None:
            return False
        return state.policy is not cache.controller.policy or not (state.lists_staging or cache.staging_in_order)

    def kernels_for(self, tokens: int) -> StepKernels:
        """The kernels for steps of so many tokens."""
        with torch.inference_mode(False):  # what that mode makes, nothing may write to outside of it
            if self.state is None:
                self.state = self._make_state()
            if tokens not in self._kernels:
                self._kernels[tokens] = make_step_kernels(tokens, self.state, self.cache.controller, self.parts)
        return self._kernels[tokens]

    def _make_state(self) -> DeviceCacheState:
        slots = self.tier.cache.table.slot_of
        if (slots < 0).any():
            raise HotsetError("the RAM tier has not read all experts yet")
        if self.prefetch is not None and self.can_prefetch:
            self.prefetch.clear()
        host_rows = torch.from_numpy(self.tier.cache.rows[slots]).to(self.parts.arena.memory.device)
        return DeviceCacheState(self.cache, host_rows, self.parts.prefetch if self.can_prefetch else None)

    def upload(self) -> None:
        """Take the cache, if the host has it: the device goes on from where the host is."""
        if self.state is None or self.lease.held:
            return
        if self.prefetch is not None:
            self.prefetch.clear()
        self.state.upload(self.cache)
        self.lease.take(self.give_back)

    def give_back(self) -> None:
        """Let the host go on from where the device is; called when the host recalls the cache."""
        with self.faults_translated():
            self.follower.drain()
            if self.state is not None:
                self.state.download(self.cache)

    def drain(self) -> None:
        """Have the host follow all that the device was given; waits for it."""
        with self.faults_translated():
            self.follower.drain()

    def run(self, step: Step, captured: CapturedStep, inputs: dict[str, Tensor], recorder: Recorder | None) -> Any:
        """Have the device serve a step; returns its outputs, which the next run overwrites."""
        with self.faults_translated():
            self.upload()
            return self.replay.run(step, captured, inputs, recorder)

    def differences(self) -> int:
        """How many experts have other slots on the device than the host believes; for tests and benchmarks."""
        return 0 if self.state is None else self.state.differences(self.cache)

    def discard(self) -> None:
        """Give up what was made on the device; the host goes on from there."""
        self.lease.recall()
        self._kernels.clear()
        self.state = None
        self.follower.restart()
        self.versions += 1

    def close(self) -> None:
        """Follow what is left and give the memory back; the host's cache is of no use any more."""
        with suppress(HotsetError):  # of a device that has failed, which was reported before
            self.drain()
        self.lease.end()
        self._kernels.clear()
        self.state = None

    @contextmanager
    def faults_translated(self) -> Iterator[None]:
        """Say in a line what the device reports; what it has done by then is unknown."""
        try:
            yield
        except RuntimeError as error:
            self._guard.mark_broken()
            self.lease.end()
            self.follower.forget()
            raise HotsetError(f"the GPU reported an error: {one_line(error)}; load the model again") from error

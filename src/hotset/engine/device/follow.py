"""The host follows the device: what that has logged of a step, the host serves again, by the same rules.

So statistics, profiles and recordings are the host's as ever, a step later.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.cache.controller import Controller
from hotset.engine.device.log import Rows, StepLog
from hotset.engine.device.variant import Variant
from hotset.engine.host.forecasting import ForecastPredictor
from hotset.engine.host.prefetcher import PrefetchCounts, Prefetcher
from hotset.engine.host.streams import Streams
from hotset.engine.stats import EngineStats
from hotset.engine.step import Asking, Step, asking
from hotset.prefetch.times import MissAdjustedTimes
from hotset.store import Catalog
from hotset.trace.recorder import Recorder

Ints = npt.NDArray[np.int32]


class PendingStep(NamedTuple):
    """A step that the device serves and the host has not followed yet: when it began and ended, and what it was."""

    log: StepLog
    number: int  # in that log
    step: Step
    variant: Variant
    began: Any
    over: Any
    timed: bool
    recorder: Recorder | None


class Follower:
    """Serves again what the device has logged, for statistics, profiles and recordings; callers hold the lock."""

    def __init__(
        self,
        controller: Controller,
        stats: EngineStats,
        catalog: Catalog,
        prefetcher: Prefetcher | None,
        streams: Streams,
    ) -> None:
        self._controller, self._stats, self._catalog = controller, stats, catalog
        self._prefetcher, self._streams = prefetcher, streams
        self._pending: deque[PendingStep] = deque()
        self._tallied = PrefetchCounts()
        self._adjusted = MissAdjustedTimes()

    def add(self, pending: PendingStep) -> None:
        """Have a step followed that was launched."""
        self._pending.append(pending)

    def drain(self, keep: int = 0) -> None:
        """Follow all steps but the last `keep`, in the order of their launch; waits for each of them."""
        while len(self._pending) > keep:
            self._streams.block_until(self._pending[0].over)
            self._follow(self._pending.popleft())

    def forget(self) -> None:
        """Follow nothing of what was launched: the device has failed."""
        self._pending.clear()

    def restart(self) -> None:
        """Begin anew with a state on the device that has counted nothing yet."""
        self._tallied = PrefetchCounts()

    def _follow(self, pending: PendingStep) -> None:
        log, step, missed, stalled_s = pending.log, pending.step, 0, pending.log.stalled_s()
        for layer, row in enumerate(log.routed(pending.number)):
            if pending.recorder is not None:
                _record(pending.recorder, pending, layer, row)
            experts, counts = count_experts(row, log.tokens)
            if len(experts):
                stall = max(float(stalled_s[layer]), 0.0)
                missed += self._serve(step, layer, experts, counts, row.reshape(log.tokens, -1), stall)
        if pending.variant.prefetch:
            now = log.tallies()
            if self._prefetcher is not None:
                self._prefetcher.counts.add(now, self._tallied)
            self._tallied = now
        seconds = self._streams.seconds_between(pending.began, pending.over)
        self._stats.clock.pass_s += seconds
        if pending.timed and self._prefetcher is not None:
            self._compare(self._prefetcher, pending, seconds, missed)

    def _serve(self, step: Step, layer: int, experts: Ints, counts: Ints, chosen: Rows, stalled_s: float) -> int:
        """Serve an event that the device has served; returns how many experts it missed."""
        self._stats.begin_event(step, layer)
        routed = self._controller.policy.needs_routes
        who = Asking(1, step.phase, step.first_request)
        if routed or len(chosen) > 1:
            who = asking(step, chosen.astype(np.int32), routed=routed)
        missing = self._controller.route(layer, experts, counts, *who)
        if missing:
            if self._stats.listener is not None:
                self._stats.listener(layer, self._controller.table.loads[:missing].copy())
            self._stats.clock.loaded_bytes += missing * self._catalog.layers[layer].layout.used_bytes
            self._stats.clock.stall_s += stalled_s
        return missing

    def _compare(self, prefetcher: Prefetcher, pending: PendingStep, seconds: float, missed: int) -> None:
        """Let the trial of prefetch have the adjusted time of a step, if it takes the step for what it was.

        All may have been decided anew since it was launched.
        """
        predictor, step = prefetcher.predictor, pending.step
        decided_anew = isinstance(predictor, ForecastPredictor) and (
            pending.variant.prefetch == predictor.trial.is_control_step(step.number)
        )
        if decided_anew:
            return
        adjusted = self._adjusted(seconds, missed)
        if adjusted is not None:
            prefetcher.note_step(step, adjusted)


def _record(recorder: Recorder, pending: PendingStep, layer: int, row: npt.NDArray[np.int16]) -> None:
    log, step = pending.log, pending.step
    weights, predicted = log.recorded(pending.number, layer, pending.variant)
    index = row.astype(np.int64).reshape(log.tokens, -1)
    request = step.requests(log.tokens)
    recorder.note(step.number, layer, index, weights, request, step.phase, step.token_ids, predicted)


def count_experts(row: Rows, tokens: int) -> tuple[Ints, Ints]:
    """The experts of an event in rising order, and how many tokens use each; one token uses each once."""
    if tokens == 1:
        experts = np.sort(row[row >= 0]).astype(np.int32)
        return experts, np.ones(len(experts), np.int32)
    found, counts = np.unique(row[row >= 0], return_counts=True)
    return found.astype(np.int32), counts.astype(np.int32)

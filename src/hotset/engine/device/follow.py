"""The host follows the device: what that has logged of a step, the host serves again, by the same rules.

So statistics, profiles and recordings are the host's as ever, a step later.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hotset.engine.device.log import Rows, StepLog
from hotset.engine.device.prefetch_state import PrefetchTallies
from hotset.engine.device.variant import Variant
from hotset.engine.host.streams import Streams
from hotset.engine.step import Step
from hotset.prefetch.times import MissAdjustedTimes
from hotset.trace.recorder import Recorder

Ints = npt.NDArray[np.int32]


class Books(Protocol):
    """The host's books: its cache and all that is counted."""

    def follow_event(self, step: Step, layer: int, experts: Ints, counts: Ints, tokens: int, stalled_s: float) -> int:
        """Serve an event that the device has served; returns how many experts it missed."""

    def follow_step(self, step: Step, seconds: float) -> None:
        """Take in how long the device took for a step."""

    def is_comparable(self, step: Step, prefetched: bool) -> bool:
        """Whether the time of a step tells what prefetch is worth."""

    def compare(self, step: Step, seconds: float) -> None:
        """Take in the adjusted time of a step, for the trial of prefetch."""

    def count_prefetches(self, since: PrefetchTallies) -> None:
        """Add what came of prefetches since the last time."""


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
    """Applies the device's log to the host's books, in the order in which the steps were launched."""

    def __init__(self, books: Books, streams: Streams) -> None:
        self._books, self._streams = books, streams
        self._pending: deque[PendingStep] = deque()
        self._tallied = PrefetchTallies(0, 0, 0, 0, 0, 0)
        self._adjusted = MissAdjustedTimes()

    def add(self, pending: PendingStep) -> None:
        """Have a step followed that was launched."""
        self._pending.append(pending)

    def drain(self, keep: int = 0) -> None:
        """Follow all steps but the last `keep`; waits for each of them."""
        while len(self._pending) > keep:
            self._streams.block_until(self._pending[0].over)
            self._follow(self._pending.popleft())

    def forget(self) -> None:
        """Follow nothing of what was launched: the device has failed."""
        self._pending.clear()

    def restart(self) -> None:
        """Begin anew with a state on the device that has counted nothing yet."""
        self._tallied = PrefetchTallies(0, 0, 0, 0, 0, 0)

    def _follow(self, pending: PendingStep) -> None:
        missed = self._follow_events(pending)
        if pending.variant.prefetch:
            self._count_prefetches(pending.log.tallies())
        seconds = self._streams.seconds_between(pending.began, pending.over)
        self._books.follow_step(pending.step, seconds)
        if pending.timed and self._books.is_comparable(pending.step, pending.variant.prefetch):
            adjusted = self._adjusted(seconds, missed)
            if adjusted is not None:
                self._books.compare(pending.step, adjusted)

    def _follow_events(self, pending: PendingStep) -> int:
        """Serve and record every event of a step; returns how many experts it missed."""
        log, step, missed, stalled_s = pending.log, pending.step, 0, pending.log.stalled_s()
        for layer, row in enumerate(log.routed(pending.number)):
            if pending.recorder is not None:
                _record(pending.recorder, pending, layer, row)
            experts, counts = count_experts(row, log.tokens)
            if len(experts):
                stall = max(float(stalled_s[layer]), 0.0)
                missed += self._books.follow_event(step, layer, experts, counts, log.tokens, stall)
        return missed

    def _count_prefetches(self, now: PrefetchTallies) -> None:
        since = PrefetchTallies(*(after - before for after, before in zip(now, self._tallied, strict=True)))
        self._books.count_prefetches(since)
        self._tallied = now


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

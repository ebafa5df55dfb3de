"""Looks after a live cache between passes: hits over time, changes of workload, the rival, and warm pins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from hotset.cache.controller import Controller
from hotset.cache.rival import BASELINE, Rival
from hotset.cache.shadow import Tally, log_is_full, take_log
from hotset.cache.shift import ShiftWatch
from hotset.cache.usage import USES
from hotset.cache.warm_pin import WarmPin
from hotset.profile.statistics import MAX_SPANS, History, Mark
from hotset.trace import Phase

SHIFT = "shift"
"""The name of a change of workload that nobody announced."""

_FEW_TOKENS = 24  # say nothing about what a workload uses


class Supervisor:
    """Reads the log of a live cache from time to time; never on the path of a token."""

    def __init__(
        self, live: Controller, say: Callable[[str], None], *, switch: bool = False, warm_pin_tokens: int = 0
    ) -> None:
        self.live = live
        plain = live.policy.spec == BASELINE
        self.rival = None if plain else Rival(live, say, switch=switch)
        self.warm_pin = WarmPin(live, warm_pin_tokens, say) if warm_pin_tokens else None
        self._spans: deque[tuple[int, int, int]] = deque(maxlen=MAX_SPANS)
        self._marks: deque[Mark] = deque(maxlen=MAX_SPANS)
        self._tokens = 0
        self._forgotten_tokens = 0
        self._tally = Tally(live)
        self._shifts = ShiftWatch()
        self._unjudged_tokens = 0
        self._uses = live.usage.counts[USES, Phase.DECODE].copy()

    def after_pass(self) -> None:
        """Look at the log once it is worth it; cheap otherwise."""
        if log_is_full(self.live.usage, self.live.plan.shape):
            self.look()

    def look(self) -> None:
        """Take in all that happened since the last look."""
        events = take_log(self.live.usage, self.live.plan.shape)
        if not len(events):
            return
        span = self._tally.look()
        if span[0]:
            self._add(span)
        if self.rival is not None:
            self.rival.take(events)
        if self.warm_pin is not None:
            self.warm_pin.take(events)

    def mark(self, label: str) -> None:
        """Note that something begins here, such as another workload."""
        self.look()
        self._marks.append(Mark(self._tokens, label))

    def history(self) -> History:
        """Hits over time, with what was marked."""
        spans = np.array(list(self._spans), np.int64).reshape(-1, 3)
        gone = self._forgotten_tokens
        marks = tuple(Mark(mark.tokens - gone, mark.label) for mark in self._marks if mark.tokens >= gone)
        return History(spans, marks)

    def _add(self, span: tuple[int, int, int]) -> None:
        self._unjudged_tokens += span[0]
        if self._unjudged_tokens >= _FEW_TOKENS:
            self._look_for_shift(self._tokens + span[0] - self._unjudged_tokens)
        if len(self._spans) == MAX_SPANS:
            self._forgotten_tokens += self._spans[0][0]
        self._spans.append(span)
        self._tokens += span[0]

    def _look_for_shift(self, since_tokens: int) -> None:
        uses = self.live.usage.counts[USES, Phase.DECODE]
        if self._shifts.take((uses - self._uses).astype(float)):
            self._marks.append(Mark(since_tokens, SHIFT))
            if self.warm_pin is not None:
                self.warm_pin.observe_anew()
        self._uses = uses.copy()
        self._unjudged_tokens = 0

"""Looks after a live cache between passes: hits over time, lru in the shadow, and warm pins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from hotset.cache.controller import Controller
from hotset.cache.shadow import CounterDelta, log_is_full, log_is_whole, take_log
from hotset.cache.shadow_comparison import BASELINE, ShadowComparison
from hotset.cache.warm_pin import WarmPin
from hotset.profile.statistics import MAX_SPANS, History, Mark


class CacheMonitor:
    """Reads the log of a live cache from time to time; never on the path of a token."""

    def __init__(
        self, live: Controller, notify: Callable[[str], None], *, switch: bool = False, warm_pin_tokens: int = 0
    ) -> None:
        self.live = live
        plain = live.policy.spec == BASELINE
        self.comparison = None if plain else ShadowComparison(live, notify, switch=switch)
        self.warm_pin = WarmPin(live, warm_pin_tokens, notify) if warm_pin_tokens else None
        self._spans: deque[tuple[int, int, int]] = deque(maxlen=MAX_SPANS)
        self._marks: deque[Mark] = deque(maxlen=MAX_SPANS)
        self._tokens = 0
        self._forgotten_spans = 0
        self._delta = CounterDelta(live)

    @property
    def is_due(self) -> bool:
        """Whether the log is worth a look; asked after every step, so it is cheap."""
        return log_is_full(self.live.usage, self.live.plan.shape)

    def poll(self) -> None:
        """Take in all that happened since the last poll."""
        whole = log_is_whole(self.live.usage)
        events = take_log(self.live.usage, self.live.plan.shape)
        if not len(events):
            return
        span = self._delta.read()
        if span[0]:
            self._forgotten_spans += len(self._spans) == self._spans.maxlen
            self._spans.append(span)
            self._tokens += span[0]
        elif self._spans:  # the rest of a pass that was polled in its middle
            tokens, hits, misses = self._spans[-1]
            self._spans[-1] = tokens, hits + span[1], misses + span[2]
        for listener in (self.comparison, self.warm_pin):
            if listener is not None:
                listener.take(events if whole else None)

    def mark(self, label: str) -> None:
        """Note that something begins here, such as another workload."""
        self.poll()
        self._marks.append(Mark(self._tokens, label))

    @property
    def spans_ever(self) -> int:
        """The number of spans so far, forgotten ones included."""
        return self._forgotten_spans + len(self._spans)

    def history(self, first: int = 0) -> History:
        """Hits over time, with what was marked, from the span of this number on."""
        spans = list(self._spans)[max(first - self._forgotten_spans, 0) :]
        began = self._tokens - sum(span[0] for span in spans)
        marks = tuple(Mark(mark.tokens - began, mark.label) for mark in self._marks if mark.tokens >= began)
        return History(np.array(spans, np.int64).reshape(-1, 3), marks)

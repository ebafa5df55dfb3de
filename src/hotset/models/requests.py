"""What each request used and cost: noted when the next one begins, never on the path of a token."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.cache.counters import Counters
from hotset.cache.statistics import phase_tokens
from hotset.cache.usage import USES
from hotset.profile.statistics import Counts
from hotset.runtime.engine import Engine
from hotset.runtime.passes import Pass
from hotset.trace import Phase

KEPT = 64
"""Requests that are remembered."""


class Request(NamedTuple):
    """One answered prompt: its activation matrix and its counters."""

    number: int
    uses: npt.NDArray[np.int32]  # [phases, layers, experts]
    tokens: Counts  # [phases]
    counters: Counters
    loaded_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """The figures of the request as plain values."""
        return {
            "request": self.number,
            "prefill_tokens": int(self.tokens[Phase.PREFILL]),
            "decode_tokens": int(self.tokens[Phase.DECODE]),
            "prefill": self.counters.as_dict(Phase.PREFILL),
            "decode": self.counters.as_dict(Phase.DECODE),
            "loaded_bytes": self.loaded_bytes,
        }


class RequestLog:
    """Cuts the running statistics of an engine into requests; a prompt after decoding begins a new one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._done: deque[Request] = deque(maxlen=KEPT)
        self._number = 0
        self._decoding = True
        self._start()

    def before(self, run: Pass) -> None:
        """Take note of a pass that is about to begin."""
        if run.phase == Phase.PREFILL and self._decoding:
            self._finish()
        self._decoding = run.phase == Phase.DECODE

    def all(self) -> list[Request]:
        """The last requests, the one under way included."""
        current = self._current()
        return [*self._done, *([current] if current.tokens.any() else [])]

    def _start(self) -> None:
        controller = self._engine.controller
        self._uses = controller.usage.counts[USES].copy()
        self._tokens = phase_tokens(controller)
        self._counters = controller.counters()
        self._bytes = self._engine.total_loaded_bytes

    def _finish(self) -> None:
        current = self._current()
        if current.tokens.any():
            self._done.append(current)
            self._number += 1
        self._start()

    def _current(self) -> Request:
        controller = self._engine.controller
        return Request(
            self._number,
            (controller.usage.counts[USES] - self._uses).astype(np.int32),
            phase_tokens(controller) - self._tokens,
            controller.counters() - self._counters,
            self._engine.total_loaded_bytes - self._bytes,
        )

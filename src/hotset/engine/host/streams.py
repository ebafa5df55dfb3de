"""The streams of a GPU: copies beside the compute, and what waits for what."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch


class Streams:
    """Copies beside the compute, and what waits for what; a device without streams does all in order anyway."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda: Any = torch.cuda
        self._copies = self._cuda.Stream(device) if device.type == "cuda" else None
        self._prefetch = self._cuda.Stream(device) if device.type == "cuda" else None
        self._waits: deque[tuple[Any, Any]] = deque(maxlen=1 << 14)

    def copying(self) -> Any:
        """A context in which copies go to their own stream."""
        return torch.cuda.stream(self._copies)  # does nothing for None

    def prefetching(self) -> Any:
        """A context in which copies go to the stream of prefetch, which demand does not wait for."""
        return torch.cuda.stream(self._prefetch)  # does nothing for None

    def mark_prefetch(self) -> Any:
        """What marks the end of all prefetch copies so far."""
        return None if self._prefetch is None else self._prefetch.record_event(self._cuda.Event(enable_timing=True))

    def mark_copies(self) -> Any:
        """What marks the end of all copies so far."""
        return None if self._copies is None else self._copies.record_event(self._cuda.Event(enable_timing=True))

    def mark(self) -> Any:
        """What marks the end of all compute so far."""
        return None if self._copies is None else torch.cuda.current_stream(self.device).record_event()

    def moment(self) -> Any:
        """A mark in the compute stream that knows its time."""
        if self._copies is None:
            return time.perf_counter()
        return torch.cuda.current_stream(self.device).record_event(self._cuda.Event(enable_timing=True))

    def seconds_between(self, began: Any, over: Any) -> float:
        """The time from one moment to a later one, which must have passed."""
        if self._copies is None:
            return float(over - began)
        return float(began.elapsed_time(over)) / 1000

    def compute_waits_for(self, mark: Any) -> None:
        """Let the compute from here on begin after a mark, and note for how long it had nothing to do."""
        if mark is None:
            return
        stream = torch.cuda.current_stream(self.device)
        idle = stream.record_event(self._cuda.Event(enable_timing=True))
        stream.wait_event(mark)
        self._waits.append((idle, mark))

    def wait_for(self, mark: Any) -> None:
        """Let the compute from here on begin after a mark, off the books."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def copies_wait_for(self, mark: Any) -> None:
        """Let the copies from here on begin after a mark."""
        if self._copies is not None:
            self._copies.wait_event(mark)

    def wait_for_copies(self) -> None:
        """Block until all copies are done."""
        if self._copies is not None and self._prefetch is not None:
            self._copies.synchronize()
            self._prefetch.synchronize()

    def wait_for_all(self) -> None:
        """Block until the device has nothing left to do."""
        if self._copies is not None:
            torch.cuda.synchronize(self.device)

    def block_until(self, mark: Any) -> None:
        """Block the calling thread until a mark is reached."""
        if mark is not None and self._copies is not None:
            mark.synchronize()

    def waited_s(self) -> float:
        """The time that the compute spent waiting for copies since the last call."""
        if self._copies is None:
            return 0.0
        torch.cuda.synchronize(self.device)
        total_ms = 0.0
        while self._waits:
            idle, mark = self._waits.popleft()
            total_ms += max(idle.elapsed_time(mark), 0.0)
        return total_ms / 1000

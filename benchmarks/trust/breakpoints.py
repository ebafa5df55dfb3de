"""Interrupts at chosen places: a KeyboardInterrupt wherever CPython could deliver a signal in hotset's own code.

Signals and asynchronous exceptions are delivered when a function begins, when a loop jumps back, and after a call. A
trace function counts these places, in all Python code that hotset runs or calls while it serves an event, and raises at
those that were chosen; so all of them can be tried one after the other.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import hotset

_PACKAGE = str(Path(hotset.__file__).parent)
_INSIDE = tuple(f"{_PACKAGE}/{part}" for part in ("transfer/", "engine/", "cache/", "models/tracker"))
SUPPORTED = sys.version_info < (3, 12)
"""Later versions report instructions to trace functions at other places, so that nothing would be struck."""
_BEGINS = dis.opmap.get("RESUME", -1)
_CHECKED = frozenset(
    dis.opmap[name] for name in ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "RESUME", "JUMP_BACKWARD") if name in dis.opmap
)


class Place(NamedTuple):
    """An instruction before which a signal can be delivered."""

    file: str
    line: int | None
    function: str
    instruction: int


class Breakpoints:
    """Within the block, counts the places where a signal could be delivered, and raises at one, and soon after again.

    `at` is a place and how often it is passed before, or a number of places that are passed before; `again` says after
    how many more places to raise once more each.
    """

    def __init__(
        self,
        at: tuple[Place, int] | int | None = None,
        again: Sequence[int] = (),
        error: type[BaseException] = KeyboardInterrupt,
    ) -> None:
        self.passed: Counter[Place] = Counter()
        self.struck: list[Place] = []
        self._at, self._again, self._error = at, list(again), error
        self._last: dict[FrameType, int] = {}
        self._before: Any = None

    def __enter__(self) -> Breakpoints:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.settrace(self._before)
        self._last.clear()

    def _call(self, frame: FrameType, _: str, __: Any) -> Callable[..., Any] | None:
        """Follow hotset's own functions, and what they call, but not the model."""
        if frame.f_code.co_filename.startswith(_INSIDE) or (frame.f_back in self._last and not _is_large(frame)):
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            self._last[frame] = _BEGINS
            return self._opcode
        return None

    def _opcode(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "return":
            self._last.pop(frame, None)
        elif event == "opcode":
            before, self._last[frame] = self._last.get(frame, -1), frame.f_code.co_code[frame.f_lasti]
            if before in _CHECKED:
                self._pass(frame)
        return self._opcode

    def _pass(self, frame: FrameType) -> None:
        code = frame.f_code
        place = Place(Path(code.co_filename).name, frame.f_lineno, code.co_name, frame.f_lasti)
        times = self.passed[place]
        self.passed[place] += 1
        if self._is_next(place, times):
            self.struck.append(place)
            raise self._error

    def _is_next(self, place: Place, times: int) -> bool:
        if not self.struck:
            return self._at in ((place, times), self.passed.total() - 1)
        if not self._again:
            return False
        self._again[0] -= 1
        return self._again[0] < 0 and self._again.pop(0) < 0


def _is_large(frame: FrameType) -> bool:
    """Whether a function is of a library that has many of them and no state of ours."""
    name = frame.f_code.co_filename
    return "site-packages" in name or threading.current_thread() is not threading.main_thread()

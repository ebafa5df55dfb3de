"""Ctrl-C and SIGTERM: they ask generation to stop, and hold until what is being saved is saved.

SIGTERM is what service managers, containers and schedulers send before they kill: it ends a command as Ctrl-C does, and
for good.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hotset.generation.stopping import Stop

INTERRUPTED, TERMINATED = 130, 143
"""What shells report of programs that SIGINT and SIGTERM have ended."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_seen: set[int] = set()  # the signals that have come, of this process


def exit_code() -> int:
    """The exit code of a command that was stopped."""
    return TERMINATED if is_terminated() else INTERRUPTED


def is_terminated() -> bool:
    """Whether SIGTERM has come: the command is to end, whatever it was asked to do next."""
    return signal.SIGTERM in _seen


def _leave(number: int, _: Any) -> None:
    _seen.add(number)
    raise KeyboardInterrupt


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does: what it holds is saved on the way out."""
    _seen.clear()
    with _handled_by(_leave, (signal.SIGTERM,)):
        yield


@contextmanager
def saving() -> Iterator[None]:
    """Hold back what asks to stop until the block is over; a second one leaves at once."""
    held: list[int] = []

    def hold(number: int, _: Any) -> None:
        _seen.add(number)
        if held:
            raise KeyboardInterrupt
        held.append(number)

    with _handled_by(hold):
        yield
    if held:
        raise KeyboardInterrupt


@contextmanager
def _handled_by(handler: Callable[[int, Any], None], numbers: tuple[int, ...] = _SIGNALS) -> Iterator[None]:
    """Have signals handled for a block; only the main thread may."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Within the block Ctrl-C and SIGTERM ask to stop; the second one leaves at once."""
    stop = Stop()

    def ask(number: int, _: Any) -> None:
        _seen.add(number)
        if stop.asked:
            raise KeyboardInterrupt
        stop.ask()

    with _handled_by(ask):
        yield stop


class InterruptGuard:
    """Within the block Ctrl-C and SIGTERM leave, at the next check at the latest: imports of libraries swallow them."""

    def __init__(self) -> None:
        self._asked = False
        self._handled: Any = None

    def __enter__(self) -> InterruptGuard:
        self._handled = _handled_by(self._ask)
        self._handled.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._handled.__exit__(None, None, None)

    def check(self) -> None:
        """Leave if that was asked for."""
        if self._asked:
            raise KeyboardInterrupt

    def _ask(self, number: int, _: Any) -> None:
        _seen.add(number)
        self._asked = True
        raise KeyboardInterrupt

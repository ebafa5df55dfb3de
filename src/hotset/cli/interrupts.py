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


@contextmanager
def _on_signals(react: Callable[[], None], numbers: tuple[int, ...] = _SIGNALS) -> Iterator[None]:
    """Have something done at signals for a block; only the main thread may."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _: Any) -> None:
        _seen.add(number)
        react()

    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does: what it holds is saved on the way out."""
    _seen.clear()
    with _on_signals(_leave, (signal.SIGTERM,)):
        yield


def _leave() -> None:
    raise KeyboardInterrupt


@contextmanager
def saving() -> Iterator[None]:
    """Hold back what asks to stop until the block is over; a second one leaves at once."""
    with stop_on_signals() as stop:
        yield
    if stop.asked:
        raise KeyboardInterrupt


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Within the block Ctrl-C and SIGTERM ask to stop; the second one leaves at once."""
    stop = Stop()

    def ask() -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.ask()

    with _on_signals(ask):
        yield stop


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Within the block Ctrl-C and SIGTERM leave, by the next call of what it yields at last: imports swallow them."""
    asked = Stop()

    def leave() -> None:
        asked.ask()
        raise KeyboardInterrupt

    def check() -> None:
        if asked.asked:
            raise KeyboardInterrupt

    with _on_signals(leave):
        yield check

"""Ctrl-C, SIGTERM and SIGHUP: they ask generation to stop, and hold until what is being saved is saved.

SIGTERM is what service managers, containers and schedulers send before they kill, SIGHUP comes when a terminal is
closed: they end a command as Ctrl-C does, and for good.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hotset.generation.stopping import Stop

INTERRUPTED, TERMINATED, HUNG_UP = 130, 143, 129
"""What shells report of programs that SIGINT, SIGTERM and SIGHUP have ended."""
_FOR_GOOD = (signal.SIGTERM, signal.SIGHUP)
_SIGNALS = (signal.SIGINT, *_FOR_GOOD)
_seen: set[int] = set()  # the signals that have come, of this process


def exit_code() -> int:
    """The exit code of a command that was stopped."""
    if signal.SIGTERM in _seen:
        return TERMINATED
    return HUNG_UP if signal.SIGHUP in _seen else INTERRUPTED


def is_terminated() -> bool:
    """Whether SIGTERM or SIGHUP has come: the command is to end, whatever it was asked to do next."""
    return any(number in _seen for number in _FOR_GOOD)


@contextmanager
def _on_signals(react: Callable[[], None], numbers: tuple[int, ...] = _SIGNALS) -> Iterator[None]:
    """Have something done at signals for a block; only the main thread may."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _: Any) -> None:
        again = number in _seen
        _seen.add(number)
        if not (again and number == signal.SIGHUP):  # the system and the shell both send it, and no person insists
            react()

    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()  # nohup
    before = {number: signal.signal(number, handle) for number in numbers if number not in ignored}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does: what it holds is saved on the way out."""
    _seen.clear()
    with _on_signals(_leave, _FOR_GOOD):
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
    """Within the block all three ask to stop; a second one leaves at once."""
    stop = Stop()

    def ask() -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.ask()

    with _on_signals(ask):
        yield stop


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Within the block all three leave, by the next call of what it yields at last: imports swallow them."""
    asked = Stop()

    def leave() -> None:
        asked.ask()
        raise KeyboardInterrupt

    def check() -> None:
        if asked.asked:
            raise KeyboardInterrupt

    with _on_signals(leave):
        yield check

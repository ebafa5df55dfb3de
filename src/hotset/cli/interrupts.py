"""Ctrl-C and SIGTERM: they end an answer between two tokens, or a prompt between two layers, and what is kept is kept.

Never in the middle of a layer, so that an answer ends where a pass ends; the engine would mend that, too. SIGTERM is
what service managers, containers and schedulers send before they kill: it ends a command as Ctrl-C does, and for good.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hotset.errors import StopAsked

INTERRUPTED, TERMINATED = 130, 143
"""What shells report of programs that SIGINT and SIGTERM have ended."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_seen: set[int] = set()  # the signals that have come, of this process


class Stopped(StopAsked):
    """Somebody asked to stop before the first token was there."""


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


class Interrupt:
    """Within the block Ctrl-C and SIGTERM ask to stop; the second one leaves at once."""

    def __init__(self, model: Any) -> None:
        self.asked = False
        self.begun = False  # whether there is an answer to keep
        self._model = model
        self._hooks: list[Any] = []
        self._handled: Any = None

    def __enter__(self) -> Interrupt:
        self._handled = _handled_by(self._ask)
        self._handled.__enter__()
        self._hooks = [layer.register_forward_pre_hook(self._between_layers) for layer in _layers(self._model)]
        return self

    def __exit__(self, *_: object) -> None:
        self._handled.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()

    def criterion(self, ids: Any, scores: Any) -> Any:  # noqa: ARG002 - as transformers calls it
        """Whether each sequence ends here, as a stopping criterion of transformers."""
        import torch

        return torch.full((ids.shape[0],), self.asked, dtype=torch.bool, device=ids.device)

    def _ask(self, number: int, _: Any) -> None:
        _seen.add(number)
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def _between_layers(self, *_: Any) -> None:
        if self.asked and not self.begun:
            raise Stopped


class Leaving:
    """Within the block Ctrl-C and SIGTERM leave, at the next check at the latest: imports of libraries swallow them."""

    def __init__(self) -> None:
        self._asked = False
        self._handled: Any = None

    def __enter__(self) -> Leaving:
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


def _layers(model: Any) -> list[Any]:
    """The decoder layers, found as the lists that have as many modules as the config says."""
    import torch

    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    return [layer for each in lists for layer in each]

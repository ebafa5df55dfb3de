"""Sends the experts' calls through hotset for as long as a listener wants to know what is routed."""

from __future__ import annotations

from collections.abc import Callable

Undo = Callable[[], None]


class RoutingHook:
    """A hook that several listeners share; `install` puts it in and returns what takes it out."""

    def __init__(self, install: Callable[[], list[Undo]] = list) -> None:
        self._install = install
        self._undo: list[Undo] = []
        self._users = 0

    def acquire(self) -> Undo:
        """Have the hook installed; returns what releases it."""
        if not self._users:
            self._undo = self._install()
        self._users += 1
        return self._release

    def _release(self) -> None:
        self._users -= 1
        if not self._users:
            for undo in reversed(self._undo):
                undo()
            self._undo = []

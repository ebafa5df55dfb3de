"""Sends the experts' calls through hotset for as long as somebody wants to know what is routed."""

from __future__ import annotations

from collections.abc import Callable

Undo = Callable[[], None]


class Tap:
    """A tap that several listeners may hold open; `install` puts it in and returns what takes it out."""

    def __init__(self, install: Callable[[], list[Undo]] = list) -> None:
        self._install = install
        self._undo: list[Undo] = []
        self._holders = 0

    def hold(self) -> Undo:
        """Open the tap; returns what lets go of it."""
        if not self._holders:
            self._undo = self._install()
        self._holders += 1
        return self._release

    def _release(self) -> None:
        self._holders -= 1
        if not self._holders:
            for undo in reversed(self._undo):
                undo()
            self._undo = []

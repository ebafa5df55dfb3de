"""Which process something belongs to: a fork copies memory, but neither threads nor the right to clean up."""

from __future__ import annotations

import os

from hotset.errors import ForkError


class Owner:
    """The process that made an object; a child of it has a copy that owns nothing."""

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is the process that the object was made in."""
        return os.getpid() == self.pid

    def check(self) -> None:
        """Refuse to work in a child: its threads stayed with the parent, and locks may be held for ever."""
        if not self.is_here:
            raise ForkError

"""Who has the state of a cache: the host, or a device that serves events by itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable


class CacheLease:
    """A device takes the cache by uploading it; the host recalls it before it serves an event or changes anything.

    While it is held, the arrays of the host lag behind: only the follower of the device's log may write to them.
    """

    def __init__(self) -> None:
        self._give_back: weakref.WeakMethod[Callable[[], None]] | None = None

    @property
    def held(self) -> bool:
        """Whether a device has the cache."""
        return self._give_back is not None and self._give_back() is not None

    def take(self, give_back: Callable[[], None]) -> None:
        """Have the cache from here on; `give_back`, a method of the holder, brings the host's arrays up to date.

        The lease does not keep its holder alive: with a holder that is gone, its events are gone.
        """
        self._give_back = weakref.WeakMethod(give_back)

    def recall(self) -> None:
        """Have the host go on from where the device is; what is interrupted is done again at the next call."""
        give_back = None if self._give_back is None else self._give_back()
        if give_back is not None:
            give_back()
        self._give_back = None

    def end(self) -> None:
        """Let the host go on from where it is: the device has failed, and what it has done is unknown."""
        self._give_back = None

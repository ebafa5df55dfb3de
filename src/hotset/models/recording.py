"""A recording of a live model: it begins when it is made and is written when it ends, by a block or by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from torch import Tensor

from hotset.errors import HotsetError
from hotset.models.tap import Tap
from hotset.runtime.engine import Engine
from hotset.trace.recorder import Recorder

Gate = Callable[[int, Tensor], Tensor]
"""What the routers of the layers ahead make of a layer's input."""


class Recording(Recorder):
    """Gathers what an engine routes until it is stopped."""

    def __init__(
        self, engine: Engine, path: Path | None, meta: dict[str, str], tap: Tap, gate: Gate | None = None
    ) -> None:
        super().__init__(engine.shape, meta)
        self._engine, self._path = engine, path
        with engine.quiet():  # what was served before is not part of it
            if engine.recorder is not None:
                raise HotsetError("this model is being recorded already: end that recording first")
            engine.recorder, engine.gate = self, gate
        self._untap = tap.hold()

    def stop(self) -> None:
        """End the recording, and write it if it was given a path and anything ran; more than once does no harm."""
        if self._engine.recorder is not self or not self._engine.owner.is_here:  # a parent writes its own
            return
        with self._engine.quiet():  # and all that was served is
            self._engine.recorder = self._engine.gate = None
        self._untap()
        if self._path is not None and self.blocks:
            self.save(self._path)

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.drop_incomplete()
        self.stop()

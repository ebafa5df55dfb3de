"""A recording of a live model: it begins when it is made and is written when it ends, by a block or by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from hotset.engine.engine import Engine
from hotset.errors import HotsetError
from hotset.forecasts import MAX_DISTANCE
from hotset.models.routers import Routers
from hotset.models.routing_hook import RoutingHook
from hotset.trace import Trace
from hotset.trace.recorder import Recorder
from hotset.trace.run import Run
from hotset.trace.trace import Labels

RoutersAhead = Callable[[int, Tensor], Tensor]
"""What the routers of the next layers make of a layer's input."""


def routers_ahead(routers: Routers | None, distances: int, top_k: int) -> RoutersAhead:
    """What a recording asks the routers of the next so many layers."""
    if not 1 <= distances <= MAX_DISTANCE:
        raise HotsetError(f"the lookahead is 1 to {MAX_DISTANCE} layers, not {distances}")
    if routers is None:
        raise HotsetError("this model's routers are not plain matrices: their predictions cannot be recorded")
    return partial(routers.predict, distances=distances, width=2 * top_k)


class Recording(Recorder):
    """Gathers what an engine routes until it is stopped."""

    def __init__(
        self,
        engine: Engine,
        path: Path | None,
        meta: dict[str, str],
        routing_hook: RoutingHook,
        routers: RoutersAhead | None = None,
    ) -> None:
        super().__init__(engine.shape, meta)
        self._engine, self._path = engine, path
        self._run: dict[str, str] | None = None
        with engine.paused():  # what was served before is not part of it
            if engine.stats.recorder is not None:
                raise HotsetError("this model is being recorded already: end that recording first")
            engine.stats.start_recording(self, routers)
            self._before = _history(engine)
        self._release_hook = routing_hook.acquire()

    def finish(self, labels: Labels = ()) -> Trace:
        """All that was recorded, as a trace that says which cache it ran with."""
        trace = super().finish(labels)
        run = self._run if self._run is not None else _run_meta(self._engine, self._before)
        return replace(trace, meta={**trace.meta, **run})

    def stop(self) -> None:
        """End the recording, and write it if it was given a path and anything ran; more than once does no harm."""
        if self._engine.stats.recorder is not self or not self._engine.guard.owner.is_here:  # a parent writes its own
            return
        with self._engine.paused():  # and all that was served is
            self._engine.stats.stop_recording()
            self._run = _run_meta(self._engine, self._before)
        self._release_hook()
        if self._path is not None and self.blocks:
            self.save(self._path)

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop_incomplete()
        self.stop()


class _History(NamedTuple):
    """What happened to a cache so far: events, and changes by anything but events."""

    events: int
    changes: int


def _history(engine: Engine) -> _History:
    controller = engine.controller
    warmed = int(controller.residency.preloaded.sum())
    return _History(int(controller.table.clock[0]), controller.residency.version + warmed + len(controller.pins()))


def _run_meta(engine: Engine, before: _History) -> dict[str, str]:
    """The cache of a recording; where every expert is resident there is none."""
    if engine.offload is None:
        return {}
    plan, differs = engine.controller.plan, ""
    if before.changes:
        differs = "the cache began with what a profile, a pin or an earlier switch had put into it"
    elif before.events:
        differs = "the cache had served others before"
    elif _history(engine).changes:
        differs = "the cache was changed by more than the events while it ran"
    spec = engine.controller.policy.spec
    return Run(spec, plan.scope.value, plan.cached, plan.staging, plan.prefetch_rows, differs).to_meta()

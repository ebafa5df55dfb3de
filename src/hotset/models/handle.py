"""`model.hotset`: what a person can ask of, and tell, a model that runs through hotset."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotset.engine.engine import Engine
from hotset.engine.requests import Request
from hotset.errors import ClosedError, HotsetError
from hotset.models.cache_report import CacheReport
from hotset.models.fingerprint import fingerprint_of
from hotset.models.layers import MoeLayer
from hotset.models.learning import hottest_share
from hotset.models.notices import Notices
from hotset.models.patches import Patches, refuse_calls
from hotset.models.placeholders import Placeholder
from hotset.models.profile_writer import ProfileWriter
from hotset.models.recording import Recording, routers_ahead
from hotset.models.routers import Routers
from hotset.models.routing_hook import RoutingHook
from hotset.models.static_caches import KVCachePool
from hotset.models.tracker import StepTracker
from hotset.profile import Profile
from hotset.profile.folder import locate
from hotset.shape import ExpertKey, format_size

if TYPE_CHECKING:
    from hotset.report.live import Requests, Stats


class Handle(CacheReport):
    """The cache of one model."""

    def __init__(
        self,
        model: Any,
        engine: Engine,
        moe_layers: list[MoeLayer],
        tracker: StepTracker,
        *,
        routing_hook: RoutingHook | None = None,
        notices: Notices | None = None,
        placeholders: list[Placeholder] | None = None,
        profile: Profile | None = None,
    ) -> None:
        notices = notices or Notices()
        super().__init__(engine, str(getattr(model.config, "_name_or_path", "") or type(model).__name__), notices.lines)
        self.moe_layers, self.tracker = moe_layers, tracker
        self.routing_hook = routing_hook or RoutingHook()
        self.placeholders = [] if placeholders is None else placeholders  # in the place of the experts' parameters
        self.warn = notices.add
        self.profile = profile  # that it began with
        self.fingerprint = fingerprint_of(model, moe_layers)
        self.patches = Patches()
        self.static_caches = KVCachePool(model.config)
        self._model = weakref.ref(model)
        self._profile_writers: dict[Path, ProfileWriter] = {}
        self._closed = False

    def stats(self) -> Stats:
        """What happened since the last reset, as `CacheReport.stats` says; it prints as a line."""
        from hotset.report.live import Stats

        return Stats(super().stats())

    def requests(self) -> Requests[Request]:
        """The last 64 requests, as `CacheReport.requests` says; they print as a line."""
        from hotset.report.live import Requests

        return Requests(super().requests())

    def observe(self) -> None:
        """Count what is routed also where every expert fits and the model runs untouched; costs a little time."""
        self.patches.add(self.routing_hook.acquire())

    def save_profile(self, name: str | Path, *, overwrite: bool = False) -> Path:
        """Add what was seen since the last save to a profile, a name or a path, and return its file.

        A profile that is there goes on, what it holds fading with time; `overwrite` begins it anew.
        """
        self.engine.guard.owner.check()  # a child would add what its parent adds, too
        path = locate(str(name))
        if overwrite:
            self._profile_writers.pop(path, None)
        writer = self._profile_writers.setdefault(path, ProfileWriter(self.engine, self.fingerprint, path))
        if not writer.save(anew=overwrite) and (overwrite or not path.exists()):
            raise HotsetError(
                "nothing was used yet, so there is nothing to save: run the model first"
                + (", after model.hotset.observe()" if self.engine.offload is None else "")
            )
        return path

    def pins(self) -> list[ExpertKey]:
        """The pinned experts, by layer and expert."""
        with self.engine.paused():
            return self.engine.controller.pins()

    def pin(self, which: str | Iterable[tuple[int, int]]) -> list[ExpertKey]:
        """Keep experts for good: pairs of layer and expert, or the hottest for a share of the slots such as "20%"."""
        self.check_open()
        if isinstance(which, str):
            learnt = 0.0 if self.profile is None else self.profile.hotness()
            keys = hottest_share(self.engine.controller, self.statistics().rate + learnt, which)
        else:
            keys = [ExpertKey(*key) for key in which]
        self.engine.pin(keys)
        return keys

    def unpin(self, which: Iterable[tuple[int, int]] | None = None) -> None:
        """Let pinned experts go, all of them or those named; they stay until something better comes."""
        self.check_open()
        self.engine.offloaded("unpin")
        engine = self.engine
        with engine.paused():
            engine.controller.unpin(self.pins() if which is None else [ExpertKey(*key) for key in which])

    def trace(
        self,
        path: str | Path | None = None,
        *,
        meta: dict[str, str] | None = None,
        lookahead: int = 0,
        guesses: int | None = None,
    ) -> Recording:
        """Record what follows, until the `with` block ends, `stop()` is called or the model is closed.

        The trace is written to the path then, whole or not at all; without a path, `finish()` returns it. With
        `lookahead` it also holds what the routers of the next so many layers make of each layer's input.
        """
        if guesses is not None:
            warnings.warn("guesses is deprecated: use lookahead", DeprecationWarning, stacklevel=2)
            lookahead = guesses
        self.check_open()
        mark = {"architecture": self.fingerprint.architecture, "digest": self.fingerprint.digest}
        about = {"model": Path(self.model_name).name, "source": "hotset"} | mark | (meta or {})
        found = Routers.of(self._model(), self.moe_layers) if lookahead else None
        routers = routers_ahead(found, lookahead, self.engine.shape.top_k) if lookahead else None
        return Recording(self.engine, None if path is None else Path(path), about, self.routing_hook, routers)

    def close(self) -> None:
        """Stop the threads and free the slots; more than once does no harm.

        The experts are gone then, so the model refuses to run, to be saved and to be detached. Only where all experts
        fit it goes on as plain transformers: there they are the model's own. In a forked process nothing is given
        back, since all of it is the parent's.
        """
        if self._closed:
            return
        self._closed = True
        is_here, model = self.engine.guard.owner.is_here, self._model()
        with ExitStack() as last:  # each of these is done, whatever the others raise
            if self.engine.offload is not None:
                if model is not None:
                    last.callback(lambda: self.patches.add(refuse_calls(model), until_whole=True))
                if is_here:
                    self.engine.guard.refuse_calls()
            if is_here:
                last.callback(self.engine.close)
                _free_calls(last, self.engine, self.patches)

    def release(self) -> None:
        """Take hotset out of the model's calls, and leave the engine to its maker."""
        self._closed = True
        with ExitStack() as last:
            last.callback(self.patches.lift)
            _free_calls(last, self.engine, self.patches)

    def check_open(self) -> None:
        """Refuse what a closed model cannot do."""
        if self._closed and self.engine.offload is not None:
            raise ClosedError
        self.engine.guard.owner.check()

    def __enter__(self) -> Handle:
        """Close the model at the end of a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        plan = self.engine.controller.plan
        size, policy = format_size(sum(self.engine.resident_bytes().values())), self.engine.controller.policy.spec
        return f"<hotset: {plan.cached} of {plan.shape.total_experts} experts in {size}, {policy}>"


def _free_calls(last: ExitStack, engine: Engine, patches: Patches) -> None:
    """Have the model's calls freed at the end, after a recording in progress is written."""
    last.callback(patches.close)
    if isinstance(engine.stats.recorder, Recording):
        last.callback(engine.stats.recorder.stop)

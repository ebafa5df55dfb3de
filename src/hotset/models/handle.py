"""`model.hotset`: what a person can ask of, and tell, a model that runs through hotset."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hotset.cache.counters import Count, Counters
from hotset.engine.engine import Engine
from hotset.errors import ClosedError, HotsetError
from hotset.forecasts import MAX_DISTANCE
from hotset.models.cache_report import CacheReport
from hotset.models.fingerprint import fingerprint_of
from hotset.models.layers import MoeLayer
from hotset.models.learning import hottest_share
from hotset.models.notices import Notices
from hotset.models.patches import Patches, refuse_calls
from hotset.models.placeholders import Placeholder
from hotset.models.profile_writer import ProfileWriter
from hotset.models.recording import Gate, Recording
from hotset.models.routers import Routers
from hotset.models.routing_hook import RoutingHook
from hotset.models.static_caches import KVCachePool
from hotset.models.tracker import StepTracker
from hotset.profile import Profile
from hotset.profile.folder import locate
from hotset.shape import ExpertKey, format_size
from hotset.trace import Phase


def _routers_of(model: weakref.ref[Any], moe_layers: list[MoeLayer]) -> Routers | None:
    """The routers of a model that only its owner keeps alive."""
    return Routers.of(model(), moe_layers)


_NOTHING_FORESEEN = {"prefetch_hits": 0, "late": 0}


class Handle(CacheReport):
    """The cache of one model."""

    def __init__(
        self,
        model: Any,
        engine: Engine,
        moe_layers: list[MoeLayer],
        tracker: StepTracker,
        routing_hook: RoutingHook,
        notices: Notices,
    ) -> None:
        super().__init__(engine, str(getattr(model.config, "_name_or_path", "") or type(model).__name__))
        self.moe_layers = moe_layers
        self.tracker = tracker
        self.notes = notices.lines
        self.warn = notices.add  # tells, in one line each, what a person should know of how this model runs
        self.placeholders: list[Placeholder] = []
        self.routing_hook = routing_hook
        self.profile: Profile | None = None
        self.fingerprint = fingerprint_of(model, moe_layers)
        self.find_routers: Callable[[], Routers | None] = partial(_routers_of, weakref.ref(model), moe_layers)
        self._model = weakref.ref(model)
        self.patches = Patches()
        self.static_caches = KVCachePool(model.config)
        self._before = engine.controller.counters()
        self._profile_writers: dict[Path, ProfileWriter] = {}
        self._observed = False
        self._closed = False

    def on_close(self, undo: Callable[[], Any]) -> None:
        """Have something undone when the handle is closed."""
        self.patches.add(undo)

    def on_release(self, undo: Callable[[], Any]) -> None:
        """Have something undone once the model is whole again, or serves another engine."""
        self.patches.add(undo, until_whole=True)

    def stats(self) -> dict[str, Any]:
        """What happened since the last reset: hits, bytes and time; hits and misses add up to the experts asked for.

        Hits and misses are the cache's own, as a replay gives them. `prefetch_hits` are misses that no step waited for,
        since a guess had fetched them in time; `late` are those that were still on their way. A `hit_rate` is None
        until an expert was asked for. `backward` is what backward passes asked for: the policy
        and these counts do not know of it.
        """
        engine, clock = self.engine, self.engine.stats.clock
        engine.sync_clock()
        with engine.paused():
            self._poll()
            counters = engine.controller.counters() - self._before
        tokens = sum(clock.tokens)
        plan = engine.controller.plan
        return {
            "engine": engine.kind,
            **engine.driven(),
            "policy": engine.controller.policy.spec,
            "shape": {"layers": plan.shape.layers, "experts": plan.shape.experts, "top_k": plan.shape.top_k},
            "slots": plan.cached,
            "staging": plan.staging,
            "scope": plan.scope.value,
            "expert_bytes": plan.shape.expert_bytes,
            "resident": len(engine.controller.residents()),
            "memory": engine.resident_bytes(),
            "resident_bytes": sum(engine.resident_bytes().values()),
            "passes": clock.passes,
            "tokens": tokens,
            "asked": counters.total(Count.HITS) + counters.total(Count.MISSES),
            "hits": counters.total(Count.HITS),
            "misses": counters.total(Count.MISSES),
            **self._foreseen(),
            "hit_rate": self._rate(counters),
            "prefill": self._phase(counters, Phase.PREFILL),
            "decode": self._phase(counters, Phase.DECODE),
            "loaded_bytes": clock.loaded_bytes,
            "bytes_per_token": clock.loaded_bytes / tokens if tokens else 0.0,
            "pass_s": clock.pass_s,
            "experts_s": clock.experts_s,
            "stall_s": clock.stall_s,
            "stall_share": clock.stall_s / clock.pass_s if clock.pass_s else 0.0,
            "pins": len(engine.controller.pins()),
            "background_bytes": self.background_bytes(),
            "backward": asdict(clock.backward),
            **self.learning(),
        }

    def observe(self) -> None:
        """Count what is routed also where every expert fits and the model runs untouched; costs a little time."""
        if not self._observed:
            self._observed = True
            self.on_close(self.routing_hook.acquire())

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
        keys = self._hottest(which) if isinstance(which, str) else [ExpertKey(*key) for key in which]
        self.engine.pin(keys)
        return keys

    def unpin(self, which: Iterable[tuple[int, int]] | None = None) -> None:
        """Let pinned experts go, all of them or those named; they stay until something better comes."""
        self.check_open()
        self.engine.offloaded("unpin")
        engine = self.engine
        with engine.paused():
            engine.controller.unpin(self.pins() if which is None else [ExpertKey(*key) for key in which])

    def _hottest(self, share: str) -> list[ExpertKey]:
        statistics = self.statistics()
        heat = statistics.rate if self.profile is None else statistics.rate + self.profile.hotness()
        return hottest_share(self.engine.controller, heat, share)

    def _phase(self, counters: Counters, phase: Phase) -> dict[str, Any]:
        rate = {"hit_rate": self._rate(counters, phase), "pass_tokens": self.engine.stats.clock.tokens[phase]}
        return counters.as_dict(phase) | rate | (self._foreseen() if phase is Phase.DECODE else {})

    def _foreseen(self) -> dict[str, int]:
        """Misses that a guess had fetched, in decode: in prompts nothing is guessed."""
        prefetcher = self.prefetcher
        if prefetcher is None:
            return _NOTHING_FORESEEN
        return {"prefetch_hits": prefetcher.counts.in_time, "late": prefetcher.counts.late}

    def _rate(self, counters: Counters, phase: Phase | None = None) -> float | None:
        """The share of hits, None before anything was asked for; where everything is resident that is all."""
        rate = 1.0 if self.engine.offload is None else counters.hit_rate(phase)
        return None if math.isnan(rate) else rate

    def reset_stats(self) -> None:
        """Count from here; what is resident and what was learnt stays."""
        self.engine.sync_clock()
        with self.engine.paused():
            self._poll()
            self._before = self.engine.controller.counters()
            self.engine.stats.reset()
            self._reset_learning()

    def trace(
        self, path: str | Path | None = None, *, meta: dict[str, str] | None = None, guesses: int = 0
    ) -> Recording:
        """Record what follows, until the `with` block ends, `stop()` is called or the model is closed.

        The trace is written to the path then, whole or not at all; without a path, `finish()` returns it. With
        `guesses` it also holds what the routers of the next so many layers make of each layer's input.
        """
        self.check_open()
        mark = {"architecture": self.fingerprint.architecture, "digest": self.fingerprint.digest}
        about = {"model": Path(self.model_name).name, "source": "hotset"} | mark | (meta or {})
        return Recording(
            self.engine,
            None if path is None else Path(path),
            about,
            self.routing_hook,
            self._gate(guesses) if guesses else None,
        )

    def _gate(self, distances: int) -> Gate:
        if not 1 <= distances <= MAX_DISTANCE:
            raise HotsetError(f"guesses reach 1 to {MAX_DISTANCE} layers ahead, not {distances}")
        routers = self.find_routers()
        if routers is None:
            raise HotsetError("this model's routers are not plain matrices, so no guesses of theirs can be recorded")
        return partial(routers.predict, distances=distances, width=2 * self.engine.shape.top_k)

    def close(self) -> None:
        """Stop the threads and free the slots; more than once does no harm.

        The experts are gone then, so the model refuses to run, to be saved and to be detached. Only where all experts
        fit it goes on as plain transformers: there they are the model's own. In a forked process nothing is given
        back, since all of it is the parent's.
        """
        if self._closed:
            return
        self._closed = True
        is_here = self.engine.guard.owner.is_here
        with ExitStack() as last:  # each of these is done, whatever the others raise
            if self.engine.offload is not None:
                last.callback(self._refuse_calls)
                if is_here:
                    self.engine.guard.refuse_calls()
            if is_here:
                last.callback(self.engine.close)
                self._detach_experts(last)

    def release(self) -> None:
        """Take hotset out of the model's calls, and leave the engine to its maker."""
        self._closed = True
        with ExitStack() as last:
            last.callback(self.lift)
            self._detach_experts(last)

    def lift(self) -> None:
        """Leave nothing of hotset in the model's calls, once it is whole again."""
        self.patches.lift()

    def check_open(self) -> None:
        """Refuse what a closed model cannot do."""
        if self._closed and self.engine.offload is not None:
            raise ClosedError
        self.engine.guard.owner.check()

    def _refuse_calls(self) -> None:
        model = self._model()
        if model is not None:
            self.patches.add(refuse_calls(model), until_whole=True)

    def _detach_experts(self, last: ExitStack) -> None:
        last.callback(self.patches.close)
        if isinstance(self.engine.stats.recorder, Recording):
            last.callback(self.engine.stats.recorder.stop)

    def __enter__(self) -> Handle:
        """Close the model at the end of a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        plan = self.engine.controller.plan
        size, policy = format_size(sum(self.engine.resident_bytes().values())), self.engine.controller.policy.spec
        return f"<hotset: {plan.cached} of {plan.shape.total_experts} experts in {size}, {policy}>"

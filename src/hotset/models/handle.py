"""`model.hotset`: what a person can ask of, and tell, a model that runs through hotset."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hotset.cache.counters import Count, Counters
from hotset.cache.statistics import statistics_of
from hotset.errors import HotsetError
from hotset.models.fingerprint import fingerprint_of
from hotset.models.keeping import Keeper
from hotset.models.learning import hottest_share
from hotset.models.passes import PassWatcher
from hotset.models.recording import Recording
from hotset.models.requests import Request, RequestLog
from hotset.models.shell import Shell
from hotset.models.site import Site
from hotset.profile import Profile
from hotset.profile.folder import locate
from hotset.profile.statistics import Counts, History, Statistics
from hotset.runtime.caching import CachingEngine
from hotset.runtime.engine import Engine
from hotset.shape import ExpertKey, format_size
from hotset.trace import Phase


class Handle:
    """The cache of one model."""

    def __init__(self, model: Any, engine: Engine, sites: list[Site], watcher: PassWatcher) -> None:
        self.engine = engine
        self.sites = sites
        self.watcher = watcher
        self.model_name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
        self.notes: list[str] = []
        self.shells: list[Shell] = []
        self.tap: Callable[[], list[Callable[[], None]]] = list  # sends calls here while recording, if they do not come
        self.profile: Profile | None = None
        self.fingerprint = fingerprint_of(model, sites)
        self._undo: list[Callable[[], Any]] = []
        self._before = engine.controller.counters()
        self._background_before = 0
        self._keepers: dict[Path, Keeper] = {}
        self._requests = RequestLog(engine)
        watcher.before_pass = self._requests.before
        self._observed = False
        self._closed = False

    def remark(self, *notes: str) -> None:
        """Tell, in one line each, what a person should know of how this model runs."""
        self.notes += notes
        for note in notes:
            logging.getLogger("hotset").warning(note)

    def on_close(self, undo: Callable[[], Any]) -> None:
        """Have something undone when the handle is closed."""
        self._undo.append(undo)

    def stats(self) -> dict[str, Any]:
        """What happened since the last reset: hits, bytes and time; hits and misses add up to the experts asked for."""
        engine, clock = self.engine, self.engine.clock
        engine.settle()
        with engine.quiet():
            self._look()
            counters = engine.controller.counters() - self._before
        tokens = sum(clock.tokens)
        plan = engine.controller.plan
        return {
            "engine": engine.kind,
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
            "background_bytes": self._background_bytes(),
            **self._learning(),
        }

    def _learning(self) -> dict[str, Any]:
        """What the cache found out about itself: the gain over lru, warm pins, and how far a warm start has come."""
        supervisor, engine = self.engine.supervisor, self.engine
        found: dict[str, Any] = {"gain": None, "warm_pin": None, "warming": False, "warm_error": None}
        if supervisor is not None and supervisor.rival is not None:
            found["gain"] = supervisor.rival.gain(int(self._load_bytes.mean()), self._background_bytes())
        if supervisor is not None and supervisor.warm_pin is not None:
            found["warm_pin"] = supervisor.warm_pin.as_dict()
        if isinstance(engine, CachingEngine) and engine.warmer is not None:
            found["warming"] = engine.warmer.busy
            found["warm_error"] = None if engine.warmer.error is None else str(engine.warmer.error)
        return found

    def _background_bytes(self) -> int:
        engine = self.engine
        return engine.background_bytes - self._background_before if isinstance(engine, CachingEngine) else 0

    def _look(self) -> None:
        if self.engine.supervisor is not None:
            self.engine.supervisor.look()

    def statistics(self) -> Statistics:
        """All that is known of every expert since the model was loaded, as grids of layers and experts."""
        engine = self.engine
        with engine.quiet():
            self._look()
            history = History.empty() if engine.supervisor is None else engine.supervisor.history()
            return statistics_of(engine.controller, *self._loads(), history)

    def _loads(self) -> tuple[Counts, Counts]:
        """Loads of every expert in the background, and what one load of it moves."""
        if isinstance(self.engine, CachingEngine):
            return self.engine.landing.warmed, self._load_bytes
        nothing = np.zeros((self.engine.shape.layers, self.engine.shape.experts), np.int64)
        return nothing, nothing

    @cached_property
    def _load_bytes(self) -> Counts:
        return self._caching("load").load_bytes()

    def top(self, layer: int, count: int = 10) -> list[dict[str, Any]]:
        """The hottest experts of a layer now, each with its uses, hits, misses, loads, bytes, rate and last use."""
        if not 0 <= layer < self.engine.shape.layers:
            raise HotsetError(
                f"there is no layer {layer}: the model has MoE layers 0 to {self.engine.shape.layers - 1}"
            )
        return self.statistics().top(layer, count)

    def requests(self) -> list[Request]:
        """The last requests, each with its activation matrix, its hits and its bytes; the last may be under way."""
        with self.engine.quiet():
            return self._requests.all()

    def mark(self, label: str) -> None:
        """Name what begins here, such as another workload; plots show it."""
        if self.engine.supervisor is not None:
            with self.engine.quiet():
                self.engine.supervisor.mark(label)

    def plot(self, path: str | Path | None = None, *, title: str = "") -> Any:
        """Draw what is hot, resident and pinned, and hits over time: to a file, or as a matplotlib figure."""
        from hotset.report.heat import figure_of, plot_statistics

        name = title or Path(self.model_name).name
        if path is None:
            return figure_of(self.statistics(), name)
        return plot_statistics(self.statistics(), path, title=name)

    def observe(self) -> None:
        """Count what is routed also where every expert fits and the model runs untouched; costs a little time."""
        if not self._observed:
            self._observed = True
            for untap in self.tap():
                self.on_close(untap)

    def save_profile(self, name: str | Path, *, overwrite: bool = False) -> Path:
        """Add what was seen since the last save to a profile, a name or a path, and return its file.

        A profile that is there goes on, what it holds fading with time; `overwrite` begins it anew.
        """
        path = locate(str(name))
        if overwrite:
            path.unlink(missing_ok=True)
            self._keepers.pop(path, None)
        keeper = self._keepers.setdefault(path, Keeper(self.engine, self.fingerprint, path))
        if not keeper.save() and not path.exists():
            raise HotsetError(
                "nothing was used yet, so there is nothing to save: run the model first"
                + (", after model.hotset.observe()" if self.engine.kind == "stock" else "")
            )
        return path

    def pins(self) -> list[ExpertKey]:
        """The pinned experts, by layer and expert."""
        with self.engine.quiet():
            return self.engine.controller.pins()

    def pin(self, which: str | Iterable[tuple[int, int]]) -> list[ExpertKey]:
        """Keep experts for good: pairs of layer and expert, or the hottest for a share of the slots such as "20%"."""
        engine = self._caching("pin")
        keys = self._hottest(which) if isinstance(which, str) else [ExpertKey(*key) for key in which]
        engine.pin(keys)
        return keys

    def unpin(self, which: Iterable[tuple[int, int]] | None = None) -> None:
        """Let pinned experts go, all of them or those named; they stay until something better comes."""
        engine = self._caching("unpin")
        with engine.quiet():
            engine.controller.unpin(self.pins() if which is None else [ExpertKey(*key) for key in which])

    def _hottest(self, share: str) -> list[ExpertKey]:
        statistics = self.statistics()
        heat = statistics.rate if self.profile is None else statistics.rate + self.profile.hotness()
        return hottest_share(self.engine.controller, heat, share)

    def _caching(self, what: str) -> CachingEngine:
        if not isinstance(self.engine, CachingEngine):
            raise HotsetError(f"all experts are in memory: there is nothing to {what}")
        return self.engine

    def wait_until_warm(self, timeout_s: float | None = None) -> bool:
        """Wait until a warm start has filled the slots; false if it has not in that time."""
        engine = self.engine
        return not isinstance(engine, CachingEngine) or engine.warmer is None or engine.warmer.wait(timeout_s)

    def _phase(self, counters: Counters, phase: Phase) -> dict[str, Any]:
        rate = {"hit_rate": self._rate(counters, phase), "pass_tokens": self.engine.clock.tokens[phase]}
        return counters.as_dict(phase) | rate

    def _rate(self, counters: Counters, phase: Phase | None = None) -> float:
        """The share of hits; where everything is resident that is all, counted or not."""
        return 1.0 if self.engine.kind == "stock" else counters.hit_rate(phase)

    def reset_stats(self) -> None:
        """Count from here; what is resident and what was learnt stays."""
        self.engine.settle()
        with self.engine.quiet():
            self._look()
            self._before = self.engine.controller.counters()
            self.engine.reset_clock()
            self._background_before += self._background_bytes()
            if self.engine.supervisor is not None and self.engine.supervisor.rival is not None:
                self.engine.supervisor.rival.reset()

    def trace(self, path: str | Path | None = None, *, meta: dict[str, str] | None = None) -> Recording:
        """Record what follows, until the `with` block ends, `stop()` is called or the model is closed.

        The trace is written to the path then, whole or not at all; without a path, `finish()` returns it.
        """
        mark = {"architecture": self.fingerprint.architecture, "digest": self.fingerprint.digest}
        about = {"model": Path(self.model_name).name, "source": "hotset"} | mark | (meta or {})
        return Recording(self.engine, None if path is None else Path(path), about, self.tap)

    def close(self) -> None:
        """Stop the threads and free the slots; the model can no longer run."""
        if not self._closed:
            self.release()
            self.engine.close()

    def release(self) -> None:
        """Take hotset out of the model's calls, and leave the engine to whoever made it."""
        self._closed = True
        if isinstance(self.engine.recorder, Recording):
            self.engine.recorder.stop()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def __repr__(self) -> str:
        plan = self.engine.controller.plan
        size, policy = format_size(sum(self.engine.resident_bytes().values())), self.engine.controller.policy.spec
        return f"<hotset: {plan.cached} of {plan.shape.total_experts} experts in {size}, {policy}>"

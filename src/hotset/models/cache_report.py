"""What a running model's cache knows of its experts, its requests and itself."""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hotset.cache.counters import Count, Counters
from hotset.cache.statistics import statistics_of
from hotset.engine.engine import Engine
from hotset.engine.host.forecasting import ForecastPredictor, forecast_stats
from hotset.engine.host.prefetcher import PrefetchCounts
from hotset.engine.preload import BackgroundLoader
from hotset.engine.requests import Request
from hotset.errors import HotsetError
from hotset.prefetch import Driver
from hotset.profile.statistics import Counts, History, Statistics
from hotset.trace import Phase


class CacheReport:
    """Answers questions about one engine."""

    def __init__(self, engine: Engine, model_name: str, notes: list[str]) -> None:
        self.engine, self.model_name = engine, model_name
        self.notes = notes  # what a person should know of how the model runs, in one line each
        self._background_before = 0
        self._before = engine.controller.counters()

    def stats(self) -> dict[str, Any]:
        """What happened since the last reset: hits, bytes and time; hits and misses add up to the experts asked for.

        Hits and misses are the cache's own, as a replay gives them. `prefetch_hits` are misses that no step waited for,
        since prefetch had brought them in time; `late` are those that were still on their way. A `hit_rate` is None
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
            "engine": "stock" if engine.offload is None else engine.device.type,
            **self._driver(),
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
            **self._prefetched(),
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

    def reset_stats(self) -> None:
        """Count from here; what is resident and what was learnt stays."""
        self.engine.sync_clock()
        with self.engine.paused():
            self._poll()
            self._before = self.engine.controller.counters()
            self.engine.stats.reset()
            self._background_before += self.background_bytes()
            if self.engine.prefetcher is not None:
                self.engine.prefetcher.counts.reset()
            if self.engine.monitor is not None and self.engine.monitor.comparison is not None:
                self.engine.monitor.comparison.reset()

    def statistics(self) -> Statistics:
        """All that is known of every expert since the model was loaded, as grids of layers and experts."""
        engine = self.engine
        with engine.paused():
            self._poll()
            history = History.empty() if engine.monitor is None else engine.monitor.history()
            return statistics_of(engine.controller, engine.controller.residency.preloaded, self._load_bytes, history)

    def top(self, layer: int, count: int = 10) -> list[dict[str, Any]]:
        """The hottest experts of a layer now, each with its uses, hits, misses, loads, bytes, rate and last use."""
        last = self.engine.shape.layers - 1
        if not 0 <= layer <= last:
            raise HotsetError(f"there is no layer {layer}: the model has MoE layers 0 to {last}")
        return self.statistics().top(layer, count)

    def requests(self) -> list[Request]:
        """The last 64 requests, each with its activation matrix, its hits and its bytes; some may be under way.

        A batch is served as a whole, and stands under the number of its first request.
        """
        with self.engine.paused():
            return self.engine.stats.requests()

    def mark(self, label: str) -> None:
        """Name what begins here, such as another workload; plots show it."""
        if self.engine.monitor is not None:
            with self.engine.paused():
                self.engine.monitor.mark(label)

    def plot(self, path: str | Path | None = None, *, title: str = "") -> Any:
        """Draw what is hot, resident and pinned, and hits over time: to a file, or as a matplotlib figure."""
        from hotset.report.heat import figure_of, plot_statistics

        name = title or Path(self.model_name).name
        if path is None:
            return figure_of(self.statistics(), name)
        return plot_statistics(self.statistics(), path, title=name)

    def learning(self) -> dict[str, Any]:
        """What the cache found out about itself: the gain over lru, warm pins, and how far a warm start has come."""
        monitor, prefetcher = self.engine.monitor, self.engine.prefetcher
        found: dict[str, Any] = {"gain": None, "warm_pin": None, "warming": False, "warm_error": None, "prefetch": None}
        if monitor is not None and monitor.comparison is not None:
            found["gain"] = monitor.comparison.gain(int(self._load_bytes.mean()), self.background_bytes())
        if monitor is not None and monitor.warm_pin is not None:
            found["warm_pin"] = monitor.warm_pin.as_dict()
        if prefetcher is not None and isinstance(prefetcher.predictor, ForecastPredictor):
            found["prefetch"] = forecast_stats(prefetcher.predictor, prefetcher.counts)
        if self._preload is not None:
            found["warming"] = self._preload.busy
            found["warm_error"] = None if self._preload.error is None else str(self._preload.error)
        return found

    @property
    def _preload(self) -> BackgroundLoader | None:
        """What fills slots in the background, or did."""
        return None if self.engine.offload is None else self.engine.offload.preloader.running

    def background_bytes(self) -> int:
        """The bytes that moved while no event waited for them, since the last reset."""
        offload = self.engine.offload
        return 0 if offload is None else offload.preloader.moved_bytes - self._background_before

    def wait_until_warm(self, timeout_s: float | None = None) -> bool:
        """Wait until a warm start has filled the slots; false if it has not in that time."""
        return self._preload is None or self._preload.wait(timeout_s)

    def _poll(self) -> None:
        if self.engine.monitor is not None:
            self.engine.monitor.poll()

    def _phase(self, counters: Counters, phase: Phase) -> dict[str, Any]:
        rate = {"hit_rate": self._rate(counters, phase), "pass_tokens": self.engine.stats.clock.tokens[phase]}
        return counters.as_dict(phase) | rate | (self._prefetched() if phase is Phase.DECODE else {})

    def _driver(self) -> dict[str, str]:
        """What drives a GPU; of a CPU that is no question."""
        decode = self.engine.device_decode
        driver = Driver.HOST if decode is None else decode.last_driver
        return {"driven_by": driver} if len(self.engine.tiers) > 1 else {}

    def _prefetched(self) -> dict[str, int]:
        """Misses that were prefetched, in decode: for prompts nothing is."""
        prefetcher = self.engine.prefetcher
        counts = PrefetchCounts() if prefetcher is None else prefetcher.counts
        return {"prefetch_hits": counts.in_time, "late": counts.late}

    def _rate(self, counters: Counters, phase: Phase | None = None) -> float | None:
        """The share of hits, None before anything was asked for; where everything is resident that is all."""
        rate = 1.0 if self.engine.offload is None else counters.hit_rate(phase)
        return None if math.isnan(rate) else rate

    @cached_property
    def _load_bytes(self) -> Counts:
        shape, offload = self.engine.shape, self.engine.offload
        return np.zeros((shape.layers, shape.experts), np.int64) if offload is None else offload.load_bytes(shape)

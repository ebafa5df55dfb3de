"""What a running model's cache knows of its experts, its requests and itself."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hotset.cache.statistics import statistics_of
from hotset.engine.engine import Engine
from hotset.engine.host.forecasting import ForecastPredictor, forecast_stats
from hotset.engine.host.prefetcher import Prefetcher
from hotset.engine.preload import BackgroundLoader
from hotset.engine.requests import Request
from hotset.errors import HotsetError
from hotset.profile.statistics import Counts, History, Statistics


class CacheReport:
    """Answers questions about one engine."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self.engine = engine
        self.model_name = model_name
        self._background_before = 0

    def statistics(self) -> Statistics:
        """All that is known of every expert since the model was loaded, as grids of layers and experts."""
        engine = self.engine
        with engine.paused():
            self._poll()
            history = History.empty() if engine.monitor is None else engine.monitor.history()
            return statistics_of(engine.controller, *self._loads(), history)

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
        monitor = self.engine.monitor
        found: dict[str, Any] = {"gain": None, "warm_pin": None, "warming": False, "warm_error": None, "prefetch": None}
        if monitor is not None and monitor.comparison is not None:
            found["gain"] = monitor.comparison.gain(int(self._load_bytes.mean()), self.background_bytes())
        if monitor is not None and monitor.warm_pin is not None:
            found["warm_pin"] = monitor.warm_pin.as_dict()
        if self.prefetcher is not None and isinstance(self.prefetcher.predictor, ForecastPredictor):
            found["prefetch"] = forecast_stats(self.prefetcher.predictor, self.prefetcher.counts)
        if self._preload is not None:
            found["warming"] = self._preload.busy
            found["warm_error"] = None if self._preload.error is None else str(self._preload.error)
        return found

    @property
    def prefetcher(self) -> Prefetcher | None:
        """What fetches experts before they are asked for, if anything does."""
        return None if self.engine.offload is None else self.engine.offload.prefetcher

    @property
    def _preload(self) -> BackgroundLoader | None:
        """What fills slots in the background, or did."""
        return None if self.engine.offload is None else self.engine.offload.preloader.running

    def background_bytes(self) -> int:
        """The bytes that moved without anybody waiting for them, since the last reset."""
        offload = self.engine.offload
        return 0 if offload is None else offload.preloader.moved_bytes - self._background_before

    def wait_until_warm(self, timeout_s: float | None = None) -> bool:
        """Wait until a warm start has filled the slots; false if it has not in that time."""
        return self._preload is None or self._preload.wait(timeout_s)

    def _poll(self) -> None:
        if self.engine.monitor is not None:
            self.engine.monitor.poll()

    def _reset_learning(self) -> None:
        self._background_before += self.background_bytes()
        if self.prefetcher is not None:
            self.prefetcher.reset_counts()
        if self.engine.monitor is not None and self.engine.monitor.comparison is not None:
            self.engine.monitor.comparison.reset()

    def _loads(self) -> tuple[Counts, Counts]:
        """Loads of every expert in the background, and what one load of it moves."""
        return self.engine.cache.reservations.preloaded, self._load_bytes

    @cached_property
    def _load_bytes(self) -> Counts:
        shape, offload = self.engine.shape, self.engine.offload
        return np.zeros((shape.layers, shape.experts), np.int64) if offload is None else offload.load_bytes(shape)

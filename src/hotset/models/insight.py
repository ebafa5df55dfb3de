"""What a running model's cache knows of its experts, its requests and itself."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hotset.cache.statistics import statistics_of
from hotset.errors import HotsetError
from hotset.profile.statistics import Counts, History, Statistics
from hotset.runtime.ahead import AheadCounts
from hotset.runtime.caching import CachingEngine
from hotset.runtime.engine import Engine
from hotset.runtime.forecasting import ForecastGuesser, forecast_stats
from hotset.runtime.requests import Request


class Insight:
    """Answers questions about one engine."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self.engine = engine
        self.model_name = model_name
        self._background_before = 0

    def statistics(self) -> Statistics:
        """All that is known of every expert since the model was loaded, as grids of layers and experts."""
        engine = self.engine
        with engine.quiet():
            self._look()
            history = History.empty() if engine.supervisor is None else engine.supervisor.history()
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
        return self.engine.requests()

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

    def learning(self) -> dict[str, Any]:
        """What the cache found out about itself: the gain over lru, warm pins, and how far a warm start has come."""
        supervisor, engine = self.engine.supervisor, self.engine
        found: dict[str, Any] = {"gain": None, "warm_pin": None, "warming": False, "warm_error": None, "prefetch": None}
        if supervisor is not None and supervisor.rival is not None:
            found["gain"] = supervisor.rival.gain(int(self._load_bytes.mean()), self.background_bytes())
        if supervisor is not None and supervisor.warm_pin is not None:
            found["warm_pin"] = supervisor.warm_pin.as_dict()
        guesser, ahead = (engine.guesser, engine.ahead) if isinstance(engine, CachingEngine) else (None, None)
        if isinstance(guesser, ForecastGuesser) and ahead is not None:
            found["prefetch"] = forecast_stats(guesser, ahead.counts)
        if isinstance(engine, CachingEngine) and engine.warmer is not None:
            found["warming"] = engine.warmer.busy
            found["warm_error"] = None if engine.warmer.error is None else str(engine.warmer.error)
        return found

    def background_bytes(self) -> int:
        """The bytes that moved without anybody waiting for them, since the last reset."""
        engine = self.engine
        return engine.background_bytes - self._background_before if isinstance(engine, CachingEngine) else 0

    def wait_until_warm(self, timeout_s: float | None = None) -> bool:
        """Wait until a warm start has filled the slots; false if it has not in that time."""
        engine = self.engine
        return not isinstance(engine, CachingEngine) or engine.warmer is None or engine.warmer.wait(timeout_s)

    def _look(self) -> None:
        if self.engine.supervisor is not None:
            self.engine.supervisor.look()

    def _reset_learning(self) -> None:
        self._background_before += self.background_bytes()
        if isinstance(self.engine, CachingEngine) and self.engine.ahead is not None:
            self.engine.ahead.counts = AheadCounts()
        if self.engine.supervisor is not None and self.engine.supervisor.rival is not None:
            self.engine.supervisor.rival.reset()

    def _loads(self) -> tuple[Counts, Counts]:
        """Loads of every expert in the background, and what one load of it moves."""
        if isinstance(self.engine, CachingEngine):
            return self.engine.cache.landing.warmed, self._load_bytes
        nothing = np.zeros((self.engine.shape.layers, self.engine.shape.experts), np.int64)
        return nothing, nothing

    @cached_property
    def _load_bytes(self) -> Counts:
        assert isinstance(self.engine, CachingEngine)  # noqa: S101 - others load nothing
        return self.engine.load_bytes()

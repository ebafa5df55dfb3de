"""The host's books while the device drives: its cache and all that is counted."""

from __future__ import annotations

from hotset.cache.controller import Controller
from hotset.engine.device.follow import Ints
from hotset.engine.device.prefetch_state import PrefetchTallies
from hotset.engine.guard import Guard
from hotset.engine.host.forecasting import ForecastPredictor
from hotset.engine.host.prefetcher import Prefetcher
from hotset.engine.stats import EngineStats
from hotset.engine.step import Step
from hotset.store import Catalog


class HostBooks:
    """Serves again what the device has served, for statistics, profiles and recordings; callers hold the lock."""

    def __init__(
        self, controller: Controller, stats: EngineStats, catalog: Catalog, prefetcher: Prefetcher | None, guard: Guard
    ) -> None:
        self._controller, self._stats, self._catalog = controller, stats, catalog
        self._prefetcher, self._guard = prefetcher, guard

    def follow_event(self, step: Step, layer: int, experts: Ints, counts: Ints, tokens: int, stalled_s: float) -> int:
        """Serve an event that the device has served; returns how many experts it missed."""
        self._stats.begin_event(step, layer)
        missing = self._controller.route(layer, experts, counts, tokens, step.phase, step.first_request)
        if missing:
            if self._stats.listener is not None:
                self._stats.listener(layer, self._controller.table.loads[:missing].copy())
            self._stats.clock.loaded_bytes += missing * self._catalog.layers[layer].layout.used_bytes
            self._stats.clock.stall_s += stalled_s
        return missing

    def follow_step(self, step: Step, seconds: float) -> None:  # noqa: ARG002 - all steps are one sum
        """Take in how long the device took for a step."""
        self._stats.clock.pass_s += seconds

    def is_comparable(self, step: Step, prefetched: bool) -> bool:
        """Whether the trial takes a step for what it was: all may have been decided anew since it was launched."""
        predictor = None if self._prefetcher is None else self._prefetcher.predictor
        if not isinstance(predictor, ForecastPredictor):
            return True
        return prefetched != predictor.payoff.goes_without(step.number)

    def compare(self, step: Step, seconds: float) -> None:
        """Take in the adjusted time of a step, for the trial of prefetch."""
        if self._prefetcher is not None:
            self._prefetcher.note_step(step, seconds)

    def count_prefetches(self, since: PrefetchTallies) -> None:
        """Add what came of prefetches since the last time."""
        if self._prefetcher is not None:
            counts = self._prefetcher.counts
            for name, more in since._asdict().items():
                setattr(counts, name, getattr(counts, name) + more)

    def break_down(self) -> None:
        """Serve nothing any more: what the device has done is unknown."""
        self._guard.mark_broken()

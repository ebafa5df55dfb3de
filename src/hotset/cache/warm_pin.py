"""Warm pins: watch the first tokens, then pin the experts they used most, if a trial in the shadow pays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hotset.cache.controller import Controller
from hotset.cache.counters import Count
from hotset.cache.pins import is_pinned, per_group
from hotset.cache.shadow import twin_of
from hotset.cache.table import WARM
from hotset.cache.usage import USES
from hotset.profile.statistics import Counts
from hotset.shape import ExpertKey
from hotset.trace import Phase
from hotset.trace.events import EventTable

AUTO_TOKENS = 64
SHARE = 0.5
"""Of a layer's slots: what is pinned cannot adapt, so at least half of them must."""
RETRY = 8
"""After so many times the tokens of a trial, what did not pay is tried again: the workload may be another."""


class WarmPin:
    """Observes, tries in the shadow, then pins or leaves it; unpins once that loses, and observes anew."""

    def __init__(self, live: Controller, tokens: int, notify: Callable[[str], None]) -> None:
        self.live, self.tokens = live, tokens
        self.rounds: list[dict[str, Any]] = []
        self.chosen: list[ExpertKey] = []
        self._notify = notify
        self._observe()

    def take(self, events: EventTable | None) -> None:
        """Take in what the live cache has just served; None where not all of it is known, which begins a span anew."""
        if events is None:
            self._begin(self.state, *self._caches[1:])
            return
        for shadow in self._caches[1:]:
            shadow.replay(events)
        if self.state in ("trying", "protecting"):  # what was absent when it was chosen may have come
            pin_residents(self._caches[-1] if self.state == "trying" else self.live, self.chosen)
        if self._tokens() >= self.tokens * (RETRY if self.state == "declined" else 1):
            steps = {"observing": self._try, "trying": self._decide, "protecting": self._review}
            steps.get(self.state, self._observe)()

    def _begin(self, state: str, *shadows: Controller) -> None:
        self.state, self._caches = state, (self.live, *shadows)
        self._counted = [cache.counters() for cache in self._caches]
        self._uses: Counts = self.live.usage.counts[USES, Phase.DECODE].copy()

    def _observe(self) -> None:
        self._begin("observing")

    def _try(self) -> None:
        """Set the most used against what the policy does by itself, in two shadows of the live cache."""
        self._before = self._rate(0)
        self.chosen = most_used(self.live, self.live.usage.counts[USES, Phase.DECODE] - self._uses)
        bare, pinned = twin_of(self.live), twin_of(self.live)
        pin_residents(pinned, self.chosen)
        self._begin("trying", bare, pinned)

    def _decide(self) -> None:
        bare, pinned = self._rate(1), self._rate(2)
        trial = f"{100 * bare:.1f} -> {100 * pinned:.1f} % hits in a trial"
        message = f"warm-pin: after {self.tokens} tokens, {len(self.chosen)} experts ({trial})"
        pays = pinned > bare
        news = pays or not self.rounds or self.rounds[-1]["protected"]
        self.rounds.append({"predicted_points": 100 * (pinned - bare), "protected": pays, "before": self._before})
        if news:
            self._notify(f"{message}: {'pinned from now on' if pays else 'not pinned, it does not pay'}")
        if pays:
            pin_residents(self.live, self.chosen)
            self._begin("protecting", self._caches[1])
        else:
            self._begin("declined")

    def _review(self) -> None:
        """Compare the live cache with its shadow without pins, and unpin if that did better lately."""
        live, bare = self._rate(0), self._rate(1)
        self.rounds[-1]["after"] = live
        if live >= bare:
            self._begin("protecting", self._caches[1])
            return
        self.live.unpin(self.chosen, WARM)
        self._notify(f"warm-pin: {100 * live:.1f} % hits with pins, {100 * bare:.1f} % without them: unpinned")
        self._begin("observing")

    def _tokens(self) -> int:
        return int((self.live.counters() - self._counted[0]).array[Phase.DECODE, Count.TOKENS].max())

    def _rate(self, cache: int) -> float:
        return (self._caches[cache].counters() - self._counted[cache]).hit_rate(Phase.DECODE)

    def as_dict(self) -> dict[str, Any]:
        """What was done and what came of it: every round with its prediction and the hit rates before and after."""
        return {
            "state": self.state,
            "tokens": self.tokens,
            "experts": [list(key) for key in self.chosen] if self.state == "protecting" else [],
            "rounds": self.rounds,
        }


def most_used(live: Controller, uses: Counts) -> list[ExpertKey]:
    """The experts of each layer that were used most and are not pinned, up to the share of its slots."""
    table, layers = live.table, len(uses)
    shared = len(table.num_free) < layers
    slots = np.full(layers, live.plan.cached // layers) if shared else np.diff(table.bounds)
    room = np.diff(table.bounds) - live.plan.shape.top_k - per_group(table, is_pinned(table))
    most = np.minimum((SHARE * slots).astype(int), np.maximum(room // layers if shared else room, 0))
    free = np.where(is_pinned(table), 0, uses)
    order = np.argsort(-free, axis=1, kind="stable")
    return [
        ExpertKey(layer, expert)
        for layer in range(layers)
        for expert in sorted(order[layer, : most[layer]].tolist())
        if free[layer, expert] > 0
    ]


def pin_residents(cache: Controller, keys: Iterable[ExpertKey]) -> None:
    """Pin those of some experts that are here and not pinned yet."""
    pinned = is_pinned(cache.table)
    here = [key for key in keys if cache.table.slot_of[key] >= 0 and not pinned[key]]
    if here:
        cache.pin(here, WARM)

"""Warm pins: watch the first tokens, then protect the experts they used most, if a trial in the shadow says it pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.cache.controller import Controller
from hotset.cache.shadow import CounterDelta, Shadow
from hotset.cache.usage import USES
from hotset.profile.statistics import Counts
from hotset.shape import ExpertKey
from hotset.trace import Phase
from hotset.trace.events import EventTable

AUTO_TOKENS = 64
SHARE = 0.5
"""Of a layer's slots: what is protected cannot adapt, so at least half of them must."""


class WarmPin:
    """Observes, tries in the shadow, then protects or leaves it; lets go once that loses, and observes anew."""

    def __init__(self, live: Controller, tokens: int, say: Callable[[str], None]) -> None:
        self.live, self.tokens = live, tokens
        self.rounds: list[dict[str, Any]] = []
        self.chosen: npt.NDArray[np.bool_] = np.zeros(live.table.slot_of.shape, np.bool_)
        self._say = say
        self._live_delta = CounterDelta(live)
        self._bare: Shadow | None = None
        self._protected: Shadow | None = None
        self._deltas: tuple[CounterDelta, ...] = ()
        self._begin("observing")
        self.observe_anew()

    def observe_anew(self) -> None:
        """Begin again, as after a change of workload; what is protected stays so until it loses."""
        if self.state in ("observing", "declined", "released"):
            self._uses = self.live.usage.counts[USES, Phase.DECODE].copy()
            self._bare = self._protected = None
            self._begin("observing")

    def take(self, events: EventTable | None) -> None:
        """Take in what the live cache has just served; None where not all of it is known."""
        tokens, hits, misses = self._live_delta.read()
        if events is None:
            return
        self._counts[0] += hits, misses
        self._passed += tokens
        for row, (shadow, delta) in enumerate(self._shadows(), start=1):
            shadow.take(events)
            self._counts[row] += delta.read()[1:]
        if self._passed >= self.tokens:
            {"observing": self._try, "trying": self._decide, "protecting": self._review}.get(self.state, _nothing)()

    def _begin(self, state: str) -> None:
        self.state, self._passed = state, 0
        self._counts = np.zeros((3, 2), np.int64)  # of the live, the bare and the protected cache: hits, misses

    def _shadows(self) -> list[tuple[Shadow, CounterDelta]]:
        shadows = [shadow for shadow in (self._bare, self._protected) if shadow is not None]
        return list(zip(shadows, self._deltas, strict=False))

    def _try(self) -> None:
        """Set the most used against what the policy does by itself, in two shadows of the live cache."""
        self._before = self._rate(0)
        self.chosen = most_used(self.live, self.live.usage.counts[USES, Phase.DECODE] - self._uses)
        self._bare, self._protected = Shadow.twin(self.live), Shadow.twin(self.live)
        _protect(self._protected.controller, self.chosen)
        self._deltas = CounterDelta(self._bare.controller), CounterDelta(self._protected.controller)
        self._begin("trying")

    def _decide(self) -> None:
        bare, pinned = self._rate(1), self._rate(2)
        trial = f"{100 * bare:.1f} -> {100 * pinned:.1f} % hits in a trial"
        saying = f"warm-pin: after {self.tokens} tokens, {int(self.chosen.sum())} experts ({trial})"
        pays = pinned > bare
        self.rounds.append({"predicted_points": 100 * (pinned - bare), "protected": pays, "before": self._before})
        self._protected = None
        if not pays:
            self._bare = None
            self._say(f"{saying}: not protected, it does not pay")
            self._begin("declined")
            return
        _protect(self.live, self.chosen)
        self._say(f"{saying}: protected from now on")
        self._begin("protecting")

    def _review(self) -> None:
        """Compare the live cache with its unprotected shadow, and let go if that did better lately."""
        live, bare = self._rate(0), self._rate(1)
        self.rounds[-1]["after"] = live
        if live >= bare:
            self._begin("protecting")
            return
        release(self.live)
        self._say(f"warm-pin: {100 * live:.1f} % hits with protection, {100 * bare:.1f} % without it: let go")
        self._begin("released")
        self.observe_anew()

    def _rate(self, row: int) -> float:
        hits, misses = self._counts[row]
        return float(hits / (hits + misses)) if hits + misses else 0.0

    def as_dict(self) -> dict[str, Any]:
        """What was done and what came of it: every round with its prediction and the hit rates before and after."""
        return {
            "state": self.state,
            "tokens": self.tokens,
            "experts": [list(key) for key in np.argwhere(self.chosen).tolist()] if self.state == "protecting" else [],
            "rounds": self.rounds,
        }


def _nothing() -> None:
    """Once decided against, there is nothing to do."""


def most_used(live: Controller, uses: Counts) -> npt.NDArray[np.bool_]:
    """The experts of each layer that were used most, up to the share of its slots that may be protected."""
    layers = uses.shape[0]
    slots = live.plan.per_layer() if len(live.table.bounds) > 2 else np.full(layers, live.plan.cached // layers)
    chosen = np.zeros(uses.shape, np.bool_)
    for layer, row in enumerate(uses):
        best = np.argsort(-row, kind="stable")[: int(SHARE * slots[layer])]
        chosen[layer, best[row[best] > 0]] = True
    return chosen


def release(controller: Controller) -> None:
    """Protect no expert any more."""
    _protect(controller, np.zeros(controller.table.slot_of.shape, np.bool_))


def protected(controller: Controller) -> list[ExpertKey]:
    """The experts that are protected now."""
    return [ExpertKey(*key) for key in np.argwhere(controller.table.score_floor > -np.inf).tolist()]


def _protect(controller: Controller, chosen: npt.NDArray[np.bool_]) -> None:
    controller.changing()
    controller.policy.set_score_floor(controller.state, controller.table, chosen)

"""A policy that pays for itself: plain lru in the shadow of the live cache, and what the live policy gains over it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from hotset.cache.controller import Controller
from hotset.cache.shadow import CounterDelta, shadow_of
from hotset.trace.events import EventTable

BASELINE = "lru"
WINDOW_TOKENS = 2048
"""Over how many decode tokens a policy must lose before it is reported or changed."""
MARGIN = 0.005
"""Less than half a point is no loss."""


class _Span(NamedTuple):
    tokens: int = 0
    hits: int = 0
    other_hits: int = 0
    asked: int = 0

    @property
    def points(self) -> float:
        """How far the live policy is above the other, in percent of what was asked for."""
        return 100.0 * (self.hits - self.other_hits) / self.asked if self.asked else 0.0

    @classmethod
    def sum(cls, spans: Iterable[_Span]) -> _Span:
        """Several spans as one."""
        return cls(*map(sum, zip(cls(), *spans, strict=True)))


class ShadowComparison:
    """Compares the live policy with another in the shadow; with `switch`, the better one takes over the live cache."""

    def __init__(self, live: Controller, notify: Callable[[str], None], *, switch: bool = False) -> None:
        self.live, self.switch = live, switch
        self.shadow = shadow_of(live, BASELINE)
        self.switches: list[dict[str, Any]] = []
        self._notify = notify
        self._told = False
        self._window_tokens = WINDOW_TOKENS
        self._recent: deque[_Span] = deque()
        self._deltas = CounterDelta(live), CounterDelta(self.shadow)
        self._total = _Span()
        self._tokens_ever = 0

    def take(self, events: EventTable | None) -> None:
        """Let the shadow serve what the live cache has served, and compare; None where not all of it is known."""
        tokens, hits, misses = self._deltas[0].read()
        if events is None:
            return
        self.shadow.replay(events)
        _, other_hits, _ = self._deltas[1].read()
        span = _Span(tokens, hits, other_hits, hits + misses)
        self._tokens_ever += tokens
        self._total = _Span.sum([self._total, span])
        self._recent.append(span)
        while sum(s.tokens for s in self._recent) - self._recent[0].tokens >= self._window_tokens:
            self._recent.popleft()
        self._judge()

    def reset(self) -> None:
        """Count the gain from here."""
        self._total = _Span()

    def gain(self, load_bytes: int, background_bytes: int = 0) -> dict[str, Any]:
        """What the live policy gains over the other, in hits and in bytes; background reads are no saving."""
        total = self._total
        hits = total.hits - total.other_hits
        return {
            "policy": self.live.policy.spec,
            "against": self.shadow.policy.spec,
            "tokens": total.tokens,
            "hit_rate": total.hits / total.asked if total.asked else None,
            "against_hit_rate": total.other_hits / total.asked if total.asked else None,
            "points": total.points,
            "recent_points": _Span.sum(self._recent).points,
            "hits": hits,
            "saved_bytes": hits * load_bytes - background_bytes,
            "switches": self.switches,
        }

    def _judge(self) -> None:
        recent = _Span.sum(self._recent)
        if recent.tokens < self._window_tokens or recent.hits + MARGIN * recent.asked >= recent.other_hits:
            return
        lost = f"{-recent.points:.1f} points less than {self.shadow.policy.spec}"
        what = f"{self.live.policy.spec} hit {lost} over the last {recent.tokens:,} tokens"
        if self.switch:
            self._swap(what)
        elif not self._told:
            self._told = True
            self._notify(f"{what}: --policy {self.shadow.policy.spec} or --policy auto would do better here")

    def _swap(self, why: str) -> None:
        """Let the two exchange policies; each further change needs twice the evidence, so that they never flutter."""
        before = self.live.policy.spec
        self.live.adopt(self.shadow)
        self.switches.append({"tokens": self._tokens_ever, "from": before, "to": self.live.policy.spec})
        self._notify(f"{why}: switched to {self.live.policy.spec}")
        self._recent.clear()
        self._window_tokens *= 2

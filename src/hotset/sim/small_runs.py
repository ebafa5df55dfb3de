"""The compiled loops of replays, each run on next to nothing: what `hotset.ahead` compiles before a long replay."""

from __future__ import annotations

import numpy as np

from hotset.cache import Controller, SlotPlan
from hotset.cache.plan import Scope
from hotset.forecasts import MAX_DISTANCE
from hotset.plugins import resolve
from hotset.policies import parse
from hotset.prefetch import Driver, plan_prefetch
from hotset.shape import ModelShape
from hotset.sim.curve import lru_curve
from hotset.sim.forecasting import evaluate
from hotset.sim.link import Link
from hotset.sim.prefetch import simulate_prefetch
from hotset.trace import Trace

_TOKENS, _LAYERS, _EXPERTS = 6, 2, 4


def small_trace() -> Trace:
    """Two requests of one prompt token and two new ones, with all that a recording can hold."""
    token = np.arange(_TOKENS)
    experts = np.stack([token[:, None] % 2 + np.zeros(_LAYERS), np.full((_TOKENS, _LAYERS), 3)], axis=2)
    return Trace(
        ModelShape(layers=_LAYERS, experts=_EXPERTS, top_k=2, expert_bytes=1024),
        experts=experts.astype(np.int16),
        request=(token // 3).astype(np.int32),
        step=token.astype(np.int32),
        phase=(token % 3 > 0).astype(np.uint8),
        weights=np.full(experts.shape, 0.5, np.float16),
        token_ids=token.astype(np.int32),
        predictions=np.repeat(experts[:, :, None], MAX_DISTANCE, axis=2).astype(np.int16),
    )


def replay(policy: str) -> None:
    """Replay a trace under a policy, from slots that were filled before."""
    trace = small_trace()
    cache = Controller(SlotPlan(trace.shape, 4, Scope.LAYER), parse(resolve(policy)))
    cache.preload(np.ones((_LAYERS, _EXPERTS)))
    cache.replay(trace.events())


def judge(forecast: str) -> None:
    """Judge a forecast on a trace."""
    evaluate(small_trace(), [forecast], (1,))


def prefetch(forecast: str) -> None:
    """Replay a trace with prefetch over a link."""
    trace = small_trace()
    cache = Controller(SlotPlan(trace.shape, 4, Scope.LAYER), parse("lru"))
    name = resolve(forecast, "forecast")
    simulate_prefetch(trace, cache, Link(1e9, 1e-3), name, plan_prefetch(Driver.CPU, trace.shape))


def curve(_: str) -> None:
    """Count what LRU hits at every size."""
    lru_curve(small_trace().events())

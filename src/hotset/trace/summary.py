"""What a trace holds, in numbers that say how well a cache can do on it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.compiling import keep_compiled
from hotset.trace.event import Phase
from hotset.trace.events import EventTable
from hotset.trace.trace import Trace

LAGS = (1, 2, 4, 8, 16)
"""How many tokens back the repeat rate looks."""

TOP_SHARES = (0.1, 0.2, 0.4)
"""The shares of the experts of a layer whose part of all accesses is told."""

_MAX_LABEL_VALUES = 20


def summarise(trace: Trace) -> dict[str, Any]:
    """The trace in numbers: its shape, its size, and how skewed and how repetitive its use of experts is."""
    events = trace.events()
    counts = _access_counts(events)
    return {
        "model": trace.meta.get("model"),
        "source": trace.meta.get("source"),
        "shape": _shape(trace),
        **_sizes(trace, events),
        "distinct_experts_per_event": _distinct_per_event(events),
        "entropy": _spread(_entropy(counts)),
        "top_share": {f"{share:.0%}": _top_share(counts, share) for share in TOP_SHARES},
        "repeat_rate": dict(zip(map(str, LAGS), _repeat_rates(trace), strict=True)),
        "repeat_rate_by_chance": trace.shape.top_k / trace.shape.experts,
        "labels": _label_counts(trace),
        "has_weights": trace.weights is not None,
        "has_token_ids": trace.token_ids is not None,
        "guess_distances": 0 if trace.guesses is None else trace.guesses.shape[2],
        "meta": dict(trace.meta),
    }


def _shape(trace: Trace) -> dict[str, Any]:
    shape = trace.shape
    size = shape.expert_bytes
    return {
        "layers": shape.layers,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "expert_bytes": size,
        "total_experts": shape.total_experts,
        "total_expert_bytes": None if size is None else size * shape.total_experts,
        "token_cycle": shape.token_cycle,
    }


def _sizes(trace: Trace, events: EventTable) -> dict[str, int]:
    return {
        "tokens": trace.tokens,
        "prefill_tokens": trace.count(Phase.PREFILL),
        "decode_tokens": trace.count(Phase.DECODE),
        "requests": trace.requests,
        "steps": trace.steps,
        "events": len(events),
        "accesses": events.accesses,
        "largest_event": events.largest,
    }


def _access_counts(events: EventTable) -> npt.NDArray[np.int64]:
    """How many events asked for each expert, as a grid of layers and experts."""
    shape = events.shape
    layer = np.repeat(events.layer, np.diff(events.start))
    counts = np.bincount(layer * shape.experts + events.expert, minlength=shape.total_experts)
    return counts.reshape(shape.layers, shape.experts)


def _distinct_per_event(events: EventTable) -> dict[str, float | None]:
    sizes = np.diff(events.start)
    chosen = {phase.name.lower(): sizes[events.phase == phase] for phase in Phase}
    return {name: float(own.mean()) if len(own) else None for name, own in chosen.items()}


def _entropy(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Entropy of expert use per layer, 1 where all are used alike; layers without use are left out."""
    used = counts[counts.sum(axis=1) > 0]
    share = used / used.sum(axis=1, keepdims=True)
    bits = -(share * np.log2(share, out=np.zeros_like(share), where=share > 0)).sum(axis=1)
    most = np.log2(counts.shape[1])
    return bits / most if most else np.ones(len(used))


def _spread(values: npt.NDArray[np.float64]) -> dict[str, float | None]:
    if len(values) == 0:
        return {"mean": None, "min": None, "max": None}
    return {"mean": float(values.mean()), "min": float(values.min()), "max": float(values.max())}


def _top_share(counts: npt.NDArray[np.int64], share: float) -> float | None:
    """The part of all accesses that goes to the most used experts of each layer."""
    number = max(1, round(share * counts.shape[1]))
    total = int(counts.sum())
    return float(np.sort(counts, axis=1)[:, -number:].sum()) / total if total else None


def _repeat_rates(trace: Trace) -> list[float | None]:
    """For each lag, the share of a decode token's experts used `lag` tokens before in the same request."""
    order = np.argsort(trace.request, kind="stable")
    sizes = np.bincount(trace.request)
    nth = np.arange(trace.tokens) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    totals = _count_repeats(trace.experts, trace.phase, order, nth, np.array(LAGS))
    return [float(repeated / asked) if asked else None for repeated, asked in totals]


@keep_compiled(nogil=True)
def _count_repeats(experts: Any, phase: Any, order: Any, nth: Any, lags: Any) -> Any:
    """Per lag: experts seen again, and experts asked for in layers that both tokens ran through."""
    totals = np.zeros((len(lags), 2), np.int64)
    layers, top_k = experts.shape[1], experts.shape[2]
    for i in range(len(order)):
        if phase[order[i]] == 0:
            continue
        for at in range(len(lags)):
            if nth[i] < lags[at]:
                continue
            now, before = experts[order[i]], experts[order[i - lags[at]]]
            for layer in range(layers):
                repeated, asked, known = 0, 0, False
                for k in range(top_k):
                    known = known or before[layer, k] >= 0
                    if now[layer, k] < 0:
                        continue
                    asked += 1
                    for j in range(top_k):
                        repeated += now[layer, k] == before[layer, j]
                if known:
                    totals[at, 0] += repeated
                    totals[at, 1] += asked
    return totals


def _label_counts(trace: Trace) -> dict[str, Any]:
    """Requests by label value; a key with many values is told by their number only."""
    values: dict[str, Counter[str]] = {}
    for label in trace.labels:
        for key, value in label.items():
            values.setdefault(key, Counter())[value] += 1
    return {key: _few(counter) for key, counter in sorted(values.items())}


def _few(counter: Counter[str]) -> dict[str, Any]:
    if len(counter) > _MAX_LABEL_VALUES:
        return {"distinct": len(counter)}
    return {"distinct": len(counter), "requests": dict(counter.most_common())}

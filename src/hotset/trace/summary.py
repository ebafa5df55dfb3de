"""What a trace holds, in numbers that say how well a cache can do on it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.trace.event import Phase
from hotset.trace.trace import Trace

LAGS = (1, 2, 4, 8, 16)
"""How many tokens back the repeat rate looks."""

TOP_SHARES = (0.1, 0.2, 0.4)
"""The shares of the experts of a layer whose part of all accesses is told."""

_MAX_LABEL_VALUES = 20
_ROWS_AT_ONCE = 1 << 14


def summarise(trace: Trace) -> dict[str, Any]:
    """The trace in numbers: its shape, its size, and how skewed and how repetitive its use of experts is."""
    shape, events = trace.shape, trace.events()
    sizes = np.diff(events.start)
    counts = events.totals(by_tokens=False)
    return {
        "model": trace.meta.get("model"),
        "source": trace.meta.get("source"),
        "shape": asdict(shape)
        | {
            "total_experts": shape.total_experts,
            "total_expert_bytes": None if shape.expert_bytes is None else shape.expert_bytes * shape.total_experts,
            "token_cycle": shape.token_cycle,
        },
        "tokens": trace.tokens,
        "prefill_tokens": trace.count(Phase.PREFILL),
        "decode_tokens": trace.count(Phase.DECODE),
        "requests": trace.requests,
        "steps": trace.steps,
        "events": len(events),
        "accesses": events.accesses,
        "largest_event": events.largest,
        "distinct_experts_per_event": {
            phase.name.lower(): float(own.mean()) if len(own := sizes[events.phase == phase]) else None
            for phase in Phase
        },
        "entropy": spread(entropy(counts)),
        "top_share": {f"{share:.0%}": top_share(counts, share) for share in TOP_SHARES},
        "repeat_rate": {str(lag): repeat_rate(trace, lag) for lag in LAGS},
        "repeat_rate_by_chance": shape.top_k / shape.experts,
        "labels": _label_counts(trace),
        "has_weights": trace.weights is not None,
        "has_token_ids": trace.token_ids is not None,
        "prediction_distances": 0 if trace.predictions is None else trace.predictions.shape[2],
        "meta": dict(trace.meta),
    }


def entropy(counts: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """How even the use of each layer is: 1 where all experts are used alike; not a number where none was used."""
    total = counts.sum(axis=1, keepdims=True)
    share = np.divide(counts, total, out=np.zeros(counts.shape), where=total > 0)
    bits = -(share * np.log2(share, out=np.zeros_like(share), where=share > 0)).sum(axis=1)
    most = np.log2(counts.shape[1])
    even: npt.NDArray[np.float64] = np.where(total[:, 0] > 0, bits / most if most else 1.0, np.nan)
    return even


def spread(values: npt.NDArray[np.float64]) -> dict[str, float | None]:
    """Mean and ends of what is known."""
    known = values[np.isfinite(values)]
    if len(known) == 0:
        return {"mean": None, "min": None, "max": None}
    return {"mean": float(known.mean()), "min": float(known.min()), "max": float(known.max())}


def top_share(counts: npt.NDArray[Any], share: float) -> float | None:
    """The part of all accesses that goes to the most used experts of each layer."""
    number = max(1, round(share * counts.shape[1]))
    total = float(counts.sum())
    return float(np.sort(counts, axis=1)[:, -number:].sum()) / total if total else None


def repeat_rate(trace: Trace, lag: int) -> float | None:
    """The share of a decode token's experts used `lag` tokens before in the same request, where both ran a layer."""
    order = np.argsort(trace.request, kind="stable")
    request, decode = trace.request[order], trace.phase[order] == Phase.DECODE
    rows = lag + np.flatnonzero((request[lag:] == request[:-lag]) & decode[lag:])
    repeated, asked = 0, 0
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        chosen = rows[first : first + _ROWS_AT_ONCE]
        now, before = trace.experts[order[chosen]], trace.experts[order[chosen - lag]]
        known = (now >= 0) & (before >= 0).any(axis=2, keepdims=True)
        asked += int(np.count_nonzero(known))
        repeated += sum(int((known & (now == before[:, :, k : k + 1])).sum()) for k in range(now.shape[2]))
    return repeated / asked if asked else None


def _label_counts(trace: Trace) -> dict[str, Any]:
    """Requests by label value; a key with many values is told by their number only."""
    values: dict[str, Counter[str]] = {}
    for label in trace.labels:
        for key, value in label.items():
            values.setdefault(key, Counter())[value] += 1
    return {
        key: {"distinct": len(own)} | ({"requests": dict(own.most_common())} if len(own) <= _MAX_LABEL_VALUES else {})
        for key, own in sorted(values.items())
    }

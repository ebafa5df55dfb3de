"""Small traces whose measures can be computed slowly: by loops over tokens, layers and places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from hotset.shape import ModelShape
from hotset.trace import Phase, Trace


def by_hand(rows: list[list[list[int]]], experts: int, requests: list[int] | None = None, **more: Any) -> Trace:
    """A trace of decode tokens, one step each, from their experts: [tokens][layers][places], -1 for an unused one."""
    array = np.array(rows, np.int16)
    tokens, layers, top_k = array.shape
    return Trace(
        shape=ModelShape(layers, experts, top_k),
        experts=array,
        request=np.array(requests or [0] * tokens, np.int32),
        step=np.arange(tokens, dtype=np.int32),
        phase=np.full(tokens, Phase.DECODE, np.uint8),
        **more,
    )


def drawn(
    seed: int = 0, *, requests: int = 6, layers: int = 3, experts: int = 12, top_k: int = 3, predictions: bool = False
) -> Trace:
    """A random trace with all that a trace can hold: prompts and answers, tokens that left a layer out, labels."""
    random = np.random.default_rng(seed)
    prompt, answer = random.integers(3, 9, requests), random.integers(10, 40, requests)
    tokens = int((prompt + answer).sum())
    logits = random.normal(size=(tokens, layers, experts)) + 1.2 * random.normal(size=(1, layers, experts))
    request = np.repeat(np.arange(requests), prompt + answer)
    logits += 1.5 * random.normal(size=(2, layers, experts))[request % 2]
    chosen = np.argsort(-logits, axis=2)[:, :, :top_k].astype(np.int16)
    chosen[random.random((tokens, layers)) < 0.05] = -1
    weights = -np.sort(-random.random((tokens, layers, top_k)), axis=2).astype(np.float16)
    weights[chosen < 0] = 0
    phase = np.concatenate([[Phase.PREFILL] * p + [Phase.DECODE] * a for p, a in zip(prompt, answer, strict=True)])
    return Trace(
        shape=ModelShape(layers, experts, top_k, 1000),
        experts=chosen,
        request=request.astype(np.int32),
        step=np.concatenate([[0], np.cumsum((np.diff(request) != 0) | (phase[1:] == Phase.DECODE))]).astype(np.int32),
        phase=phase.astype(np.uint8),
        weights=weights,
        token_ids=random.integers(0, 9, tokens).astype(np.int32),
        predictions=chosen[:, :, None, :].repeat(2, axis=2).copy() if predictions else None,
        labels=tuple({"topic": "ab"[r % 2], "number": str(r)} for r in range(requests)),
        meta={"model": "drawn"},
    )


def uses(trace: Trace) -> Iterator[tuple[int, int, int]]:
    """Every use of a trace, one by one: token, layer, expert."""
    for token in range(trace.tokens):
        for layer in range(trace.shape.layers):
            for expert in trace.experts[token, layer].tolist():
                if expert >= 0:
                    yield token, layer, expert


def without(trace: Trace, **more: Any) -> Trace:
    """The same trace with parts replaced."""
    return replace(trace, **more)

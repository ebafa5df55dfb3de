"""Small workloads as event tables: given row by row, or drawn at random."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from hotset.cache import Scope
from hotset.shape import ModelShape
from hotset.trace import Phase
from hotset.trace.events import EventTable

EventRow = tuple[int, dict[int, int], int, Phase]
"""Layer, tokens of each expert, tokens in all, phase."""

SCOPES = (Scope.LAYER, Scope.POOL)


def make_events(shape: ModelShape, rows: Sequence[EventRow]) -> EventTable:
    """A table of events given as (layer, {expert: count}, tokens, phase)."""
    sizes = [len(counts) for _, counts, _, _ in rows]
    entries = [pair for _, counts, _, _ in rows for pair in sorted(counts.items())]
    return EventTable(
        shape,
        start=np.concatenate(([0], np.cumsum(sizes))).astype(np.int64),
        layer=np.array([row[0] for row in rows], np.int32),
        step=np.arange(len(rows), dtype=np.int32),
        tokens=np.array([row[2] for row in rows], np.int32),
        phase=np.array([row[3] for row in rows], np.uint8),
        request=np.zeros(len(rows), np.int32),
        expert=np.array([expert for expert, _ in entries], np.int32),
        count=np.array([count for _, count in entries], np.int32),
    )


def decode(shape: ModelShape, rows: Iterable[tuple[int, Sequence[int]]]) -> EventTable:
    """Events of one token each, given as (layer, experts)."""
    return make_events(shape, [(layer, dict.fromkeys(experts, 1), 1, Phase.DECODE) for layer, experts in rows])


def one_layer(experts: int, top_k: int, asked: Iterable[Sequence[int]]) -> EventTable:
    """Events of a model of one layer, given as the experts asked for."""
    return decode(ModelShape(1, experts, top_k), [(0, group) for group in asked])


def random_shape(rng: np.random.Generator, *, layers: int = 4) -> ModelShape:
    """A few layers of 3 to 10 experts."""
    experts, chosen = int(rng.integers(3, 11)), int(rng.integers(1, layers + 1))
    return ModelShape(chosen, experts, int(rng.integers(1, experts // 2 + 1)))


def random_events(
    rng: np.random.Generator, shape: ModelShape, number: int, *, prefill: float = 0.2, wide: float = 0.2
) -> EventTable:
    """Mostly layer by layer and about top_k wide, with favourites; some prompts, some events up to all experts."""
    taste = rng.dirichlet(np.full(shape.experts, 0.5), shape.layers) + 1e-3
    rows: list[EventRow] = []
    for i in range(number):
        layer = i % shape.layers if rng.random() < 0.9 else int(rng.integers(shape.layers))
        width = int(rng.integers(1, shape.experts + 1)) if rng.random() < wide else shape.top_k
        probability = taste[layer] / taste[layer].sum()
        experts = rng.choice(shape.experts, width, replace=False, p=probability).tolist()
        is_prefill = rng.random() < prefill
        tokens = int(rng.integers(1, 10)) if is_prefill or rng.random() < 0.3 else 1
        counts = {expert: int(rng.integers(1, tokens + 1)) for expert in experts}
        rows.append((layer, counts, tokens, Phase.PREFILL if is_prefill else Phase.DECODE))
    return make_events(shape, rows)


def random_budget(rng: np.random.Generator, shape: ModelShape) -> int:
    """From the smallest allowed to all experts, more often small."""
    return int(rng.integers(shape.top_k, max(shape.top_k + 1, int(shape.total_experts * rng.random()) + 1)))


def cases(seed: int, number: int = 6, **options: Any) -> Iterator[tuple[EventTable, int, Scope]]:
    """Random workloads with a number of slots, in both scopes."""
    rng = np.random.default_rng(seed)
    for _, scope in product(range(number), SCOPES):
        shape = random_shape(rng)
        yield random_events(rng, shape, 50, **options), random_budget(rng, shape), scope

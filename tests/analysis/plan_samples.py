"""A model small enough to plan by hand, and rates that are round numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hotset.analysis.planner.hits import BOUND, HitCurve, Hits
from hotset.analysis.planner.model import PlannedModel, Precision
from hotset.analysis.planner.planning import Planner
from hotset.analysis.planner.rates import Engine, Rates
from hotset.analysis.planner.tiers import Memory

MB = 1_000_000
SIZE = 40 * 4096  # bytes of an expert
PRECISION = Precision("bfloat16", SIZE)

# Two layers of four experts, two per token; everything else takes 1 MB and is read for each token.
MODEL = PlannedModel(
    name="./tiny", layers=2, experts=4, top_k=2, matrices=((256, 128), (128, 128)), all_layers=2, dense_bytes=MB,
    read_bytes=MB, context_bytes=0, work_bytes=0, own_bytes=SIZE,
)  # fmt: skip
RATES = Rates(
    engine=Engine.CPU, memory_bytes_per_s=1e9, rest_bytes_per_s=1e9, layer_s=1e-3, event_s=1e-4, partial_s=2e-4,
    miss_s=3e-4, miss_bytes_per_s=1e8, efficiency={"bfloat16": 0.5}, spread=0.1,
)  # fmt: skip


def curve(*rows: tuple[float, ...], requests: int = 1) -> HitCurve:
    """Events per token by missing experts (0, 1, 2) at 2, 4 and 6 slots, and none missing at 8."""
    events = np.array([*rows, (2.0, 0.0, 0.0)])[:, None, :].repeat(requests, axis=1)
    return HitCurve(MODEL.shape, np.array([2, 4, 6, 8][-len(events) :]), events, np.ones(requests))


HITS = Hits(
    {"blend": curve((0, 0, 2), (0, 2, 0), (1, 1, 0)), BOUND: curve((0, 1, 1), (1, 1, 0), (2, 0, 0))},
)


def planner(ram_bytes: int = 1 << 30, gpu_bytes: int | None = None, **changes: Any) -> Planner:
    """A planner of the tiny model."""
    found = Planner(MODEL, Memory(ram_bytes, gpu_bytes), HITS, lambda engine: replace(RATES, engine=engine))
    return replace(found, **changes)

"""What predictions could bring at best on a GPU: a model of the timeline of decode steps, layer by layer.

The link copies what an event misses, then predictions for the next layers, the nearest first, until the next event is
planned. Misses are those of the cache on the routing of benchmarks/gpu_decode.py; the resident step and the link's
speed are taken from its results. Predictions are right as often as is said, and else name any expert.

python benchmarks/ahead_model.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gpu_engine import routing_of
from hotset import policies
from hotset.cache.controller import Controller
from hotset.cache.plan import SlotPlan
from hotset.shape import ModelShape
from hotset.trace import Trace

from common import RESULTS, gpt_oss, publish
from gpu_shapes import SHAPES

WARM, TOKENS = 140, 120
BEFORE = 0.57
"""The share of a layer's time that lies before its routing is known: attention, norms and the router."""
PLAN_US, LOOK_US, LATE = 12.0, 25.0, 0.6
"""From the routing to the first copy; to the first prediction; and the share of the rest that waits for misses."""
RIGHT = ((), (1.0,), (1.0, 1.0), (1.0, 1.0, 1.0), (0.9,), (0.9, 0.85), (0.9, 0.85, 0.8))


class Pass(NamedTuple):
    """One token: of each layer the experts asked for, those missed, and who was resident."""

    asked: Any  # [layers, top_k]
    missed: list[set[int]]
    resident: list[Any]


def passes_of(trace: Trace, share: float) -> list[Pass]:
    """What the cache makes of the routing."""
    shape = ModelShape(trace.shape.layers, trace.shape.experts, trace.shape.top_k)
    plan = SlotPlan(shape, int(share * shape.total_experts), staging=shape.top_k)
    cache, found = Controller(plan, policies.parse("blend")), []
    for token in trace.experts[: WARM + TOKENS]:
        missed, resident = [], []
        for layer, experts in enumerate(token):
            resident.append(cache.table.slot_of[layer] >= 0)
            count = cache.route(layer, np.sort(experts).astype(np.int32))
            missed.append(set(cache.table.loads[:count, 0].tolist()))
        found.append(Pass(token, missed, resident))
    return found[WARM:]


def step_us(run: Pass, right: Sequence[float], copy_us: float, layer_us: float, rng: np.random.Generator) -> float:
    """How long one token takes; a copy takes so long, and a layer with all there."""
    now = idle = 0.0
    came: dict[int, dict[int, float]] = {}  # of each layer ahead, how much of whom has come
    queue: list[tuple[int, int]] = []
    for layer, missed in enumerate(run.missed):
        routed = now + BEFORE * layer_us
        for target, expert in queue:
            part = min(copy_us - came[target].get(expert, 0.0), max(routed - idle, 0.0))
            if part > 0:
                came[target][expert] = came[target].get(expert, 0.0) + part
                idle += part
        have = came.pop(layer, {})
        left_us = sum(copy_us - have.get(expert, 0.0) for expert in missed)
        fetched = routed + PLAN_US + left_us
        idle = max(fetched, routed + LOOK_US)
        rest = (1 - BEFORE) * layer_us
        now = max(routed + rest, fetched + LATE * rest if left_us else 0.0)
        queue = _queue(run, layer, right, came, rng)
    return now


def _queue(run: Pass, layer: int, right: Sequence[float], came: Any, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Whom to send for after a layer, the nearest first; who has set out goes on."""
    queue = []
    for distance, share in enumerate(right, 1):
        target = layer + distance
        if target >= len(run.asked):
            break
        begun = list(came.setdefault(target, {}))
        wrong = rng.integers(len(run.resident[target]), size=len(run.asked[target]))
        named = np.where(rng.random(len(wrong)) < share, run.asked[target], wrong).tolist()
        queue += [(target, e) for e in dict.fromkeys(begun + named) if not run.resident[target][e]]
    return queue


def measure(name: str, trace: Trace) -> dict[str, Any]:
    """All kinds of predictions on one shape, half and a quarter resident."""
    known = json.loads((RESULTS / f"gpu_decode_{name}.json").read_text())
    resident_ms, rows = known["rows"][0]["ms_per_token"], []
    copy_us = known["expert_bytes"] / known["link_gb_per_s"] / 1e3
    for share in (0.5, 0.25):
        passes = passes_of(trace, share)
        sizes = np.bincount([len(missed) for run in passes for missed in run.missed])
        layer_us = 1e3 * resident_ms / len(passes[0].asked)
        for right in RIGHT:
            rng = np.random.default_rng(0)
            ms = np.mean([step_us(run, right, copy_us, layer_us, rng) for run in passes]) / 1e3
            rows.append({"share": share, "right": list(right), "ms_per_token": float(ms)})
            print(f"{name} {share}: right {right}: {ms:.2f} ms", flush=True)
        print("  layers by misses:", (sizes / sizes.sum()).round(3).tolist(), flush=True)
        rows[-1]["layers_by_misses"] = (sizes / sizes.sum()).tolist()
    return {"resident_ms": resident_ms, "copy_us": copy_us, "rows": rows}


def main() -> None:
    """Both shapes, where the recorded routing is there."""
    traces = {"qwen3-30b-a3b": routing_of(SHAPES["qwen3-30b-a3b"]), "gpt-oss-20b": gpt_oss()}
    publish("ahead_model", {name: measure(name, trace) for name, trace in traces.items() if trace is not None})


if __name__ == "__main__":
    main()

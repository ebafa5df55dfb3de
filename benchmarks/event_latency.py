"""What one event costs when Python serves it, as the engine does once per layer and token."""

from __future__ import annotations

import time

import numpy as np

from hotset.cache import Controller, Scope, SlotPlan
from hotset.policies import names, parse
from hotset.shape import ModelShape
from hotset.trace.events import EventTable
from hotset.trace.synth import SynthConfig, synthesise

from common import publish

SHAPE = ModelShape(layers=48, experts=128, top_k=8)
ROUNDS = 5


def sample() -> list[tuple[int, np.ndarray]]:
    """Events of a model with the shape of Qwen3-30B-A3B, as the engine would pass them."""
    config = SynthConfig(
        layers=SHAPE.layers, experts=SHAPE.experts, top_k=SHAPE.top_k, requests=4, prompt_tokens=0, new_tokens=64
    )
    events: EventTable = synthesise(config).events()
    bounds = zip(events.start[:-1], events.start[1:], strict=True)
    return [(int(layer), events.expert[a:b].copy()) for layer, (a, b) in zip(events.layer, bounds, strict=True)]


def microseconds(policy: str, scope: Scope, events: list[tuple[int, np.ndarray]]) -> float:
    """The mean time of an event, in the best round."""
    controller = Controller(SlotPlan(SHAPE, SHAPE.total_experts // 4, scope), parse(policy))
    for layer, experts in events:  # warm up: compile, fill the cache
        controller.route(layer, experts)
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for layer, experts in events:
            controller.route(layer, experts)
        best = min(best, time.perf_counter() - began)
    return round(best / len(events) * 1e6, 2)


def main() -> None:
    """Measure, print and publish."""
    events = sample()
    causal = [name for name in names() if not parse(name).offline]
    figures = {scope.value: {name: microseconds(name, scope, events) for name in causal} for scope in Scope}
    for scope, times in figures.items():
        print(scope, "  ".join(f"{name} {value:.1f}" for name, value in times.items()), "us per event")
    publish(
        "event_latency",
        {
            "unit": "microseconds per event called from Python: 48 layers, 128 experts, top-8, 25 % resident, decode",
            "events": len(events),
            "by_scope": figures,
        },
    )


if __name__ == "__main__":
    main()

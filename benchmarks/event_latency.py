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

QWEN3 = ModelShape(layers=48, experts=128, top_k=8)
GPT_OSS = ModelShape(layers=24, experts=32, top_k=4)
ROUNDS = 5
ONE = np.zeros(1, np.int32)

Sample = list[tuple[int, np.ndarray, np.ndarray]]


def sample(shape: ModelShape) -> Sample:
    """Events of a model of this shape with what the token chose, as the engine would pass them."""
    config = SynthConfig(
        layers=shape.layers, experts=shape.experts, top_k=shape.top_k, requests=4, prompt_tokens=0, new_tokens=64
    )
    events: EventTable = synthesise(config).events()
    bounds = zip(events.start[:-1], events.start[1:], strict=True)
    experts = [events.expert[a:b].copy() for a, b in bounds]
    return [(int(layer), some, some[None]) for layer, some in zip(events.layer, experts, strict=True)]


def microseconds(policy: str, shape: ModelShape, scope: Scope, events: Sample) -> float:
    """The mean time of an event, in the best round; a policy that looks at routes is given them, as a live one is."""
    controller = Controller(SlotPlan(shape, shape.total_experts // 4, scope), parse(policy))
    routed = controller.policy.needs_routes

    def serve() -> None:
        for layer, experts, routes in events:
            if routed:
                controller.route(layer, experts, routes=routes, requests=ONE)
            else:
                controller.route(layer, experts)

    serve()  # warm up: compile, fill the cache
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        serve()
        best = min(best, time.perf_counter() - began)
    return round(best / len(events) * 1e6, 2)


def main() -> None:
    """Measure, print and publish."""
    events = sample(QWEN3)
    causal = [name for name in names() if not parse(name).offline]
    figures = {scope.value: {name: microseconds(name, QWEN3, scope, events) for name in causal} for scope in Scope}
    few = sample(GPT_OSS)
    smaller = {name: microseconds(name, GPT_OSS, Scope.LAYER, few) for name in causal}
    for scope, times in (*figures.items(), ("24 layers, 32 experts, top-4", smaller)):
        print(scope, "  ".join(f"{name} {value:.1f}" for name, value in times.items()), "us per event")
    publish(
        "event_latency",
        {
            "unit": "microseconds per event called from Python: 48 layers, 128 experts, top-8, 25 % resident, decode",
            "events": len(events),
            "by_scope": figures,
            "24 layers, 32 experts, top-4, layer": smaller,
        },
    )


if __name__ == "__main__":
    main()

"""Small traces for the simulator's tests, and where the public ones lie."""

from pathlib import Path

import numpy as np

from hotset.cache import Controller, Scope, SlotPlan
from hotset.policies import parse
from hotset.shape import ModelShape
from hotset.trace import Phase, Trace

PUBLIC = Path(__file__).parents[2].parent / "shared/traces"


def trace_of(shape, requests):
    """A trace of given requests: each a list of passes (phase, [[experts of each layer] of each token])."""
    experts, request, step, phase = [], [], [], []
    for number, passes in enumerate(requests):
        for kind, tokens in passes:
            here = step[-1] + 1 if step else 0
            for token in tokens:
                experts.append(token)
                request.append(number)
                step.append(here)
                phase.append(kind)
    return Trace(
        shape,
        np.array(experts, np.int16),
        np.array(request, np.int32),
        np.array(step, np.int32),
        np.array(phase, np.uint8),
    )


def random_trace(seed=0, requests=6, tokens=25, prompt=0, shape=None):
    """Requests with a taste of their own, each with a prompt of so many tokens in one pass."""
    rng = np.random.default_rng(seed)
    shape = shape or ModelShape(3, 8, 2, 1000)

    def passes():
        taste = rng.dirichlet(np.full(shape.experts, 0.4), shape.layers) + 1e-3
        taste /= taste.sum(axis=1, keepdims=True)

        def token():
            return [rng.choice(shape.experts, shape.top_k, replace=False, p=row).tolist() for row in taste]

        begin = [(Phase.PREFILL, [token() for _ in range(prompt)])] if prompt else []
        return begin + [(Phase.DECODE, [token()]) for _ in range(tokens)]

    return trace_of(shape, [passes() for _ in range(requests)])


def replay(spec, events, slots, scope=Scope.LAYER, **options):
    """A fresh cache, after these events, and what it did."""
    controller = Controller(SlotPlan(events.shape, slots, scope), parse(spec), **options)
    return controller, controller.replay(events)

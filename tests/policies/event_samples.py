"""Small workloads as event tables: those of `hotset.testing`, requests that take turns, and any by hypothesis."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from hotset.shape import ModelShape
from hotset.testing.events import decode, make_events, one_layer, random_budget, random_events, random_shape
from hotset.trace import Phase, Trace

__all__ = [
    "PUBLIC", "decode", "make_events", "one_layer", "random_budget", "random_events", "random_requests", "random_shape",
    "random_turns", "workloads",
]  # fmt: skip

PUBLIC = Path(__file__).parents[2].parent / "shared/traces"


def random_turns(rng, shape, streams, rounds):
    """Requests that take turns, a prompt and then single tokens; some end, some are left out, some go twice."""
    rows, requests = [], []
    running, decodes = list(range(streams)), set()
    for _ in range(rounds):
        for stream in range(streams):
            if rng.random() < 0.2:
                running[stream] = int(rng.choice([stream, max(running) + 1]))  # a number may come back
                decodes.discard(running[stream])
            for _ in range(rng.choice([0, 1, 2], p=[0.05, 0.9, 0.05])):
                request = running[stream]
                made = _random_pass(rng, shape, Phase.DECODE if request in decodes else Phase.PREFILL)
                decodes.add(request)
                rows += made
                requests += [request] * len(made)
    return replace(make_events(shape, rows), request=np.array(requests, np.int32))


def _random_pass(rng, shape, phase):
    tokens = 1 if phase == Phase.DECODE else int(rng.integers(1, 10))
    rows = []
    for layer in range(shape.layers):
        experts = rng.choice(shape.experts, shape.top_k, replace=False).tolist()
        rows.append((layer, {expert: int(rng.integers(1, tokens + 1)) for expert in experts}, tokens, phase))
    return rows


def random_requests(rng, shape, steps, most_running=4, long=0.1):
    """Requests that run together, token by token: prompts, steps of one token or several of each, layers left out."""
    habits = [_random_token(rng, shape) for _ in range(6)]  # tokens that come again have the same experts
    running, number, rows = [], 0, []
    for step in range(steps):
        if not running or rng.random() < 0.2:
            new = list(range(number, number + int(rng.integers(1, 3))))  # two may begin at once
            number = new[-1] + 1
            running = (running + new)[-most_running:]
            wide = int(rng.integers(65, 70)) if rng.random() < long else int(rng.integers(1, 10))
            rows += [(step, request, Phase.PREFILL) for request in new for _ in range(wide)]
            continue
        served = [request for request in running if rng.random() < 0.85] or running[:1]
        several = rng.random() < 0.1
        rows += [(step, request, Phase.DECODE) for request in served for _ in range(1 + several * int(rng.integers(3)))]
    taken = [habits[rng.integers(6)] if rng.random() < 0.7 else _random_token(rng, shape) for _ in rows]
    experts = np.array(taken, np.int16)
    for at, (step, _, phase) in enumerate(rows):  # a prompt passes a layer by as a whole, a token by itself
        chance = np.random.default_rng(step if phase == Phase.PREFILL else 10_000 + at)
        experts[at, chance.random(shape.layers) < 0.1] = -1
        if (experts[at] < 0).all():
            experts[at] = taken[at]
    step, request, phase = (np.array(column) for column in zip(*rows, strict=True))
    return Trace(shape, experts, request.astype(np.int32), step.astype(np.int32), phase.astype(np.uint8)).events()


def _random_token(rng, shape):
    """One token's experts in every layer; some places are unused."""
    chosen = np.array([rng.choice(shape.experts, shape.top_k, replace=False) for _ in range(shape.layers)])
    chosen[:, 1:][rng.random((shape.layers, shape.top_k - 1)) < 0.1] = -1
    return chosen


@st.composite
def workloads(draw, *, phases=(Phase.PREFILL, Phase.DECODE), most_events=24, most_layers=4, most_experts=10):
    """A table of events and a number of slots that is allowed for it."""
    experts = draw(st.integers(3, most_experts))
    shape = ModelShape(draw(st.integers(1, most_layers)), experts, draw(st.integers(1, experts)))
    event = st.tuples(
        st.integers(0, shape.layers - 1),
        st.dictionaries(st.integers(0, experts - 1), st.integers(1, 4), min_size=1),
        st.integers(4, 9),
        st.sampled_from(phases),
    )
    rows = draw(st.lists(event, min_size=1, max_size=most_events))
    return make_events(shape, rows), draw(st.integers(shape.top_k, shape.total_experts))

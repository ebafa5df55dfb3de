"""Small workloads as event tables, made by hand, by probability, or by hypothesis."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from hotset.shape import ModelShape
from hotset.trace import Phase
from hotset.trace.events import EventTable

PUBLIC = Path(__file__).parents[2].parent / "shared/traces"


def make_events(shape, rows):
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


def decode(shape, rows):
    """Events of one token each, given as (layer, experts)."""
    return make_events(shape, [(layer, dict.fromkeys(experts, 1), 1, Phase.DECODE) for layer, experts in rows])


def one_layer(experts, top_k, asked):
    """Events of a model of one layer, given as the experts asked for."""
    shape = ModelShape(1, experts, top_k)
    return decode(shape, [(0, group) for group in asked])


def random_shape(rng, **limits):
    """1 to 4 layers of 3 to 10 experts."""
    experts = int(rng.integers(3, 11))
    layers = int(rng.integers(1, limits.get("layers", 4) + 1))
    return ModelShape(layers, experts, int(rng.integers(1, experts // 2 + 1)))


def random_events(rng, shape, number, *, prefill=0.2, wide=0.2):
    """Mostly layer by layer and about top_k wide, with favourites; some prompts, some events up to all experts."""
    taste = rng.dirichlet(np.full(shape.experts, 0.5), shape.layers) + 1e-3
    rows = []
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


def random_budget(rng, shape):
    """From the smallest allowed to all experts, more often small."""
    return int(rng.integers(shape.top_k, max(shape.top_k + 1, int(shape.total_experts * rng.random()) + 1)))


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

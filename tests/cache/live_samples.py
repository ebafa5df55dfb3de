"""Live caches and small workloads that the tests of this folder share."""

import sys
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "policies"))

from event_samples import make_events, random_budget, random_events, random_shape  # noqa: F401 - for others

from hotset.cache import Controller, Scope, SlotPlan
from hotset.policies import names, parse
from hotset.shape import ModelShape
from hotset.trace import Event, Phase

ONLINE = [name for name in names() if not parse(name).offline]
SCOPES = list(Scope)
TWO_LAYERS = ModelShape(2, 32, 4)


def cache_of(shape, slots, policy="lru", scope=Scope.LAYER):
    return Controller(SlotPlan(shape, slots, scope), parse(policy))


def ask(controller, layer, *experts, tokens=1, phase=Phase.DECODE):
    """Serve one event in which every expert is used by one token."""
    return controller.serve(Event(0, layer, experts, (1,) * len(experts), tokens, phase))


def serve_all(controller, events):
    """Serve events one by one as a model would, and return the misses of each."""
    return [len(controller.serve(event).loads) for event in events]


def serve_live(controller, event):
    """Serve an event as an engine does, which knows what a single token chose, and return how many were missing."""
    experts, counts = (np.array(each, np.int32) for each in (event.experts, event.counts))
    known = {"routes": experts[None], "requests": np.zeros(1, np.int32)} if event.tokens == 1 else {}
    return controller.route(event.layer, experts, counts, event.tokens, event.phase, **known)


def plain(event):
    """All of an event that a cache can tell."""
    return event.layer, event.experts, event.counts, event.tokens, event.phase


def arrays_of(controller):
    """Everything that decides what a cache does next, copied."""
    parts = [("table", controller.table), ("state", controller.state)]
    return {f"{part}.{name}": array.copy() for part, tuples in parts for name, array in tuples._asdict().items()}


def assert_same(some, other, but=()):
    """Two answers of arrays_of are equal bit for bit."""
    assert some.keys() == other.keys()
    for name in some.keys() - set(but):
        np.testing.assert_array_equal(some[name], other[name], err_msg=name)


def skewed_passes(rng, shape, hot, passes):
    """Decode passes: half of each token's experts are among the hot ones, the others are anybody."""
    rows = []
    for _ in range(passes):
        for layer in range(shape.layers):
            chosen = set(rng.choice(hot, shape.top_k // 2, replace=False).tolist())
            while len(chosen) < shape.top_k:
                chosen.add(int(rng.integers(shape.experts)))
            rows.append((layer, dict.fromkeys(sorted(chosen), 1), 1, Phase.DECODE))
    return make_events(shape, rows)


def by_pass(events):
    """Events cut where a pass ends, one event per layer."""
    layers = events.shape.layers
    return [events.slice(first, first + layers) for first in range(0, len(events), layers)]


@st.composite
def long_workloads(draw, most_events=24):
    """Events of single tokens, of batches, and of prompts around and far beyond the window of the statistics."""
    experts = draw(st.integers(3, 9))
    shape = ModelShape(draw(st.integers(1, 3)), experts, draw(st.integers(1, experts)))
    tokens = st.one_of(st.just(1), st.integers(1, 9), st.sampled_from([31, 32, 33, 224, 255, 256, 257, 700]))
    rows = []
    for _ in range(draw(st.integers(1, most_events))):
        number = draw(tokens)
        counts = draw(st.dictionaries(st.integers(0, experts - 1), st.integers(1, number), min_size=1))
        rows.append((draw(st.integers(0, shape.layers - 1)), counts, number, draw(st.sampled_from(list(Phase)))))
    return make_events(shape, rows), draw(st.integers(shape.top_k, shape.total_experts))

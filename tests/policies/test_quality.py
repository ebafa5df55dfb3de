"""The default policy against all others on a real model: as good as the best of them, wherever that is."""

from functools import cache

import numpy as np
import pytest
from event_samples import PUBLIC

from hotset.cache import Controller, SlotPlan
from hotset.policies import names, parse
from hotset.trace.combine import interleave
from hotset.trace.importers import import_trace

TOKENS = 30_000
STREAMS = (1, 4, 16)
SHARES = (0.125, 0.25, 0.5)

pytestmark = [
    pytest.mark.public_traces,
    pytest.mark.skipif(
        not (PUBLIC / "gpt-oss-20b.npz").exists(), reason="the public traces are not beside this checkout"
    ),
]


@cache
def part():
    """Whole requests in random order, so that each kind of them is there; the recorded order is by kind."""
    trace = import_trace(PUBLIC / "gpt-oss-20b.npz")
    order = np.random.default_rng(0).permutation(trace.requests)
    by_request = [np.flatnonzero(trace.request == request) for request in order]
    return trace.take(np.concatenate(by_request)[:TOKENS])


@cache
def events(streams):
    return interleave(part(), streams).events()


@cache
def hit_rate(spec, streams, share):
    plan = SlotPlan(part().shape, int(share * part().shape.total_experts))
    return Controller(plan, parse(spec)).replay(events(streams)).counters.hit_rate()


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("share", SHARES)
def test_blend_is_at_least_about_as_good_as_any_other_without_routes(streams, share):
    others = [name for name in names() if name not in ("blend", "nextuse") and not parse(name).offline]
    best = max(hit_rate(name, streams, share) for name in others)
    assert hit_rate("blend", streams, share) >= best - 0.003


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("share", SHARES)
def test_nextuse_is_better_than_blend(streams, share):
    assert hit_rate("nextuse", streams, share) > hit_rate("blend", streams, share) + 0.003


def test_nextuse_closes_more_than_half_of_the_gap_with_one_stream():
    for share in SHARES:
        lru, found, best = (hit_rate(name, 1, share) for name in ("lru", "nextuse", "belady"))
        assert found - lru > 0.5 * (best - lru)


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("share", SHARES)
def test_belady_bounds_them_all(streams, share):
    best = hit_rate("belady", streams, share)
    assert all(hit_rate(name, streams, share) <= best for name in names())


def test_blend_is_well_above_lru_in_one_stream():
    assert hit_rate("blend", 1, 0.25) >= hit_rate("lru", 1, 0.25) + 0.035

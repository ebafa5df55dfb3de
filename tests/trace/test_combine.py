"""Traces end to end and side by side hold the same passes, only in another order."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_samples import make_trace, same

from hotset.errors import TraceError
from hotset.trace import Phase
from hotset.trace.combine import concat, interleave


def test_concat_numbers_requests_and_steps_anew(trace):
    both = concat([trace, trace])
    assert both.requests == 2 * trace.requests
    assert both.steps == 2 * trace.steps
    assert same(both.take(slice(0, trace.tokens)), trace)
    assert same(both.take(slice(trace.tokens, None)), trace)


def test_concat_of_one_is_the_same(trace):
    assert same(concat([trace]), trace)


def test_concat_keeps_what_all_have(trace):
    bare = replace(trace, weights=None, predictions=None, labels=(), meta={})
    both = concat([trace, bare])
    assert both.weights is None
    assert both.predictions is None
    assert both.token_ids is not None
    assert both.labels == trace.labels + ({},) * 3
    assert both.meta == {}


def test_concat_takes_the_one_size_that_is_stated(trace):
    silent = replace(trace, shape=replace(trace.shape, expert_bytes=None))
    assert concat([silent, trace]).shape.expert_bytes == 1000
    with pytest.raises(TraceError, match="1000 and 2000 bytes"):
        concat([trace, trace.with_expert_bytes(2000)])


def test_concat_refuses_other_models(trace):
    with pytest.raises(TraceError, match="3 layers x 8 experts, top 2, trace 1 has 4 layers x 8 experts"):
        concat([trace, make_trace(layers=4)])
    with pytest.raises(TraceError, match="no traces"):
        concat([])


@pytest.mark.parametrize("mode", ["batch", "turns"])
def test_one_stream_changes_nothing(trace, mode):
    assert same(interleave(trace, 1, mode), trace)


def test_batch_merges_decode_and_leaves_prefill_alone():
    trace = make_trace(lengths=(4, 3, 3), prompt=1)
    found = interleave(trace, 2)
    # Streams run requests 0 and 1; stream 1 is free first and takes request 2.
    assert found.request.tolist() == [0, 1, 0, 1, 0, 1, 2, 0, 2, 2]
    assert found.step.tolist() == [0, 1, 2, 2, 3, 3, 4, 5, 6, 7]
    assert found.phase.tolist() == [0, 0, 1, 1, 1, 1, 0, 1, 1, 1]


def test_turns_keep_every_pass_apart():
    trace = make_trace(lengths=(4, 3, 3), prompt=1)
    found = interleave(trace, 2, "turns")
    assert found.request.tolist() == [0, 1, 0, 1, 0, 1, 0, 2, 2, 2]
    assert found.step.tolist() == list(range(10))


def test_bad_options(trace):
    with pytest.raises(TraceError, match="a whole number of at least 1"):
        interleave(trace, 0)
    with pytest.raises(TraceError, match="batch"):
        interleave(trace, 2, "other")


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    prompt=st.integers(0, 4),
    streams=st.integers(1, 12),
    mode=st.sampled_from(["batch", "turns"]),
    again=st.booleans(),
)
def test_interleaving_keeps_every_request_whole(lengths, prompt, streams, mode, again):
    trace = make_trace(lengths=tuple(lengths), prompt=prompt)
    found = interleave(interleave(trace, 3), streams, mode) if again else interleave(trace, streams, mode)
    assert np.array_equal(np.sort(found.request), np.sort(trace.request))
    for request in range(trace.requests):
        assert same(found.select([request]), trace.select([request]))
    sizes = np.bincount(found.step)
    prefill = np.bincount(found.step, found.phase == Phase.PREFILL) > 0
    assert (sizes[~prefill] <= (streams if mode == "batch" else 1)).all()
    assert all(len(set(found.request[found.step == step])) == 1 for step in np.flatnonzero(prefill))

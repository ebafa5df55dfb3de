"""The summary against numbers worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
from trace_samples import make_trace

from hotset.shape import ModelShape
from hotset.trace import Trace
from hotset.trace.importers import import_trace
from hotset.trace.summary import summarise


def tiny(experts, phase=None, request=None):
    ids = np.array(experts, np.int16)
    tokens = len(ids)
    return Trace(
        shape=ModelShape(ids.shape[1], 4, ids.shape[2], 10),
        experts=ids,
        request=np.array(request or [0] * tokens, np.int32),
        step=np.arange(tokens, dtype=np.int32),
        phase=np.array(phase or [1] * tokens, np.uint8),
    )


def test_sizes(trace):
    found = summarise(trace)
    assert (found["tokens"], found["prefill_tokens"], found["decode_tokens"]) == (15, 6, 9)
    assert (found["requests"], found["steps"], found["events"]) == (3, 12, 36)
    assert found["shape"]["token_cycle"] == 6
    assert found["shape"]["total_expert_bytes"] == 24_000
    assert found["prediction_distances"] == 2
    assert found["has_weights"]
    assert found["labels"]["topic"] == {"distinct": 2, "requests": {"a": 2, "b": 1}}
    assert found["accesses"] == trace.events().accesses


def test_skew_and_entropy():
    found = summarise(tiny([[[0]], [[0]], [[1]], [[1]]]))
    assert found["entropy"] == {"mean": 0.5, "min": 0.5, "max": 0.5}
    assert found["top_share"] == {"10%": 0.5, "20%": 0.5, "40%": 1.0}
    assert found["distinct_experts_per_event"] == {"prefill": None, "decode": 1.0}


def test_repeat_rate_stays_within_a_request():
    trace = tiny([[[0, 1]], [[1, 2]], [[1, 2]], [[1, 2]]], request=[0, 0, 1, 1])
    assert summarise(trace)["repeat_rate"] == {"1": 0.75, "2": None, "4": None, "8": None, "16": None}
    assert summarise(trace)["repeat_rate_by_chance"] == 0.5


def test_repeat_rate_of_interleaved_requests():
    trace = tiny([[[0, 1]], [[2, 3]], [[1, 0]], [[0, 1]]], request=[0, 1, 0, 1])
    assert summarise(trace)["repeat_rate"]["1"] == 0.5


def test_repeat_rate_counts_decode_and_computed_layers_only():
    trace = tiny([[[0], [0]], [[0], [-1]], [[0], [0]]], phase=[0, 0, 1])
    assert summarise(trace)["repeat_rate"]["1"] == 1.0
    assert summarise(trace)["repeat_rate"]["2"] == 1.0


def test_nothing_computed():
    found = summarise(tiny([[[-1]]]))
    assert found["entropy"]["mean"] is None
    assert found["top_share"]["10%"] is None
    assert found["accesses"] == 0


def test_one_expert_and_many_labels():
    trace = make_trace(lengths=(1,) * 30, experts=1, top_k=1, predictions=None)
    found = summarise(replace(trace, token_ids=None))
    assert found["entropy"]["mean"] == 1.0
    assert found["labels"]["id"] == {"distinct": 30}


@pytest.mark.public_traces
def test_public_trace(public):
    found = summarise(import_trace(public / "gpt-oss-20b.npz"))
    assert found["accesses"] == 8_875_488
    assert found["repeat_rate"]["1"] == pytest.approx(0.438, abs=0.001)
    assert found["repeat_rate_by_chance"] == 0.125

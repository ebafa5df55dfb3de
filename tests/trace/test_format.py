"""The trace file: what goes in comes out, byte for byte, and nothing hostile gets through."""

import json
import re
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from trace_samples import make_trace, same

from hotset.errors import HotsetError, TraceError
from hotset.trace import Trace

FORMATS = Path(__file__).parents[2] / "docs/reference/formats.md"


def header_of(path):
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    return json.loads(json.loads(raw[8 : 8 + size])["__metadata__"]["hotset"])


def rewrite(path, header=None, text=None, tensors=None):
    """Save the file again with some part of it replaced."""
    arrays = {**load_file(path), **(tensors or {})}
    body = text if text is not None else json.dumps({**header_of(path), **(header or {})})
    save_file({k: v for k, v in arrays.items() if v is not None}, path, {"hotset": body})


@pytest.fixture
def path(tmp_path, trace):
    trace.save(tmp_path / "t.safetensors")
    return tmp_path / "t.safetensors"


@pytest.mark.parametrize("experts", [2, 8, 254, 255, 256, 300, 1000])
def test_round_trip(tmp_path, experts):
    trace = make_trace(experts=experts)
    trace.experts[0, 0, 0] = -1
    trace.save(tmp_path / "t")
    assert same(Trace.load(tmp_path / "t"), trace)


def test_round_trip_of_the_least(tmp_path, trace):
    bare = replace(trace, weights=None, token_ids=None, predictions=None, labels=(), meta={})
    bare.save(tmp_path / "t")
    assert same(Trace.load(tmp_path / "t"), bare)


def test_bytes_are_stable(tmp_path, trace, path):
    again = replace(trace, meta=dict(reversed(trace.meta.items())))
    again.save(tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == path.read_bytes()
    Trace.load(path).save(tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == path.read_bytes()


def test_views_and_strided_arrays_are_saved_right(tmp_path, trace):
    part = trace.take(slice(None, None, 2))
    part.save(tmp_path / "t")
    assert same(Trace.load(tmp_path / "t"), part)


def test_a_failed_save_leaves_nothing(tmp_path, trace):
    with pytest.raises(HotsetError, match="does the folder exist"):
        trace.save(tmp_path / "no" / "t")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"version": 2}, "upgrade hotset"),
        ({"version": True}, "upgrade hotset"),
        ({"version": "1" * 500}, "upgrade hotset"),
        ({"kind": "profile"}, "is a hotset 'profile', not a trace"),
        ({"shape": None}, "shape"),
        ({"shape": {"layers": 3, "experts": 8}}, "shape"),
        ({"shape": {"layers": 3, "experts": 8, "top_k": True}}, "whole numbers"),
        ({"shape": {"layers": 3, "experts": 8, "top_k": 2, "expert_bytes": 1e9}}, "whole numbers"),
        ({"shape": {"layers": 3, "experts": 8, "top_k": 2, "expert_bytes": -5}}, "of at least 1"),
        ({"shape": {"layers": 3, "experts": 10**30, "top_k": 2}}, "experts"),
        ({"shape": {"layers": 4, "experts": 8, "top_k": 2}}, "as the header says"),
        ({"shape": {"layers": 3, "experts": 4, "top_k": 2}}, "out of range"),
        ({"labels": 5}, "labels"),
        ({"labels": [{}]}, "1 labels for 3 requests"),
        ({"labels": [{"a": 1}] * 3}, "map names to text"),
        ({"labels": [[]] * 3}, "map names to text"),
        ({"meta": {"a": None}}, "map names to text"),
        ({"meta": {"a": "\ud800"}}, "not valid Unicode"),
    ],
)
def test_header_faults(path, header, message):
    rewrite(path, header)
    with pytest.raises(TraceError, match=message) as caught:
        Trace.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "[" * 200_000, "1" * 5000, '{"kind": "trace"}'])
def test_metadata_rubbish(path, text):
    rewrite(path, text=text)
    with pytest.raises(TraceError, match="not a hotset trace"):
        Trace.load(path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"step": None}, "lacks the tensor 'step'"),
        ({"extra": np.zeros(15)}, "'extra' that format 1 does not know"),
        ({"phase": np.zeros(15, np.int8)}, "stored as I8, not U8"),
        ({"phase": np.full(15, 9, np.uint8)}, "phase is 9"),
        ({"phase": np.zeros(14, np.uint8)}, "disagree on the number of tokens"),
        ({"step": np.arange(15, 0, -1, dtype=np.int32)}, "step falls"),
        ({"request": np.full(15, 2, np.int32)}, "no gaps"),
        ({"request": np.full(15, -2, np.int32)}, "no gaps"),
        ({"request": np.full(15, 2**31 - 1, np.int32)}, "no gaps"),
        ({"experts": np.zeros((15, 3, 2), np.uint8)}, "same expert twice"),
        ({"experts": np.full((15, 3, 2), 40000, np.uint16)}, "beyond 32767"),
        ({"experts": np.zeros((), np.uint8)}, "disagree"),
        ({"experts": np.zeros((0, 3, 2), np.uint8)}, "disagree"),
        ({"weights": np.full((15, 3, 2), np.nan, np.float16)}, "weight is negative"),
        ({"weights": np.full((15, 3, 3), 1, np.float16)}, "weights has shape"),
        ({"guesses": np.full((15, 3, 2), 1, np.uint8)}, "predictions has shape"),
        ({"guesses": np.full((15, 3, 2, 2), 99, np.uint8)}, "predicted expert 99"),
    ],
)
def test_tensor_faults(path, tensors, message):
    rewrite(path, tensors=tensors)
    with pytest.raises(TraceError, match=message):
        Trace.load(path)


def test_claimed_shapes_allocate_nothing(path):
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    layout = json.loads(raw[8 : 8 + size])
    layout["experts"]["shape"] = [2**40, 3, 2]
    text = json.dumps(layout).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match="damaged"):
            Trace.load(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_other_files(tmp_path):
    with pytest.raises(TraceError, match="no such trace"):
        Trace.load(tmp_path / "none")
    with pytest.raises(TraceError):
        Trace.load(tmp_path)
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(TraceError, match="damaged"):
        Trace.load(tmp_path / "empty")


@pytest.mark.parametrize(("fraction", "seed"), [(0, 0), (1, 0), (float("nan"), 0), (float("inf"), 0), (0.5, -1)])
def test_split_faults(trace, fraction, seed):
    with pytest.raises(TraceError):
        trace.split(fraction, seed)


def test_select_names_an_unknown_request(trace):
    with pytest.raises(TraceError, match="no request 3: the trace has 0 to 2"):
        trace.select([0, 3])


def test_the_writer_in_the_documentation_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", FORMATS.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, "docs/reference/formats.md", "exec"), {})  # noqa: S102 - our own documentation
    found = Trace.load("example.safetensors")
    assert found.tokens == 5
    assert found.requests == 2
    assert found.steps == 3
    found.save("again.safetensors")
    assert same(Trace.load("again.safetensors"), found)

"""Whatever bytes a reader is given, it answers with a trace or a TraceError, in little time and memory."""

import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from foreign_traces import PUBLIC, csv_text, json_rows, json_text, write_npz
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trace_samples import make_trace

from hotset.errors import HotsetError, TraceError
from hotset.shape import ModelShape
from hotset.trace import Trace
from hotset.trace.importers import import_trace

PEAK_PER_BYTE = 12  # of the file, or of what a packed file may unpack to
PEAK_SPARE = 16 << 20
MAX_SECONDS = 20.0  # of the processor: a busy machine does not count
KINDS = ("safetensors", "npz", "csv", "jsonl")
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def read(kind, path):
    return Trace.load(path) if kind == "safetensors" else import_trace(path, kind=kind)


def attempt(kind, data, growth=1):
    """Read the bytes as a file of this kind; anything but a trace or a HotsetError is a fault."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"x.{kind}"
        path.write_bytes(data)
        start = time.process_time()
        tracemalloc.start()
        try:
            read(kind, path)
        except HotsetError as error:
            assert "\n" not in str(error)  # noqa: PT017 - no error at all is fine as well
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert time.process_time() - start < MAX_SECONDS
        assert peak <= PEAK_PER_BYTE * growth * len(data) + PEAK_SPARE


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder, trace = tmp_path_factory.mktemp("samples"), make_trace()
    trace.save(folder / "a.safetensors")
    write_npz(folder / "a.npz", trace)
    (folder / "a.csv").write_text(csv_text(trace))
    header = {"hotset": {"layers": 3, "experts": 8, "top_k": 2}}
    (folder / "a.jsonl").write_text(json_text([header, *json_rows(trace)]))
    found = {kind: (folder / f"a.{kind}").read_bytes() for kind in KINDS}
    for kind, data in found.items():
        attempt(kind, data)
    return found


@pytest.mark.parametrize("kind", KINDS)
@FUZZ
@given(data=st.binary(max_size=2000))
def test_any_bytes(kind, data):
    attempt(kind, data)


@FUZZ
@given(text=st.text("0123456789,.-+enaif#_ x\n", max_size=300))
def test_any_rows(text):
    columns = "turn,phase,step,layer,slot,expert,weight\n"
    attempt("csv", (columns + text).encode())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEYS = ("request", "step", "layer", "experts", "weights", "phase", "token", "token_id")


@FUZZ
@given(changes=st.lists(st.dictionaries(st.sampled_from((*KEYS, "hotset")), VALUES, max_size=4), max_size=4))
def test_any_objects(changes):
    base = {"request": 0, "layer": 0, "experts": [0, 1]}
    rows = [{**base, "step": i, **change} for i, change in enumerate(changes)]
    attempt("jsonl", json_text(rows).encode())


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation(samples, kind):
    data = samples[kind]
    for end in range(0, len(data), max(1, len(data) // 120)):
        attempt(kind, data[:end])


@pytest.mark.parametrize("kind", KINDS)
@FUZZ
@given(flips=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 7)), min_size=1, max_size=4))
def test_flipped_bits(samples, kind, flips):
    data = bytearray(samples[kind])
    for place, bit in flips:
        data[place % len(data)] ^= 1 << bit
    attempt(kind, bytes(data), growth=64 if kind == "npz" else 1)


@pytest.mark.parametrize("kind", KINDS)
@FUZZ
@given(place=st.integers(0, 1 << 20), new=st.binary(max_size=12), gone=st.integers(0, 12))
def test_replaced_bytes(samples, kind, place, new, gone):
    data = samples[kind]
    at = place % len(data)
    attempt(kind, data[:at] + new + data[at + gone :], growth=64 if kind == "npz" else 1)


@pytest.mark.public_traces
@pytest.mark.parametrize("name", ["qwen3-30b-a3b_short.npz", "gpt-oss-20b.npz"])
def test_damaged_public_traces(name):
    if not PUBLIC.is_dir():
        pytest.skip("the public traces are not beside this checkout")
    data = (PUBLIC / name).read_bytes()
    rng = np.random.default_rng(0)
    attempt("npz", data)
    for end in rng.integers(0, len(data), 4):
        attempt("npz", data[:end])
    directory = data.rfind(b"PK\x01\x02", 0, len(data)) - 200
    for low in (0, directory):
        for _ in range(4):
            damaged = bytearray(data)
            damaged[rng.integers(low, low + 200 if low == 0 else len(data))] ^= 1 << rng.integers(8)
            attempt("npz", bytes(damaged))


ARRAYS = st.sampled_from(
    [
        None,
        [1, 2],
        "text",
        np.zeros(()),
        np.zeros(0, np.int16),
        np.zeros(15, np.int32),
        np.full(15, 7, np.int32),
        np.full(15, -9, np.int32),
        np.arange(15, 0, -1, dtype=np.int32),
        np.full(15, 9, np.uint8),
        np.zeros((15, 3, 2), np.int16),
        np.full((15, 3, 2), 99, np.int16),
        np.full((15, 3, 2), -7, np.int16),
        np.zeros((0, 3, 2), np.int16),
        np.full((15, 3, 2), np.nan, np.float16),
        np.full((15, 3, 2), -1, np.float16),
        np.full((15, 3, 0, 1), 0, np.int16),
        np.full((15, 3, 1, 1), 9, np.int16),
        np.array([{}] * 15, object),
    ]
)
FIELDS = ("experts", "request", "step", "phase", "weights", "token_ids", "guesses")
TEXTS = st.sampled_from([(), None, 3, ({},) * 3, ({"a": 1},) * 3, ({"\udc00": "a"},) * 3, [{}], {}, {"a": "b"}])


@settings(FUZZ, max_examples=300)
@given(
    arrays=st.dictionaries(st.sampled_from(FIELDS), ARRAYS, max_size=3),
    texts=st.dictionaries(st.sampled_from(["labels", "meta"]), TEXTS, max_size=2),
    shape=st.sampled_from([ModelShape(3, 8, 2), ModelShape(3, 4, 2), ModelShape(1, 1, 1)]),
)
def test_any_parts(arrays, texts, shape):
    try:
        trace = replace(make_trace(), shape=shape, **arrays, **texts)
    except TraceError:
        return
    trace.events()

"""Whatever bytes a reader is given, it answers with a trace or a TraceError, in little time and memory."""

import io
import pickle
import pickletools
import struct
import time
import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from examples import examples
from foreign_traces import (
    PUBLIC,
    csv_text,
    json_rows,
    json_text,
    llama_text,
    token_text,
    vllm_responses,
    write_flame,
    write_npz,
    write_sglang,
)
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
KINDS = ("safetensors", "npz", "csv", "jsonl", "vllm", "sglang", "llama_csv", "token_csv")
PACKED = {"npz": 64, "sglang": 64}  # how many times its size a file may unpack to
FUZZ = settings(max_examples=examples(15, 60), deadline=None, suppress_health_check=list(HealthCheck))


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


class Samples(dict):
    """A file of each kind; what hypothesis prints of a failing test stays short, else it fails by its own warning."""

    def __repr__(self):
        return f"samples of {', '.join(self)}"


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder, trace = tmp_path_factory.mktemp("samples"), make_trace()
    pytest.importorskip("torch")
    trace.save(folder / "a.safetensors")
    write_npz(folder / "a.npz", trace)
    (folder / "a.csv").write_text(csv_text(trace))
    header = {"hotset": {"layers": 3, "experts": 8, "top_k": 2}}
    (folder / "a.jsonl").write_text(json_text([header, *json_rows(trace)]))
    responses = [*vllm_responses(trace), *vllm_responses(trace, encoded=True)]
    (folder / "a.vllm").write_text(json_text(responses))
    write_sglang(folder / "a.sglang", trace)
    (folder / "a.llama_csv").write_text(llama_text(trace))
    (folder / "a.token_csv").write_text(token_text(trace))
    found = Samples((kind, (folder / f"a.{kind}").read_bytes()) for kind in KINDS)
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


@FUZZ
@given(text=st.text("0123456789,.-+enaif#_ x\n", max_size=300), kind=st.sampled_from(["llama_csv", "token_csv"]))
def test_any_rows_of_other_tools(text, kind):
    attempt(kind, ("" if kind == "llama_csv" else "request,token,layer,expert\n").encode() + text.encode())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
RECORDED = ("records", "forward_pass_id", "input_ids", "positions", "topk_ids_of_layer", "forward_mode")
CODES = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes] + [
    b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n", b"ctorch\nIntStorage\n",
    b"X\x07\x00\x00\x00storage", b"X\x01\x00\x00\x000", b"X\x03\x00\x00\x00cpu", b"K\x01", b"q\x01", b"h\x01",
]  # fmt: skip
KEYS = ("request", "step", "layer", "experts", "weights", "phase", "token", "token_id")


@FUZZ
@given(changes=st.lists(st.dictionaries(st.sampled_from((*KEYS, "hotset")), VALUES, max_size=4), max_size=4))
def test_any_objects(changes):
    base = {"request": 0, "layer": 0, "experts": [0, 1]}
    rows = [{**base, "step": i, **change} for i, change in enumerate(changes)]
    attempt("jsonl", json_text(rows).encode())


@FUZZ
@given(grid=st.text("0123456789,- [[[]]]", max_size=60), more=st.dictionaries(st.text(max_size=9), VALUES, max_size=3))
def test_any_responses(grid, more):
    """Nested lists that are none, and responses with anything in them."""
    for text in (f"[[[{grid}]]]", f"[{grid}]", grid):
        attempt("vllm", f'{{"choices": [{{"routed_experts": {text}}}]}}'.encode())
    response = {"choices": [{"routed_experts": [[[1, 2]]]} | more], "usage": more} | more
    attempt("vllm", json_text([response]).encode())


PICKLED = st.recursive(
    st.none() | st.integers(-3, 9) | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from(RECORDED) | st.text(max_size=3) | st.integers(0, 3), inner, max_size=5)
    ),
    max_leaves=12,
)


@FUZZ
@given(value=PICKLED, wrapped=st.booleans(), protocol=st.integers(0, 5))
def test_any_pickles(value, wrapped, protocol):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps({"records": [value]} if wrapped else value, protocol))
    attempt("sglang", file.getvalue())


@FUZZ
@given(program=st.lists(st.sampled_from(CODES) | st.binary(min_size=1, max_size=3), max_size=40))
def test_any_instructions(program):
    """Programs of pickle's own instructions, in any order."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + b"".join(program) + b".")
    attempt("sglang", file.getvalue())


def test_damaged_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    data = write_flame(tmp_path, make_trace()).read_bytes()
    rng = np.random.default_rng(0)
    for end in range(0, len(data), len(data) // 4):
        attempt("flame", data[:end])
    for _ in range(12):
        damaged = bytearray(data)
        for place in rng.integers(len(data) - 900, len(data), 3):
            damaged[place] ^= 1 << rng.integers(8)
        attempt("flame", bytes(damaged), growth=64)


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation(samples, kind):
    data = samples[kind]
    for end in range(0, len(data), max(1, len(data) // examples(30, 120))):
        attempt(kind, data[:end])


@pytest.mark.parametrize("kind", KINDS)
@FUZZ
@given(flips=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 7)), min_size=1, max_size=4))
def test_flipped_bits(samples, kind, flips):
    data = bytearray(samples[kind])
    for place, bit in flips:
        data[place % len(data)] ^= 1 << bit
    attempt(kind, bytes(data), growth=PACKED.get(kind, 1))


@pytest.mark.parametrize("kind", PACKED)
def test_lengths_that_lie(samples, kind):
    """The archive's own list claims up to 4 GiB of packed bytes for each of its members in turn."""
    data, places = samples[kind], []
    while (at := samples[kind].find(b"PK\x01\x02", places[-1] + 1 if places else 0)) >= 0:
        places.append(at)
    assert places
    for at in places:
        for size in (struct.pack("<I", len(data) + 1), struct.pack("<I", 1 << 30), b"\xfe\xff\xff\xff"):
            attempt(kind, data[: at + 20] + size + data[at + 24 :], growth=PACKED[kind])


@pytest.mark.parametrize("kind", KINDS)
@FUZZ
@given(place=st.integers(0, 1 << 20), new=st.binary(max_size=12), gone=st.integers(0, 12))
def test_replaced_bytes(samples, kind, place, new, gone):
    data = samples[kind]
    at = place % len(data)
    attempt(kind, data[:at] + new + data[at + gone :], growth=PACKED.get(kind, 1))


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
FIELDS = ("experts", "request", "step", "phase", "weights", "token_ids", "predictions")
TEXTS = st.sampled_from([(), None, 3, ({},) * 3, ({"a": 1},) * 3, ({"\udc00": "a"},) * 3, [{}], {}, {"a": "b"}])


@settings(FUZZ, max_examples=examples(100, 300))
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

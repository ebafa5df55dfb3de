"""Whatever a profile file holds, reading it gives a profile or one line of ProfileError, in little memory."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profile_samples import full_profile

from hotset.errors import ProfileError
from hotset.profile import Profile
from hotset.profile.format import check_kind
from hotset.profile.statistics import History, Mark
from hotset.report.usage import layer_figures, totals
from hotset.trace.synth import SynthConfig, synthesise

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
PEAK_SPARE_BYTES = 4 << 20


def bytes_of(profile: Profile) -> bytes:
    with TemporaryDirectory() as folder:
        profile.save(Path(folder) / "p.safetensors")
        return (Path(folder) / "p.safetensors").read_bytes()


SAMPLE = bytes_of(full_profile())


def parts(data: bytes = SAMPLE) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The list of tensors, the header of hotset, and the content."""
    (size,) = struct.unpack("<Q", data[:8])
    tensors = json.loads(data[8 : 8 + size])
    header = json.loads(tensors.pop("__metadata__")["hotset"])
    return tensors, header, data[8 + size :]


def file_of(tensors: dict[str, Any], header: Any, content: bytes, *, raw: bool = False) -> bytes:
    text = header if raw else json.dumps(header)
    whole = json.dumps({"__metadata__": {"hotset": text}, **tensors}).encode()
    return struct.pack("<Q", len(whole)) + whole + content


def attempt(data: bytes) -> str | None:
    """Read it and use all of it; the message if it is refused, and any other exception is a fault."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "p.safetensors"
        path.write_bytes(data)
        tracemalloc.start()
        message = read(path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 12 * len(data) + PEAK_SPARE_BYTES
        assert message is None or (str(path) in message and message.isprintable() and len(message) < 700)
        return message


def read(path: Path) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            use(Profile.load(path))
    except ProfileError as error:
        return str(error)
    return None


def use(profile: Profile) -> None:
    """What a damaged profile that was let in must survive."""
    statistics = profile.statistics()
    figures = totals(statistics)
    assert min(figures["loads"], figures["loaded_bytes"]) >= 0
    assert np.isfinite(profile.hotness()).all()
    layer_figures(statistics, [0], 2)
    assert (np.diff(profile.history.tokens) >= 0).all()


def refused(data: bytes, message: str) -> None:
    found = attempt(data)
    assert found is not None
    assert message in found


def test_the_sample_is_sound() -> None:
    assert attempt(SAMPLE) is None
    assert attempt(file_of(*parts())) is None


@FUZZ
@given(data=st.binary(max_size=2000))
def test_any_bytes(data: bytes) -> None:
    assert attempt(data) is not None


@FUZZ
@given(flips=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 7)), min_size=1, max_size=4))
def test_flipped_bits(flips: list[tuple[int, int]]) -> None:
    data = bytearray(SAMPLE)
    for place, bit in flips:
        data[place % len(data)] ^= 1 << bit
    attempt(bytes(data))


@FUZZ
@given(place=st.integers(0, 1 << 20), new=st.binary(max_size=12), gone=st.integers(0, 12))
def test_replaced_bytes(place: int, new: bytes, gone: int) -> None:
    at = place % len(SAMPLE)
    attempt(SAMPLE[:at] + new + SAMPLE[at + gone :])


def test_every_truncation() -> None:
    for end in range(0, len(SAMPLE), 37):
        assert attempt(SAMPLE[:end]) is not None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
KEYS = tuple(parts()[1])


@FUZZ
@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
def test_any_value_in_the_header(changes: dict[str, Any]) -> None:
    tensors, header, content = parts()
    attempt(file_of(tensors, header | changes, content))


@FUZZ
@given(key=st.sampled_from(KEYS), inner=st.text(max_size=6), value=VALUES)
def test_any_value_one_level_down(key: str, inner: str, value: Any) -> None:
    tensors, header, content = parts()
    old = header[key]
    if isinstance(old, dict):
        for name in (*old, inner):
            attempt(file_of(tensors, header | {key: old | {name: value}}, content))
    elif isinstance(old, list):
        attempt(file_of(tensors, header | {key: [*old, value]}, content))


@FUZZ
@given(value=VALUES)
def test_any_header(value: Any) -> None:
    tensors, _, content = parts()
    assert attempt(file_of(tensors, value, content)) is not None


DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I8", "U64", "U8", "BOOL", "C64", "F4", "X")
SIDES = st.lists(st.sampled_from((0, 1, 2, 3, 8, 1 << 20, 1 << 40, 1 << 62)), max_size=6)


@FUZZ
@given(name=st.sampled_from((*parts()[0], "learnt.new", "new")), dtype=st.sampled_from(DTYPES), sides=SIDES)
def test_any_tensor(name: str, dtype: str, sides: list[int]) -> None:
    tensors, header, content = parts()
    old = tensors.get(name, {"data_offsets": [len(content), len(content)]})
    attempt(file_of(tensors | {name: old | {"dtype": dtype, "shape": sides}}, header, content))


@pytest.mark.parametrize("dtype", ["BOOL", "BF16", "F8_E4M3", "C64"])
def test_learning_must_be_plain_numbers(dtype: str) -> None:
    tensors, header, content = parts()
    size = {"BOOL": 1, "BF16": 2, "F8_E4M3": 1, "C64": 8}[dtype]
    odd = {"dtype": dtype, "shape": [1], "data_offsets": [len(content), len(content) + size]}
    refused(file_of(tensors | {"learnt.odd": odd}, header, content + bytes(size)), f"stored as {dtype}")


def test_learning_of_too_many_sides() -> None:
    tensors, header, content = parts()
    odd = {"dtype": "F32", "shape": [1] * 70, "data_offsets": [len(content), len(content) + 4]}
    refused(file_of(tensors | {"learnt.odd": odd}, header, content + bytes(4)), "larger than anything")


def test_a_giant_shape_allocates_nothing() -> None:
    tensors, header, content = parts()
    for giant in ({"layers": 4096, "experts": 256}, {"layers": 10**9}, {"experts": 10**4000}):
        refused(file_of(tensors, header | {"shape": header["shape"] | giant}, content), "")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"kind":' * 100_000, "1" * 5000, "", "nul", '"\\ud800"'])
def test_text_that_is_no_header(text: str) -> None:
    tensors, _, content = parts()
    refused(file_of(tensors, text, content, raw=True), "not a hotset profile")


def test_a_very_long_header_is_not_read() -> None:
    tensors, _, content = parts()
    refused(file_of(tensors, "[" + "[]," * 2_000_000 + "[]]", content, raw=True), "header is longer")


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ([[5, "b"], [4, "a"]], "not in the order"),
        ([[5, "x" * 201]], "at most 200 letters"),
        ([[-1, "x"]], "pairs"),
        ([[True, "x"]], "pairs"),
        ([[10**30, "x"]], "pairs"),
        ([[1]], "pairs"),
        ([[1, "x"]] * 5000, "pairs"),
        ({"1": "x"}, "pairs"),
    ],
)
def test_bad_marks(marks: Any, message: str) -> None:
    tensors, header, content = parts()
    refused(file_of(tensors, header | {"marks": marks}, content), message)


@pytest.mark.parametrize("word", ["two\nlines", "\x1b[2J", "x" * 201, "\ud800"])
def test_words_that_would_spoil_a_message(word: str) -> None:
    tensors, header, content = parts()
    mark = {"architecture": word, "digest": ""}
    refused(file_of(tensors, header | {"fingerprint": mark}, content), "not printable")
    refused(file_of(tensors, header | {"created": word}, content), "not printable")


def patched(name: str, value: float) -> bytes:
    """The sample with the first number of a tensor replaced."""
    tensors, header, content = parts()
    begin, dtype = tensors[name]["data_offsets"][0], tensors[name]["dtype"]
    new = struct.pack("<d" if dtype == "F64" else "<q", value)
    return file_of(tensors, header, content[:begin] + new + content[begin + 8 :])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("uses", float("nan"), "no number"),
        ("uses", float("inf"), "far too large"),
        ("uses", -1.0, "negative"),
        ("uses", 1e308, "far too large"),
        ("tokens", -1, "negative"),
        ("hits", -1, "negative"),
        ("misses", (1 << 63) - 1, "far too large"),
        ("history", -1, "negative"),
        ("history", (1 << 63) - 1, "far too large"),
        ("learnt.mean.rates", float("nan"), "no number"),
    ],
)
def test_numbers_that_cannot_be(name: str, value: float, message: str) -> None:
    refused(patched(name, value), message)


def test_bytes_beyond_any_machine() -> None:
    tensors, header, _ = parts()
    shape = header["shape"] | {"expert_bytes": (1 << 60) - 1}
    refused(file_of(tensors, header | {"shape": shape}, parts()[2]), "more bytes than any machine")


def test_names_of_tensors_cannot_steer_a_terminal() -> None:
    tensors, header, content = parts()
    odd = {"dtype": "F32", "shape": [1], "data_offsets": [3, 7]}
    refused(file_of(tensors | {"learnt.\x1b[2J\n" + "x" * 5000: odd}, header, content), "damaged")
    odd["data_offsets"] = [len(content), len(content) + 4]
    refused(file_of(tensors | {"\x1b[2J\n" + "x" * 5000: odd}, header, content + bytes(4)), "does not know")


def test_a_newer_format_says_upgrade() -> None:
    tensors, header, content = parts()
    refused(file_of(tensors, header | {"version": 2}, content), "upgrade hotset")
    refused(file_of(tensors, header | {"version": True}, content), "upgrade hotset")


def test_what_is_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty").touch()
    for name in ("", "pipe", "loop", "gone", "empty", "none", "x" * 300, "a\0b", "empty/below"):
        for reader in (Profile.load, check_kind):
            with pytest.raises(ProfileError) as caught:
                reader(tmp_path / name)
            assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    full_profile().save(path)
    path.chmod(0)
    with pytest.raises(ProfileError, match="you may read"):
        Profile.load(path)


def test_a_trace_is_told_apart(tmp_path: Path) -> None:
    synthesise(SynthConfig(layers=2, experts=8, top_k=2, requests=1)).save(tmp_path / "t.safetensors")
    for reader in (Profile.load, check_kind):
        with pytest.raises(ProfileError, match="a trace, not a profile: hotset profile make"):
            reader(tmp_path / "t.safetensors")


def test_marks_before_any_span_are_kept() -> None:
    assert attempt(bytes_of(full_profile(history=History(np.zeros((0, 3), np.int64), (Mark(0, "start"),))))) is None

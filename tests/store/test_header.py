"""Safetensors headers, true and false: what they promise is checked before a byte is believed."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from hotset.errors import StoreError
from hotset.store.header import read_header


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_tensors_are_found_where_the_library_wrote_them(tmp_path: Path) -> None:
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4, dtype=np.uint16)}
    save_file(tensors, tmp_path / "t.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "t.safetensors")
    content = (tmp_path / "t.safetensors").read_bytes()
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        stored = found[name]
        assert (stored.shape, stored.dtype) == (tensor.shape, str(tensor.dtype))
        assert content[stored.offset : stored.offset + stored.size_bytes] == tensor.tobytes()


def test_a_truncated_file_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    path = write(tmp_path / "t.safetensors", {"a": entry()}, bytes(24))
    read_header(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"is truncated: it has .* copy or download"):
        read_header(path)


@pytest.mark.parametrize("kept", [0, 3, 7, 8, 20])
def test_a_file_cut_within_its_header_is_no_safetensors_file(tmp_path: Path, kept: int) -> None:
    path = write(tmp_path / "t.safetensors", {"a": entry()}, bytes(24))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(StoreError, match="not a valid safetensors file"):
        read_header(path)


@pytest.mark.parametrize("length", [1 << 63, 2**64 - 1, 101 << 20, 10_000])
def test_a_header_that_claims_the_world_is_not_read(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "t.safetensors", {"a": entry()}, bytes(24), length)
    with pytest.raises(StoreError, match=f"claims {length:,} bytes"):
        read_header(path)


@pytest.mark.parametrize(
    "header",
    [
        b"{", b"\xff\xfe{}", b"[" * 100_000, b"9" * 10_000, [], 3, None, "text",
        {"a": 3}, {"a": None}, {"a": {}}, {"a": entry(dtype="F31")}, {"a": entry(dtype=["F32"])},
        {"a": entry(shape=3)}, {"a": entry(shape=(-2, -3))}, {"a": entry(shape=(2, 2.9))}, {"a": entry(shape=(2, "3"))},
        {"a": entry(shape=(2, 4))}, {"a": entry(shape=(True, 6))}, {"a": entry(shape=(2**62, 2**62))},
        {"a": entry(offsets=(24, 0))}, {"a": entry(offsets=(-24, 0))}, {"a": entry(offsets=(0, 24, 48))},
        {"a": entry(offsets=("0", "24"))}, {"a": entry(offsets=(0.0, 24.0))}, {"a": entry(offsets=None)},
    ],
    ids=lambda header: repr(header)[:50],
)  # fmt: skip
def test_headers_that_cannot_be_true_are_refused(tmp_path: Path, header: Any) -> None:
    with pytest.raises(StoreError, match=r"t\.safetensors is not a valid safetensors file: .*again"):
        read_header(write(tmp_path / "t.safetensors", header, bytes(64)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot read .*gone\.safetensors"):
        read_header(tmp_path / "gone.safetensors")


@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_give_tensors_or_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, length: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(struct.pack("<Q", length) + data)
    with suppress(StoreError):
        read_header(path)

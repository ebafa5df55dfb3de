"""Files that are no traces, where a trace is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from calls import call

pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"request,token,layer,expert\n0,0,0,3\n", "is text"),
        (b'\xef\xbb\xbf{"layers": 3}\n', "is JSON"),
        (b"[" * 9000, "is JSON"),
        (b"PK\x03\x04" + bytes(40), "is a zip archive, as .npz and .pt files are,"),
        (b"PAR1" + bytes(40), "is a parquet file"),
        (b"\x93NUMPY\x01\x00" + bytes(40), "is an array of numpy"),
        ("è".encode() * 4095, "is text"),  # the last letter read is cut in two
    ],
)
def test_a_foreign_file_names_the_way_to_import_it(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "routes.dat"
    path.write_bytes(data)
    for command in (("trace", "info"), ("analyze",), ("simulate",)):
        error = call(*command, path).error
        assert f"{path} {words.rstrip(',')}" in error
        assert f"hotset trace import {path} -o TRACE.safetensors" in error


@pytest.mark.parametrize("data", [b"", b"\x40\x00\x00\x00\x00\x00\x00\x00{}", bytes(99), b"\xff" * 99])
def test_a_damaged_trace_is_not_taken_for_a_foreign_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t.safetensors").write_bytes(data)
    assert "copy or record it again" in call("trace", "info", tmp_path / "t.safetensors").error

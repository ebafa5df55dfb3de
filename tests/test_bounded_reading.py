"""Bad files cost little memory, and what is no file is refused instead of waited for."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from hotset.errors import HotsetError
from hotset.generation.prompt_files import read_prompts, read_text
from hotset.models.load import load
from hotset.profile import Profile
from hotset.reading import TooLargeError, lines_of, open_regular, parse_bounded, read_bounded
from hotset.store.header import read_header
from hotset.store.packed import open_packed
from hotset.trace import Trace
from hotset.trace.importers import import_trace

LISTS = 120 << 20  # bytes of "[],"
HEADER = 90 << 20

# Runs each reader under a limit of memory; what is not refused in one line shows as a traceback.
CHILD = """
import resource, sys
from pathlib import Path
from hotset.errors import HotsetError
from hotset.generation.prompt_files import read_prompts
from hotset.profile import Profile
from hotset.store.header import read_header
from hotset.store.index import read_index
from hotset.trace import Trace
from hotset.trace.importers import import_trace

here = Path(sys.argv[1])
readers = {".csv": import_trace, ".jsonl": import_trace, ".trace": Trace.load, ".prompts.json": read_prompts,
           ".profile": Profile.load, ".safetensors": read_header, ".experts.json": read_index}
import numpy, numba, safetensors.numpy
most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sorted(here.iterdir()):
    read = next((readers[end] for end in readers if path.name.endswith(end)), None)
    if read is None:
        continue
    try:
        read(path)
    except HotsetError as error:
        assert "\\n" not in str(error), error
    else:
        raise SystemExit(f"{path.name} was taken for a sound file")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most) // 1024
    print(path.name, grown, "MiB", flush=True)
    if grown > 700:
        raise SystemExit(f"{path.name} took {grown} MiB")
"""


def sparse(path: Path, start: bytes = b"") -> None:
    path.write_bytes(start)
    os.truncate(path, 8 << 30)


def lists(path: Path, start: bytes = b"[", end: bytes = b"[]]", size: int = LISTS) -> None:
    path.write_bytes(start + b"[]," * (size // 3) + end)


def with_header(path: Path, header: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def metadata_header(kind: str, key: str) -> bytes:
    """A header of 90 MB: a document of hotset's with a list of empty labels."""
    document = f'{{"kind": "{kind}", "version": 1, "{key}": [{"{}, " * (HEADER // 4)}{{}}]}}'
    return b'{"__metadata__": {"hotset": ' + json.dumps(document).encode() + b"}}"


def test_bad_files_take_little_memory(tmp_path: Path) -> None:
    sparse(tmp_path / "a.csv")
    sparse(tmp_path / "b.csv", b"turn,phase,step,layer,slot,expert\n")
    sparse(tmp_path / "c.jsonl")
    sparse(tmp_path / "d.jsonl", b'{"hotset": {}}\n')
    lists(tmp_path / "e.experts.json")
    lists(tmp_path / "f.experts.json", size=LISTS // 2)
    with_header(tmp_path / "g.trace", metadata_header("trace", "labels"))
    with_header(tmp_path / "h.profile", metadata_header("profile", "marks"))
    with_header(tmp_path / "i.safetensors", b'{"a": [' + b"[]," * (HEADER // 3) + b"[]]}")
    with_header(tmp_path / "j.safetensors", b'{"a": [' + b"[]," * (HEADER // 6) + b"[]]}")
    lists(tmp_path / "k.prompts.json")
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 11


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_file_is_refused_and_not_waited_for(kind: str, tmp_path: Path) -> None:
    def odd(name: str) -> Path:
        path = tmp_path / name
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero")
        return path

    calls = [
        lambda: Trace.load(odd("a.safetensors")),
        lambda: import_trace(odd("a.csv")),
        lambda: import_trace(odd("a.npz")),
        lambda: import_trace(odd("a.jsonl")),
        lambda: import_trace(odd("a")),
        lambda: Profile.load(odd("b.safetensors")),
        lambda: read_header(odd("c.safetensors")),
        lambda: read_text(odd("a.txt")),
        lambda: read_prompts(odd("b.json")),
        lambda: open_packed(odd("experts.json").parent),
    ]
    for call in calls:
        with pytest.raises(HotsetError) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_model_folder_with_a_pipe_in_it_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(HotsetError, match=r"model\.safetensors is a pipe or a device"):
        load(str(tmp_path), memory="50%")


def test_lines_are_cut_where_they_are_too_long(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"ab\n" + b"x" * 100 + b"\ncd")
    with open_regular(path) as file:
        assert [len(line) for line in lines_of(file, 10)][:2] == [3, 11]


def test_documents_are_counted_before_they_are_made(tmp_path: Path) -> None:
    assert parse_bounded(b'{"a": [1, 2]}', values=2, containers=2) == {"a": [1, 2]}
    for document in (b'{"a": [1, 2, 3]}', b"[[[]]]"):
        with pytest.raises(TooLargeError):
            parse_bounded(document, values=2, containers=2)
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bounded(tmp_path / "a", 5) == b"12345"
    with pytest.raises(TooLargeError, match="larger than 4 bytes"):
        read_bounded(tmp_path / "a", 4)

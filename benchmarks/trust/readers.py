"""Mutated files through every reader of traces, profiles, packs and checkpoint headers: read, or refused in one line.

Each case is one file of a random kind, changed in bytes or in structure, read in a child process under a limit of
memory; what is read is used as well. A traceback, a crash, a hang or more memory than the limit is a fault.

    python benchmarks/trust/readers.py --count 3000 --seed 0
"""

from __future__ import annotations

import json
import os
import random
import struct
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "tests"
sys.path[:0] = [str(HERE), *(str(TESTS / name) for name in ("trace", "profile", "store"))]

from children import run  # noqa: E402
from foreign_traces import (  # noqa: E402
    csv_text,
    json_rows,
    json_text,
    llama_text,
    token_text,
    vllm_responses,
    write_npz,
    write_sglang,
)
from profile_samples import full_profile  # noqa: E402
from store_samples import forge, write_pack  # noqa: E402
from trace_samples import make_trace  # noqa: E402

from hotset.cache import Controller, SlotPlan  # noqa: E402
from hotset.cache.learning import prime  # noqa: E402
from hotset.errors import HotsetError  # noqa: E402
from hotset.generation.prompt_files import read_prompts  # noqa: E402
from hotset.policies import parse  # noqa: E402
from hotset.profile import Profile  # noqa: E402
from hotset.sim import Sweep, simulate  # noqa: E402
from hotset.store.header import read_header  # noqa: E402
from hotset.store.packed import open_packed  # noqa: E402
from hotset.trace import Trace  # noqa: E402
from hotset.trace.importers import import_trace  # noqa: E402

MEMORY_BYTES = 3 << 30
SPARSE_BYTES = (1 << 20, 1 << 32, 8 << 30)
NUMBERS = (0, -1, 1, 2, 7, 255, 256, 32767, 65535, 2**31 - 1, 2**31, 2**53, 2**63, 10**30, 0.5, -0.0, 1e308)
WORDS = ("", "x", "pool", "U8", "F64", "BF16", "../up", "\x1b[31m", "\ud800", "é" * 40, "run.slots", "9" * 60)
OTHERS = (None, True, [], {}, [[]], {"a": {}}, [None], [1, 2, 3], float("nan"), float("inf"))


ROWS: dict[str, Callable[[Trace], str]] = {"llama_csv": llama_text, "token_csv": token_text}


def sample(kind: str, folder: Path) -> Path:
    """A sound file of a kind."""
    path, trace = folder / f"a.{kind}", make_trace()
    if kind == "trace":
        trace.save(path)
    elif kind == "npz":
        write_npz(path, trace)
        path.with_suffix(".requests.json").write_text(json.dumps([{"a": "b"}] * trace.requests))
    elif kind == "csv":
        path.write_text(csv_text(trace))
    elif kind == "jsonl":
        path.write_text(json_text([{"hotset": {"layers": 3, "experts": 8, "top_k": 2}}, *json_rows(trace)]))
    elif kind == "vllm":
        path.write_text(json_text([*vllm_responses(trace), *vllm_responses(trace, encoded=True)]))
    elif kind == "sglang":
        write_sglang(path, trace)
    elif kind in ROWS:
        path.write_text(ROWS[kind](trace))
    elif kind in ("profile", "header"):
        full_profile().save(path)
    elif kind == "pack":
        write_pack(folder / "pack")
        return folder / "pack" / "experts.json"
    else:
        path = folder / "a.json"
        path.write_text(
            json.dumps({"prompts": ["one", {"prompt": "two", "topic": "x"}, {"text": "three", "labels": {"a": 1}}]})
        )
    return path


def use_trace(trace: Trace) -> None:
    """Replay what was read: it passed all checks, so compiled loops must stand it."""
    simulate({"t": trace}, Sweep(policies=["lru"], budgets=["50%"], fit=0.5))


def use_profile(path: Path) -> None:
    """Start a cache from what was read."""
    profile = Profile.load(path)
    shape = profile.shape
    prime(Controller(SlotPlan(shape, shape.total_experts), parse("blend")), profile)


READERS: dict[str, Callable[[Path], object]] = {
    "trace": lambda path: use_trace(Trace.load(path)),
    "npz": lambda path: use_trace(import_trace(path, kind="npz")),
    "csv": lambda path: use_trace(import_trace(path, kind="csv")),
    "jsonl": lambda path: use_trace(import_trace(path, kind="jsonl")),
    **{
        kind: lambda path, kind=kind: use_trace(import_trace(path, kind=kind))
        for kind in ("vllm", "sglang", "llama_csv", "token_csv")
    },
    "profile": use_profile,
    "header": read_header,
    "pack": lambda path: open_packed(path.parent),
    "prompts": read_prompts,
}


@cache
def originals(kind: str) -> bytes:
    """The bytes of the sound file."""
    with tempfile.TemporaryDirectory() as folder:
        return sample(kind, Path(folder)).read_bytes()


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flip, cut, repeat, insert or exchange some bytes."""
    way, at = rng.randrange(7), rng.randrange(len(data))
    size = rng.choice((1, 2, 8, 64, 4096))
    if way == 0:
        return data[:at]
    if way == 1:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if way == 2:
        return data[:at] + data[at : at + size] * rng.choice((2, 9, 300)) + data[at + size :]
    if way == 3:
        return data[:at] + rng.randbytes(size) + data[at + rng.choice((0, size)) :]
    if way == 4:
        other = rng.randrange(len(data))
        return data[:at] + data[other : other + size] + data[at + size :]
    if way == 5:
        return data[:at] + rng.choice((b"\n", b",", b"-", b"e9", b"[", b'"', b"\x00" * 9, b"9" * 5000)) + data[at:]
    return rng.choice((b"", b"\x00" * size, rng.randbytes(size), data * 2))


def change_document(document: Any, rng: random.Random) -> Any:
    """Exchange, remove, rename, nest or repeat something within a document."""
    place, key = document, None
    while isinstance(place, dict | list) and place:
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        if not isinstance(place[key], dict | list) or not place[key] or rng.random() < 0.3:
            break
        place = place[key]
    if key is None or not isinstance(place, dict | list):
        return rng.choice((*NUMBERS, *OTHERS))
    way = rng.randrange(6)
    if way == 0:
        del place[key]
    elif way == 1 and isinstance(place, dict):
        place[rng.choice(WORDS)] = place.pop(key)
    elif way == 2:
        place[key] = [place[key]] * rng.choice((1, 2, 1000))
    elif way == 3 and isinstance(place[key], int | float):
        place[key] = place[key] + rng.choice((-1, 1, 8, 2**32))
    else:
        place[key] = rng.choice((*NUMBERS, *WORDS, *OTHERS))
    return document


def change_header(data: bytes, rng: random.Random) -> bytes:
    """Change the header of a safetensors file, or hotset's own within it, and keep the rest."""
    (size,) = struct.unpack("<Q", data[:8])
    header, content = json.loads(data[8 : 8 + size]), data[8 + size :]
    if rng.random() < 0.6:
        own = change_document(json.loads(header["__metadata__"]["hotset"]), rng)
        header["__metadata__"]["hotset"] = json.dumps(own)
    else:
        header = change_document(header, rng)
    whole = json.dumps(header).encode()
    length = len(whole) if rng.random() < 0.95 else rng.choice((0, 1, len(whole) + 9, 2**31, 2**63))
    return (
        struct.pack("<Q", length) + whole + (content if rng.random() < 0.9 else content[: rng.randrange(len(content))])
    )


def change_lines(data: bytes, rng: random.Random) -> bytes:
    """Change one line of JSON, or one cell of a table."""
    lines = data.decode().splitlines()
    at = rng.randrange(len(lines))
    if lines[at].startswith("{"):
        lines[at] = json.dumps(change_document(json.loads(lines[at]), rng))
    else:
        cells = lines[at].split(",")
        cells[rng.randrange(len(cells))] = str(rng.choice((*NUMBERS, *WORDS[:6], "nan", "1_0", " 1")))
        lines[at] = ",".join(cells)
    if rng.random() < 0.2:
        lines.insert(rng.randrange(len(lines)), lines[at])
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")


def mutated(kind: str, path: Path, rng: random.Random) -> None:
    """Write a changed version of a sound file in its place."""
    data = originals(kind)
    structured = rng.random() < 0.65
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if structured and kind in ("trace", "profile", "header"):
            data = change_header(originals(kind), rng)
        elif structured and kind in ("csv", "jsonl", "vllm", *ROWS):
            data = change_lines(originals(kind), rng)
        elif structured and kind in ("pack", "prompts"):
            data = json.dumps(change_document(json.loads(originals(kind)), rng)).encode()
        elif data:
            data = change_bytes(data, rng)
    path.write_bytes(data)
    if structured and kind == "pack" and rng.random() < 0.7 and isinstance(document := json.loads(data), dict):
        forge(path, document)
    if kind == "npz" and rng.random() < 0.3:
        path.with_suffix(".requests.json").write_bytes(change_bytes(b'[{"a": "b"}, {}, {"c": 1}]', rng))
    if rng.random() < 0.02:
        os.truncate(path, rng.choice(SPARSE_BYTES))


def case(seed: int) -> str:
    """One file; a fault of its writer is none of its reader."""
    rng = random.Random(seed)  # noqa: S311 - chance, not secrets
    kind = rng.choice(list(READERS))
    with tempfile.TemporaryDirectory() as folder:
        path = sample(kind, Path(folder))
        mutated(kind, path, rng)
        try:
            READERS[kind](path)
        except HotsetError as error:
            error.kind = kind  # type: ignore[attr-defined]
            raise
    return kind


if __name__ == "__main__":
    run(Path(__file__).resolve(), case, "trust_readers", MEMORY_BYTES, __doc__ or "")

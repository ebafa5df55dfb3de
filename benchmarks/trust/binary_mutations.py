"""Mutated files of weights: other headers for safetensors and GGUF files, which say what tensors are and where."""

from __future__ import annotations

import json
import random
import struct

from mutations import OTHERS, WORDS

SIZES = (0, 1, 2, 3, 7, 31, 32, 33, 255, 1 << 16, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 62, (1 << 64) - 1)
DTYPES = ("F32", "BF16", "F16", "F8_E4M3", "F8_E8M0", "I32", "I64", "U8", "I8", "BOOL", "F4", "", "f32")
AS_LARGE = (
    ("F8_E4M3", "F8_E5M2", "F8_E8M0", "U8", "I8", "BOOL"), ("BF16", "F16", "I16", "U16"), ("F32", "I32", "U32"),
)  # fmt: skip
"""Types whose numbers take as many bytes: a header that lies so is well formed."""
HEADS, TAIL_BYTES = 2048, 1 << 13
"""Most of a GGUF file's header is its tokenizer: its first bytes are what a model is, and its last ones the tensors."""


def safetensors_file(original: bytes, rng: random.Random) -> bytes:
    """A safetensors file with another header: entries changed, taken out, renamed, or any bytes."""
    (length,) = struct.unpack("<Q", original[:8])
    if rng.random() < 0.15:
        return _cut(original, 8 + length, rng)
    header = json.loads(original[8 : 8 + length])
    for _ in range(rng.choice((1, 1, 2, 20))):
        _entry(header, rng)
    text = json.dumps(header).encode()
    if rng.random() < 0.05:
        return struct.pack("<Q", rng.choice(SIZES)) + text + original[8 + length :]
    return struct.pack("<Q", len(text)) + text + original[8 + length :]


def _entry(header: dict[str, object], rng: random.Random) -> None:
    """Change one tensor's entry; the scales of codes as often as all others together."""
    names = [name for name in header if name != "__metadata__"]
    beside = [name for name in names if not name.endswith("weight")]
    name = rng.choice(beside if beside and rng.random() < 0.5 else names)
    entry: dict[str, list[int]] = header[name]  # type: ignore[assignment]
    way = rng.choice((0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 5, 5, 5, 6))
    if way == 0:
        del header[name]
    elif way == 1:
        header[name.replace("scale", rng.choice(("zero", "scales", "g_idx")))] = header.pop(name)
    elif way == 2 and isinstance(entry, dict):
        alike = next((group for group in AS_LARGE if entry["dtype"] in group), DTYPES)  # type: ignore[comparison-overlap]
        header[name] = entry | {"dtype": rng.choice(DTYPES if rng.random() < 0.2 else alike)}
    elif way == 3 and isinstance(entry, dict) and entry["shape"]:  # as many numbers, cut up otherwise
        header[name] = entry | {"shape": [*reversed(entry["shape"])] if rng.random() < 0.5 else [1, *entry["shape"]]}
    elif way == 4 and isinstance(entry, dict):
        header[name] = entry | {"data_offsets": [rng.choice(SIZES), rng.choice(SIZES)]}
    elif way == 5 and isinstance(entry, dict):  # another tensor's bytes
        header[name] = entry | {key: header[rng.choice(names)].get(key) for key in ("shape", "data_offsets", "dtype")}  # type: ignore[attr-defined]
    else:
        header[name] = rng.choice((*OTHERS, *WORDS))


def gguf_file(original: bytes, rng: random.Random) -> bytes:
    """A GGUF file whose header has other numbers or bytes: counts, types, lengths, shapes, offsets."""
    end = _gguf_header_bytes(original)
    if rng.random() < 0.1:
        return _cut(original, end, rng)
    data = bytearray(original)
    for _ in range(rng.choice((1, 1, 2, 5))):
        first, last = rng.choice(((0, 64), (0, HEADS), (end - TAIL_BYTES, end), (end - TAIL_BYTES, end), (0, end)))
        at = rng.randrange(first, last - 8)
        way = rng.randrange(4)
        if way == 0:
            data[at : at + 8] = struct.pack("<Q", rng.choice(SIZES))
        elif way == 1:
            data[at : at + 4] = struct.pack("<I", rng.choice(SIZES) & 0xFFFFFFFF)
        elif way == 2:
            data[at] = rng.randrange(256)
        else:
            data[at] ^= 1 << rng.randrange(8)
    return bytes(data)


def _gguf_header_bytes(data: bytes) -> int:
    """Where a file's tensors begin, found by the name of the last one that its header has."""
    return data.rindex(b"blk.7.") + 64


def _cut(original: bytes, header_bytes: int, rng: random.Random) -> bytes:
    """A file that ends within its header or its data, or with other bytes somewhere in the header."""
    way = rng.randrange(3)
    if way == 0:
        return original[: rng.randrange(header_bytes)]
    if way == 1:
        return original[: rng.randrange(header_bytes, len(original))]
    at = rng.randrange(header_bytes - 8)
    return original[:at] + rng.randbytes(8) + original[at + 8 :]

"""The header of a GGUF file: read as it was written, or refused in a line, whatever it claims."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import pytest

from hotset.errors import StoreError
from hotset.store.gguf import GgufHeader, read_gguf, read_header, read_list, shard_names

ALIGNED = 32


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(
    keys: list[bytes], tensors: list[bytes], *, version: int = 3, counts: tuple[int, int] | None = None
) -> bytes:
    claimed = counts or (len(tensors), len(keys))
    data = b"GGUF" + struct.pack("<IQQ", version, *claimed) + b"".join(keys) + b"".join(tensors)
    return data + bytes(-len(data) % ALIGNED)


KEYS = [
    key("general.architecture", 8, text("qwen3moe")),
    key("qwen3moe.block_count", 4, struct.pack("<I", 2)),
    key("qwen3moe.rope.freq_base", 6, struct.pack("<f", 1e6)),
    key("some.flag", 7, b"\x01"),
    key("some.list", 9, struct.pack("<IQ3i", 5, 3, 1, 2, 3)),
    key("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 5000) + b"".join(text(f"t{i}") for i in range(5000))),
    key("tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, 5000) + bytes(20000)),
]
TENSORS = [tensor("blk.0.ffn_down_exps.weight", (64, 4, 3), 2, 0), tensor("norm.weight", (7,), 0, 448)]
DATA = bytes(448 + 28)


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return written(tmp_path / "a.gguf", header(KEYS, TENSORS) + DATA)


def test_a_header_is_read(sound: Path) -> None:
    found = read_gguf(sound)
    assert found.architecture == "qwen3moe"
    assert found.keys["some.list"] == [1, 2, 3]
    assert found.keys["some.flag"] is True
    assert found.keys["tokenizer.ggml.tokens"] == 5000
    assert read_list(sound, found.lists["tokenizer.ggml.tokens"])[-1] == "t4999"
    blocks, norm = found.tensors.values()
    assert (blocks.shape, blocks.type.name, blocks.size_bytes) == ((3, 4, 64), "Q4_0", 3 * 4 * 2 * 18)
    assert norm.offset + norm.size_bytes == sound.stat().st_size


LIES = {
    "no magic": b"GGML" + bytes(64),
    "empty": b"",
    "version": header(KEYS, TENSORS, version=9) + DATA,
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 2, 7) + bytes(64),
    "tensors": header(KEYS, TENSORS, counts=(1 << 60, 7)) + DATA,
    "keys": header(KEYS, TENSORS, counts=(2, 1 << 60)) + DATA,
    "long text": header([key("a", 8, struct.pack("<Q", 1 << 62))], []),
    "long list": header([key("a", 9, struct.pack("<IQ", 4, 1 << 61))], []),
    "long list of texts": header([key("a", 9, struct.pack("<IQ", 8, 1 << 61))], []),
    "list of lists": header([key("a", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 4, 0))], []),
    "foreign value": header([key("a", 77, b"")], []),
    "no text": header([key("a", 8, struct.pack("<Q", 2) + b"\xff\xfe")], []),
    "key twice": header([key("a", 7, b"\0")] * 2, []),
    "alignment": header([key("general.alignment", 4, struct.pack("<I", 0))], []),
    "alignment of another type": header([key("general.alignment", 8, text("32"))], []),
    "foreign type": header(KEYS, [tensor("a", (32,), 4, 0)]) + DATA,
    "tensor twice": header(KEYS, [tensor("a", (32,), 0, 0), tensor("a", (32,), 0, 128)]) + DATA,
    "dimensions": header(KEYS, [tensor("a", (1,) * 5, 0, 0)]) + DATA,
    "no dimensions": header(KEYS, [tensor("a", (), 0, 0)]) + DATA,
    "zero": header(KEYS, [tensor("a", (0, 4), 0, 0)]) + DATA,
    "whole blocks": header(KEYS, [tensor("a", (40, 4), 2, 0)]) + DATA,
    "beyond the end": header(KEYS, [tensor("a", (32, 4), 2, 1 << 40)]) + DATA,
    "huge": header(KEYS, [tensor("a", (1 << 62, 1 << 62, 1 << 62), 0, 0)]) + DATA,
    "unaligned": header(KEYS, [tensor("a", (4,), 0, 8)]) + DATA,
    "a type of fewer bytes": header(KEYS, [tensor("a", (64, 12), 0, 0), tensor("b", (7,), 0, 864)]) + DATA,
    "a gap": header(KEYS, [tensor("a", (64,), 0, 0), tensor("b", (7,), 0, 288)]) + bytes(316),
    "a gap at the start": header(KEYS, [tensor("a", (7,), 0, 32)]) + bytes(60),
    "bytes after the last": header(KEYS, TENSORS) + DATA + bytes(37),
    "bytes and no tensor": header(KEYS, []) + bytes(1),
    "over each other": header(KEYS, [tensor("a", (64,), 0, 0), tensor("b", (64,), 0, 32)]) + DATA,
}


@pytest.mark.parametrize("name", LIES)
def test_what_cannot_be_is_refused(name: str, tmp_path: Path) -> None:
    file = written(tmp_path / "a.gguf", LIES[name])
    tracemalloc.start()
    try:
        with pytest.raises(StoreError) as caught:
            read_header(file)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert str(file) in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_lie_about_a_type_or_a_shape_is_named(tmp_path: Path) -> None:
    """Whatever takes fewer bytes than the 864 that were written, in any order of the header; and the last tensor."""
    data = bytes(864 + 28)
    for kind, shape in ((2, (64, 4, 3)), (8, (64, 4, 3)), (1, (3, 6, 6)), (8, (32, 4, 3))):
        entries = [tensor("norm.weight", (7,), 0, 864), tensor("experts", shape, kind, 0)]
        for tensors in (entries, entries[::-1]):
            with pytest.raises(StoreError, match=r"between 'experts' of .* and 'norm\.weight' belong to no tensor"):
                read_header(written(tmp_path / "a.gguf", header(KEYS, tensors) + data))
    entries = [tensor("norm.weight", (7,), 1, 448), TENSORS[0]]
    file = written(tmp_path / "a.gguf", header(KEYS, entries) + bytes(448 + 64))
    with pytest.raises(StoreError, match=r"between 'norm\.weight' of F16 and the end of the file"):
        read_header(file)


@pytest.mark.parametrize("alignment", [32, 64, 4096])
def test_padding_is_no_gap(alignment: int, tmp_path: Path) -> None:
    """Tensors in another order than the header's, padded as writers do, with and without padding at the end."""
    keys = [*KEYS, key("general.alignment", 4, struct.pack("<I", alignment))]
    step = -(-448 // alignment) * alignment
    entries = [tensor("b", (7,), 0, step), tensor("a", (64, 4, 3), 2, 0)]
    data = header(keys, entries)
    data += bytes(-len(data) % alignment) + bytes(step)
    for after in (28, alignment):
        assert set(read_header(written(tmp_path / "a.gguf", data + bytes(after))).tensors) == {"a", "b"}
    with pytest.raises(StoreError, match="belong to no tensor"):
        read_header(written(tmp_path / "a.gguf", data + bytes(alignment + 1)))


def test_every_truncation(sound: Path, tmp_path: Path) -> None:
    data = sound.read_bytes()
    for length in [*range(400), *range(400, len(data), 997), len(data) - 1]:
        with pytest.raises(StoreError):
            read_header(written(tmp_path / "b.gguf", data[:length]))


def test_any_bytes(tmp_path: Path) -> None:
    """Mutated headers are read or refused, in little memory, and a tensor never lies beyond the file."""
    rng = random.Random(5)  # noqa: S311 - it is for tests
    data = header([*KEYS[:5], key("more", 9, struct.pack("<IQ", 8, 1) + text("t"))], TENSORS) + DATA
    said: set[str] = set()
    interesting = [0, 1, 0x7F, 0x80, 0xFF]
    tracemalloc.start()
    for _ in range(2000):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 2, 8))):
            at = rng.randrange(len(data) - len(DATA))
            changed[at] = rng.choice(interesting) if rng.random() < 0.7 else rng.randrange(256)
        file = written(tmp_path / "b.gguf", bytes(changed))
        try:
            found: GgufHeader = read_header(file)
        except StoreError as error:
            said.add(str(error))
            continue
        assert all(t.offset + t.size_bytes <= len(changed) for t in found.tensors.values())
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert len(said) > 20
    assert all(line.isprintable() for line in said)


def test_shards(tmp_path: Path) -> None:
    assert shard_names("a.gguf") == ["a.gguf"]
    names = shard_names("a-00002-of-00003.gguf")
    assert names == [f"a-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    counted = [*KEYS, key("split.tensors.count", 5, struct.pack("<i", 4))]
    bare = header([], [tensor("norm.weight", (7,), 0, 0)]) + bytes(28)
    for name, data in zip(names, (header(counted, TENSORS[:1]) + bytes(448), bare), strict=False):
        written(tmp_path / name, data)
    with pytest.raises(StoreError, match="give the first"):
        read_gguf(tmp_path / names[1])
    with pytest.raises(StoreError, match=r"00003-of-00003\.gguf is not beside"):
        read_gguf(tmp_path / names[0])
    written(tmp_path / names[2], bare)
    with pytest.raises(StoreError, match=r"norm.weight is in .*00002"):
        read_gguf(tmp_path / names[0])
    written(tmp_path / names[2], header([], [tensor("other", (7,), 0, 0)]) + bytes(28))
    with pytest.raises(StoreError, match="have 3 tensors, and should have 4"):
        read_gguf(tmp_path / names[0])
    written(tmp_path / names[2], header([], [tensor(n, (7,), 0, o) for n, o in (("x", 0), ("y", 32))]) + bytes(60))
    assert list(read_gguf(tmp_path / names[0]).tensors) == ["blk.0.ffn_down_exps.weight", "norm.weight", "x", "y"]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "a.gguf")
    with pytest.raises(StoreError, match="regular file"):
        read_header(tmp_path / "a.gguf")

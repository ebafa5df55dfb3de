"""The header of a GGUF file: what it says of its model, and where every tensor's blocks lie.

Nothing that a header says is believed before it was compared with the file: a count, a length or an offset beyond it is
a StoreError, and long lists, such as a vocabulary, are counted and passed over.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from hotset.errors import StoreError
from hotset.reading import open_regular
from hotset.store.layout import round_up

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 256 << 20
MAX_KEYS, MAX_TENSORS, MAX_ELEMENTS = 1 << 16, 1 << 18, 1 << 22
"""Of one file: keys, tensors, and elements of all lists together; a large vocabulary has a million with its merges."""
MAX_TEXT_BYTES = 4 << 20
MAX_NAME_BYTES = 1024
MAX_DIMENSIONS = 4
MAX_SHARDS = 1024
KEPT_ELEMENTS = 1 << 12
"""A list with more is known by its length alone."""
ALIGNMENT = "general.alignment"

_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_NUMBERS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_TEXT, _LIST = 8, 9
_CHUNK_BYTES = 1 << 20


class BlockType(NamedTuple):
    """A type of tensor: so many weights of a row, next to each other, take so many bytes."""

    name: str
    weights: int
    size_bytes: int


TYPES = {
    0: BlockType("F32", 1, 4), 1: BlockType("F16", 1, 2), 2: BlockType("Q4_0", 32, 18), 3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22), 7: BlockType("Q5_1", 32, 24), 8: BlockType("Q8_0", 32, 34),
    9: BlockType("Q8_1", 32, 40), 10: BlockType("Q2_K", 256, 84), 11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144), 13: BlockType("Q5_K", 256, 176), 14: BlockType("Q6_K", 256, 210),
    15: BlockType("Q8_K", 256, 292), 16: BlockType("IQ2_XXS", 256, 66), 17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98), 19: BlockType("IQ1_S", 256, 50), 20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110), 22: BlockType("IQ2_S", 256, 82), 23: BlockType("IQ4_XS", 256, 136),
    24: BlockType("I8", 1, 1), 25: BlockType("I16", 1, 2), 26: BlockType("I32", 1, 4), 27: BlockType("I64", 1, 8),
    28: BlockType("F64", 1, 8), 29: BlockType("IQ1_M", 256, 56), 30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54), 35: BlockType("TQ2_0", 256, 66), 39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36), 41: BlockType("Q1_0", 128, 18),
}  # fmt: skip
"""The types that ggml numbers."""

BLOCKS = {kind.name: kind for kind in TYPES.values() if kind.weights > 1}
"""Types of more than one weight to a block, by name."""

PLAIN = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64", "I8": "int8", "I16": "int16",
    "I32": "int32", "I64": "int64",
}  # fmt: skip
"""Types of plain numbers, and what they are called elsewhere."""


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """One tensor: its type, its shape with the inputs last, and its bytes counted from the start of the file."""

    file: Path
    name: str
    type: BlockType
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


class LongList(NamedTuple):
    """Where a long list lies in the first file, and what it is of."""

    offset: int
    kind: int
    elements: int


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says of itself, or several that make up a model."""

    files: tuple[Path, ...]
    keys: dict[str, Any]  # a long list is its length
    tensors: dict[str, BlockTensor] = field(default_factory=dict)
    lists: dict[str, LongList] = field(default_factory=dict)  # the long ones

    @property
    def architecture(self) -> str:
        """What llama.cpp calls the family of the model."""
        found = self.keys.get("general.architecture")
        if not isinstance(found, str):
            raise StoreError(f"{self.files[0]} does not say of which architecture its model is: give the first shard")
        return found


def read_gguf(path: Path) -> GgufHeader:
    """All that the shards of a model say; the first, or the only one, is given."""
    headers = [read_header(file) for file in shards_of(path)]
    tensors: dict[str, BlockTensor] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise StoreError(_damaged(header.files[0], f"{name} is in {tensors[name].file.name}, too"))
            tensors[name] = tensor
    first = headers[0]
    wanted = first.keys.get("split.tensors.count")
    if len(headers) > 1 and isinstance(wanted, int) and wanted != len(tensors):
        raise StoreError(
            f"the {len(headers)} shards of {path} have {len(tensors):,} tensors, and should have {wanted:,}: they are "
            "of different models; download them again"
        )
    return GgufHeader(tuple(header.files[0] for header in headers), first.keys, tensors, first.lists)


def shards_of(path: Path) -> list[Path]:
    """All files of a model by the name of the first; a shard that is not there is an error."""
    names = shard_names(path.name)
    if path.name != names[0]:
        raise StoreError(f"{path} is one of {len(names)} shards: give the first, {names[0]}")
    files = [path.with_name(name) for name in names]
    if missing := [file.name for file in files[1:] if not file.is_file()]:
        raise StoreError(f"{missing[0]} is not beside {path}: a model of {len(names)} shards needs all of them")
    return files


def shard_names(name: str) -> list[str]:
    """The names of all shards of a model, given one of them; a name that is not that of a shard stands for itself."""
    found = _SHARD.search(name)
    count = int(found[2]) if found else 0
    if found is None or not 1 <= count <= MAX_SHARDS:
        return [name]
    return [f"{name[: found.start()]}-{number:05d}-of-{found[2]}.gguf" for number in range(1, count + 1)]


def read_header(path: Path) -> GgufHeader:
    """The header of one file; one that cannot be, or whose tensors lie beyond its end, raises StoreError."""
    try:
        with open_regular(path) as file:
            return _Reader(path, file).header()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error


def read_list(path: Path, place: LongList) -> list[Any]:
    """The values of a long list of a header that was read before."""
    with open_regular(path) as file:
        reader = _Reader(path, file)
        reader.skip(place.offset)
        return [reader.value(place.kind) for _ in range(place.elements)]


class _Reader:
    """Reads a header from its start to its end, and no further."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self.file = path, file
        self.size = os.fstat(file.fileno()).st_size
        self.at = self.elements = 0

    def header(self) -> GgufHeader:
        if self.take(4) != MAGIC:
            raise StoreError(f"{self.path} is not a GGUF file: it does not begin with {MAGIC.decode()}")
        version = self.number("<I")
        if version not in VERSIONS:
            raise StoreError(f"{self.path} is GGUF of version {version}: hotset reads versions 2 and 3, little-endian")
        tensors, keys = self.number("<Q"), self.number("<Q")
        # A key has 13 bytes at least, and a tensor 32.
        self.check(keys <= min(MAX_KEYS, self.left // 13), f"it claims {keys:,} keys")
        self.check(tensors <= min(MAX_TENSORS, self.left // 32), f"it claims {tensors:,} tensors")
        found, lists = self.keys(keys)
        entries = [self.entry() for _ in range(tensors)]
        return GgufHeader((self.path,), found, self.placed(entries, found), lists)

    @property
    def left(self) -> int:
        return min(self.size, MAX_HEADER_BYTES) - self.at

    def check(self, right: bool, why: str) -> None:
        if not right:
            raise StoreError(_damaged(self.path, why))

    def take(self, count: int) -> bytes:
        self.check(count <= self.left, f"its header needs more bytes than {self.at + self.left:,}")
        data = self.file.read(count)
        self.check(len(data) == count, "it is truncated")
        self.at += count
        return data

    def skip(self, count: int) -> None:
        self.check(count <= self.left, f"its header needs more bytes than {self.at + self.left:,}")
        self.file.seek(count, os.SEEK_CUR)
        self.at += count

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self, most: int) -> str:
        length = self.number("<Q")
        self.check(length <= most, f"it has a text of {length:,} bytes")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise StoreError(_damaged(self.path, "it has a text that is no UTF-8")) from error

    def keys(self, count: int) -> tuple[dict[str, Any], dict[str, LongList]]:
        found: dict[str, Any] = {}
        lists: dict[str, LongList] = {}
        for _ in range(count):
            key = self.text(MAX_NAME_BYTES)
            self.check(key not in found, f"it has {key!r:.80} twice")
            value = self.value(self.number("<I"))
            if isinstance(value, LongList):
                lists[key], value = value, value.elements
            found[key] = value
        return found, lists

    def value(self, kind: int) -> Any:
        """A value; of a list that is longer than is kept, where it lies."""
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _TEXT:
            return self.text(MAX_TEXT_BYTES)
        self.check(kind == _LIST, f"it has a value of type {kind}, which there is not")
        kind, count = self.number("<I"), self.number("<Q")
        self.check(kind in _NUMBERS or kind == _TEXT, f"it has a list of type {kind}, which hotset does not read")
        least = struct.calcsize(_NUMBERS[kind]) if kind in _NUMBERS else 8
        self.elements += count
        self.check(count <= self.left // least and self.elements <= MAX_ELEMENTS, f"it has a list of {count:,} values")
        if count <= KEPT_ELEMENTS:
            return [self.value(kind) for _ in range(count)]
        place = LongList(self.at, kind, count)
        if kind in _NUMBERS:
            self.skip(count * least)
        else:
            self.pass_texts(count)
        return place

    def pass_texts(self, count: int) -> None:
        """Pass over texts: of a vocabulary there are hundreds of thousands, and a read for each would take a second."""
        base = at = self.at
        data, end = b"", self.at + self.left
        for _ in range(count):
            if at + 8 > base + len(data):
                self.file.seek(at)
                base, data = at, self.file.read(_CHUNK_BYTES)
                self.check(len(data) >= 8, "it is truncated")
            at += 8 + int.from_bytes(data[at - base : at - base + 8], "little")
            if at > end:
                raise StoreError(_damaged(self.path, f"its header needs more bytes than {end:,}"))
        self.file.seek(at)
        self.at = at

    def entry(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        name = self.text(MAX_NAME_BYTES)
        dimensions = self.number("<I")
        self.check(1 <= dimensions <= MAX_DIMENSIONS, f"{name!r:.80} has {dimensions} dimensions")
        shape = tuple(self.number("<Q") for _ in range(dimensions))[::-1]
        number, offset = self.number("<I"), self.number("<Q")
        self.check(number in TYPES, f"{name!r:.80} is of type {number}, which hotset does not know")
        kind = TYPES[number]
        self.check(all(shape), f"{name!r:.80} is {list(shape)}")
        self.check(shape[-1] % kind.weights == 0, f"{name!r:.80} is {list(shape)}, and {kind.name} has {kind.weights}")
        return name, shape, kind, offset

    def placed(self, entries: Sequence[tuple[str, tuple[int, ...], BlockType, int]], keys: Any) -> dict[str, Any]:
        """The tensors where they lie: within the file, one after another."""
        alignment = keys.get(ALIGNMENT, 32)
        sound = type(alignment) is int and 8 <= alignment <= 1 << 20 and alignment % 8 == 0
        self.check(sound, f"its {ALIGNMENT} is {alignment!r:.40}")
        start = round_up(self.at, alignment)
        found: dict[str, BlockTensor] = {}
        for name, shape, kind, offset in entries:
            self.check(name not in found, f"it has {name!r:.80} twice")
            self.check(offset % alignment == 0, f"{name!r:.80} begins at {offset:,}, which is not aligned")
            size = math.prod(shape) // kind.weights * kind.size_bytes
            found[name] = BlockTensor(self.path, name, kind, shape, start + offset, size)
        self.check_gaps(sorted(found.values(), key=lambda each: each.offset), start, alignment)
        return found

    def check_gaps(self, tensors: Sequence[BlockTensor], start: int, alignment: int) -> None:
        """Refuse tensors over each other, and bytes that belong to none but fill up to the alignment.

        A type or a shape that is not the one written takes other bytes than those that are there: nothing else shows
        it. llama.cpp refuses such offsets as well; that it wants them in the order of the header is no matter here.
        """
        end, last = start, ""
        for tensor in tensors:
            wanted = round_up(end, alignment)
            self.check(tensor.offset >= wanted, f"{tensor.name!r:.80} lies over another tensor")
            self.check(tensor.offset == wanted, _unexplained(last, tensor.offset - wanted, f"{tensor.name!r:.80}"))
            end, last = tensor.offset + tensor.size_bytes, f"{tensor.name!r:.80} of {tensor.type.name}"
        if end > self.size and tensors:
            raise StoreError(
                f"{self.path} is truncated: it has {self.size:,} of {end:,} bytes; copy or download the file again"
            )
        spare = self.size - round_up(end, alignment)
        self.check(spare <= 0, _unexplained(last, spare, "the end of the file"))


def _unexplained(last: str, count: int, before: str) -> str:
    """What is said of bytes that no tensor takes."""
    where = f"between {last} and {before}" if last else f"before {before}"
    lies = ", so that its header lies of a type or a shape" if last else ""
    return f"{count:,} bytes {where} belong to no tensor{lies}"


def _damaged(path: Path, why: str) -> str:
    return f"{path} is not a valid GGUF file: {why}; copy or download it again"

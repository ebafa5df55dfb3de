"""`experts.json`: what a packed store says about itself, written once and believed only after every claim is checked.

The seal tells an edited file from a written one; a forged one still meets the checks of every single claim.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from hotset.errors import StoreError
from hotset.reading import TooLargeError, parse_bounded, read_bounded
from hotset.store.digest import DIGEST_BYTES, new_digest
from hotset.store.layout import ITEM_BYTES, Matrix, Part, SlotLayout
from hotset.store.plan import PackLayer, PackPlan

FORMAT, VERSION = "hotset-pack", 1
ENCODED_VERSION = 2
"""Of packs with matrices that are not plain numbers: a hotset that knows of none must not read them."""
MAX_INDEX_BYTES = 64 << 20
MAX_CONTAINERS, MAX_VALUES = 1 << 18, 1 << 22
"""Of the document: a digest for each of a million experts, and some lists for each of 4,096 layers."""
MAX_BYTES = 1 << 60
MAX_DIMENSIONS = 8
MAX_NAME = 200
"""Letters of the name of a weight format, with its options."""
CHUNK_BYTES = 8 << 20
"""How much of a file with weights one digest covers, beside that of the whole file."""
FIGURES = ("kl_mean", "kl_p99", "same_top", "perplexity", "packed_perplexity")
"""What quality consists of: of the divergence of each token from the original, the share of tokens for which both
expect the same token most, and the perplexity of both."""
REMEDY = "pack the model again with hotset pack"

FileDigest = tuple[int, bytes]
"""The size and the digest of a file."""


@dataclass(frozen=True, slots=True)
class PackIndex:
    """A pack: its plan, the digests of its blocks [layers][experts], and those of its other files.

    Packs of earlier versions have neither `chunks` nor `small`.
    """

    plan: PackPlan
    digests: list[list[bytes]]
    files: dict[str, FileDigest] = field(default_factory=dict)  # with weights
    chunks: dict[str, list[bytes]] = field(default_factory=dict)  # of the same files, to check them in threads
    small: dict[str, FileDigest] = field(default_factory=dict)  # config, tokenizer, templates, code
    quality: dict[str, Any] | None = None  # how far it is from its original, where that was measured

    def to_bytes(self) -> bytes:
        """The document, sealed."""
        document = plan_document(self.plan) | {"files": {n: self._file_entry(n) for n in sorted(self.files)}}
        document["small"] = {n: _entry(f) for n, f in sorted(self.small.items())}
        if self.quality is not None:
            document["quality"] = self.quality
        for layer, digests in zip(document["layers"], self.digests, strict=True):
            layer["digests"] = [digest.hex() for digest in digests]
        return (json.dumps(document | {"seal": seal_of(document)}, indent=1) + "\n").encode()

    def _file_entry(self, name: str) -> dict[str, Any]:
        chunks = self.chunks.get(name)
        return _entry(self.files[name]) | ({} if chunks is None else {"chunks": [digest.hex() for digest in chunks]})


def plan_document(plan: PackPlan) -> dict[str, Any]:
    """A plan as JSON has it."""
    layers = [_layer_entry(layer, start) for layer, start in zip(plan.layers, plan.starts, strict=False)]
    return {"format": FORMAT, "version": _version(plan), "source": dict(plan.meta), "layers": layers}


def _version(plan: PackPlan) -> int:
    return ENCODED_VERSION if any(layer.layout.matrices for layer in plan.layers) else VERSION


def seal_of(document: dict[str, Any]) -> str:
    """The digest of a document, whatever its spacing and order."""
    digest = new_digest()
    digest.update(json.dumps(document, sort_keys=True).encode())
    return digest.hexdigest()


def read_index(path: Path) -> PackIndex:
    """Read and check an index; one that is damaged, edited or of a later format raises StoreError."""
    try:
        data = read_bounded(path, MAX_INDEX_BYTES)
        return _index(parse_bounded(data, values=MAX_VALUES, containers=MAX_CONTAINERS))
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}; {REMEDY}") from error
    except _WrongError as error:
        raise StoreError(f"{path} is damaged: {error}; {REMEDY}") from error
    except TooLargeError as error:
        raise StoreError(f"{path} is no index of a packed model: {error}; {REMEDY}") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is damaged: it is not a JSON document; {REMEDY}") from error


class _WrongError(Exception):
    """A claim that cannot be true."""


def _entry(file: FileDigest) -> dict[str, Any]:
    return {"bytes": file[0], "digest": file[1].hex()}


def _layer_entry(layer: PackLayer, start: int) -> dict[str, Any]:
    parts = [{"name": p.name, "shape": list(p.shape), "dtype": p.dtype, "offset": p.offset} for p in layer.layout.parts]
    entry = {"name": layer.name, "experts": layer.experts, "offset": start, "block_bytes": layer.block_bytes}
    matrices = [asdict(matrix) | {"parts": list(matrix.parts)} for matrix in layer.layout.matrices]
    return entry | {"parts": parts} | ({"matrices": matrices} if matrices else {})


def _index(document: Any) -> PackIndex:
    _check_kind(document)
    seal = document.pop("seal", None)
    if seal != seal_of(document):
        raise _WrongError("it was changed after it was written")
    entries = _of(document, "layers", list)
    if not entries:
        raise _WrongError("it names no layers")
    source = _of(document, "source", dict)
    meta = {str(key): str(value) for key, value in source.items()}
    plan = PackPlan(tuple(_layer(entry) for entry in entries), meta)
    if document["version"] != _version(plan):
        raise _WrongError(f"its version is {document['version']}, and its matrices are of version {_version(plan)}")
    for number, (entry, layer) in enumerate(zip(entries, plan.layers, strict=True)):
        if (entry.get("offset"), entry.get("block_bytes")) != (plan.starts[number], layer.block_bytes):
            raise _WrongError(f"the blocks of layer {number} do not lie where its parts put them")
    digests = [[_digest(text) for text in entry["digests"]] for entry in entries]
    entries = _of(document, "files", dict)
    files = {name: _file(name, entry) for name, entry in entries.items()}
    chunks = {name: _chunks(files[name], entry) for name, entry in entries.items() if "chunks" in entry}
    small = {name: _file(name, entry, depth=2) for name, entry in _of({"small": {}} | document, "small", dict).items()}
    return PackIndex(plan, digests, files, chunks, small, _quality(document.get("quality")))


def _check_kind(document: Any) -> None:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise _WrongError("it is no index of a packed model")
    version = document.get("version")
    if version not in (VERSION, ENCODED_VERSION) or type(version) is not int:
        raise _WrongError(f"its version is {version!r:.40}, and this hotset reads up to version {ENCODED_VERSION}")


def _layer(entry: Any) -> PackLayer:
    name = _of(entry, "name", str)
    experts = _number(_of(entry, "experts", int), 1)
    if len(_of(entry, "digests", list)) != experts:
        raise _WrongError(f"{name:.100} has {experts:,} experts and {len(entry['digests']):,} digests")
    parts = tuple(_part(part) for part in _of(entry, "parts", list))
    layout = SlotLayout(parts, _matrices({"matrices": []} | entry, {part.name for part in parts}))
    placed = SlotLayout.of(parts, layout.matrices)
    if not parts or len({part.name for part in parts}) != len(parts) or layout != placed:
        raise _WrongError(f"the parts of {name:.100} overlap, leave gaps or share a name")
    _number(layout.used_bytes * experts, 1)
    return PackLayer(name, layout, experts)


def _part(entry: Any) -> Part:
    dtype, shape = _of(entry, "dtype", str), _of(entry, "shape", list)
    if dtype not in ITEM_BYTES or not 1 <= len(shape) <= MAX_DIMENSIONS:
        raise _WrongError("a part has a type or a shape that hotset does not know")
    sizes = tuple(_number(size, 1) for size in shape)
    return Part(_of(entry, "name", str), sizes, dtype, _number(_of(entry, "offset", int), 0))


def _matrices(entry: Any, parts: set[str]) -> tuple[Matrix, ...]:
    """The matrices in formats of their own; whether a format's parts are right is for the formats to say."""
    found = tuple(_matrix(each, parts) for each in _of(entry, "matrices", list))
    taken = [part for matrix in found for part in matrix.parts]
    names = {matrix.name for matrix in found}
    if len(names) != len(found) or len(set(taken)) != len(taken) or names & parts - set(taken):
        raise _WrongError("two matrices of a layer share a name or a part")
    return found


def _matrix(entry: Any, parts: set[str]) -> Matrix:
    outputs, inputs = (_number(_of(entry, key, int), 1) for key in ("outputs", "inputs"))
    spec, named = _of(entry, "format", str), _of(entry, "parts", list)
    if not spec.isascii() or not spec.isprintable() or not 1 <= len(spec) <= MAX_NAME:
        raise _WrongError("a matrix has a weight format that cannot be one")
    if not named or not all(isinstance(name, str) and name in parts for name in named):
        raise _WrongError("a matrix is made of parts that are not there")
    return Matrix(_of(entry, "name", str), outputs, inputs, spec, tuple(named))


def _quality(entry: Any) -> dict[str, Any] | None:
    """What was measured: numbers that can be, and names that can be printed."""
    if entry is None:
        return None
    text = _of(entry, "text", dict)
    for key in ("name", "sha256"):
        if not 1 <= len(_of(text, key, str)) <= MAX_NAME or not text[key].isprintable():
            raise _WrongError("the text that quality was measured on has no name")
    _number(_of(text, "tokens", int), 1)
    for figures in (entry, *_of({"parts": {}} | entry, "parts", dict).values()):
        _number(_of(figures, "tokens", int), 1)
        for key in FIGURES:
            if type(_of(figures, key, (int, float))) is bool or not 0 <= figures[key] < math.inf:
                raise _WrongError(f"{figures[key]!r:.40} cannot be the {key} of a model")
    return dict(entry)


def _file(name: str, entry: Any, depth: int = 1) -> FileDigest:
    parts = PurePosixPath(name).parts
    if "/".join(parts) != name or not 1 <= len(parts) <= depth or ".." in parts or "\0" in name:
        raise _WrongError(f"{name!r:.100} is no name of a file in this folder")
    return _number(_of(entry, "bytes", int), 0), _digest(_of(entry, "digest", str))


def _chunks(file: FileDigest, entry: Any) -> list[bytes]:
    chunks = _of(entry, "chunks", list)
    if len(chunks) != -(-file[0] // CHUNK_BYTES):
        raise _WrongError(f"a file of {file[0]:,} bytes has {len(chunks):,} digests of its chunks")
    return [_digest(text) for text in chunks]


def _of(entry: Any, key: str, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(entry, dict) or not isinstance(entry.get(key), kind):
        raise _WrongError(f'"{key}" is missing or of the wrong kind')
    return entry[key]


def _number(value: Any, least: int) -> int:
    if type(value) is not int or not least <= value < MAX_BYTES:  # a bool is no number here
        raise _WrongError(f"{value!r:.40} cannot be a size")
    return value


def _digest(text: Any) -> bytes:
    if not isinstance(text, str) or len(text) != 2 * DIGEST_BYTES:
        raise _WrongError(f"{text!r:.40} is no digest")
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise _WrongError(f"{text!r:.40} is no digest") from None

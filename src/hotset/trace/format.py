"""The trace file: one safetensors file, specified in docs/reference/formats.md."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hotset.errors import HotsetError, TraceError
from hotset.files import write_beside
from hotset.reading import TooLargeError, header_bytes, parse_bounded
from hotset.shape import ModelShape
from hotset.trace.foreign import foreign_kind
from hotset.trace.trace import ARRAYS, Labels, Trace
from hotset.trace.validate import OPTIONAL

KIND = "trace"
VERSION = 1
MAX_HEADER_BYTES = 32 << 20
MAX_LABELS, MAX_VALUES = 1 << 18, 1 << 21
"""The most requests with labels of their own, and the most values in a header."""
_OLD = {"predictions": "guesses"}  # arrays that a file calls by an older name
_NARROW = {"experts", "guesses"}  # stored unsigned, as narrow as ids allow; all bits set: an unused place
STORED = {
    "experts": ("U8", "U16"), "guesses": ("U8", "U16"), "request": ("I32",), "step": ("I32",),
    "phase": ("U8",), "weights": ("F16",), "token_ids": ("I32",),
}  # fmt: skip
"""The tensors of a trace, and the types that each is stored in."""


def save_trace(trace: Trace, path: Path) -> None:
    """Write the trace beside its place and rename it there once it is whole."""
    tensors = {_OLD.get(name, name): array for name, array in trace.rows(slice(None)).items()}
    for name in _NARROW & tensors.keys():
        tensors[name] = tensors[name].astype(np.uint8 if trace.shape.experts < 256 else np.uint16)
    words = {"kind": KIND, "version": VERSION, "labels": list(trace.labels), "meta": trace.meta}
    header = json.dumps(words | {"shape": asdict(trace.shape)}, sort_keys=True)
    if 2 * len(header) > MAX_HEADER_BYTES:  # in the file it stands in quotes, with every quote of its own escaped
        raise TraceError(f"labels and meta take {len(header):,} letters, more than a trace may have: shorten them")
    save_tensors(path, tensors, header)


def save_tensors(path: Path, tensors: dict[str, npt.NDArray[Any]], header: str) -> None:
    """Write tensors and a header beside their place and rename the file there once it is whole."""
    plain = {name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)}
    with write_beside(path) as scratch:
        try:
            save_file(plain, scratch, metadata={"hotset": header})
        except SafetensorError as error:
            raise HotsetError(f"cannot write {path}: {error}; free some space or choose another place") from error


def load_trace(path: Path) -> Trace:
    """Read and validate a trace file; whatever is wrong with it becomes one clear TraceError."""
    try:
        header_bytes(path, MAX_HEADER_BYTES)  # refuses what is no file, or has a larger header than any trace
        with safe_open(path, framework="numpy") as file:
            header = _parse_header(file.metadata(), path)
            return _build(file, header, path)
    except FileNotFoundError:
        raise TraceError(f"no such trace: {path}") from None
    except (SafetensorError, OSError, ValueError, MemoryError) as error:
        if kind := foreign_kind(path):
            raise TraceError(
                f"{path} is {kind} and no trace file: hotset trace import {path} -o TRACE.safetensors makes one of "
                "what other tools recorded"
            ) from None
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise TraceError(f"{path} is not a trace file, or it is damaged ({why}): copy or record it again") from error
    except TraceError as error:
        raise error if str(path) in str(error) else TraceError(f"{path}: {error}") from None


def _parse_header(metadata: dict[str, str] | None, path: Path) -> dict[str, Any]:
    try:
        text = (metadata or {})["hotset"].encode()
        header = parse_bounded(text, values=MAX_VALUES, containers=MAX_LABELS)
        kind, version = header["kind"], header["version"]
    except TooLargeError as error:
        raise TraceError(f"{path} has a header that no trace has: {error}; record it again") from None
    except (KeyError, TypeError, ValueError, RecursionError):
        raise TraceError(
            f'{path} is a safetensors file, but not a hotset trace: its metadata has no valid "hotset" key'
        ) from None
    if kind != KIND:
        raise TraceError(f"{path} is a hotset {kind!r:.40}, not a trace")
    if type(version) is not int or version != VERSION:
        raise TraceError(f"{path} has trace format {version!r:.40}; this hotset reads format {VERSION}: upgrade hotset")
    return dict(header)


def _build(file: Any, header: dict[str, Any], path: Path) -> Trace:
    names = set(file.keys())
    if missing := set(ARRAYS) - OPTIONAL - names:
        raise TraceError(f"{path} lacks the tensor {min(missing)!r}")
    if unknown := names - STORED.keys():
        raise TraceError(f"{path} has a tensor {min(unknown)!r} that format {VERSION} does not know")
    shape = parse_shape(header)
    _check_stored(file, names, shape, path)
    arrays = {name: _read(file, tensor) for name in ARRAYS if (tensor := _OLD.get(name, name)) in names}
    return Trace(shape=shape, labels=_parse_labels(header), meta=_strings(header.get("meta", {}), "meta"), **arrays)


def parse_shape(header: dict[str, Any]) -> ModelShape:
    """The shape of the model that a header states, or TraceError."""
    fields = header.get("shape")
    wanted = {"layers", "experts", "top_k", "expert_bytes"}
    if not isinstance(fields, dict) or not wanted - {"expert_bytes"} <= fields.keys() <= wanted:
        raise TraceError("the header does not state the shape of the model (layers, experts, top_k, expert_bytes)")
    if not all(type(value) is int or (key == "expert_bytes" and value is None) for key, value in fields.items()):
        raise TraceError("the shape of the model in the header must be whole numbers")
    try:
        return ModelShape(**fields)
    except HotsetError as error:
        raise TraceError(str(error)) from None


def _check_stored(file: Any, names: set[str], shape: ModelShape, path: Path) -> None:
    """Refuse wrong types and shapes before anything is allocated."""
    tokens = file.get_slice("experts").get_shape()[:1]
    for name in names:
        stored = file.get_slice(name)
        if stored.get_dtype() not in STORED[name]:
            raise TraceError(f"{path}: {name} is stored as {stored.get_dtype()}, not {' or '.join(STORED[name])}")
        if stored.get_shape()[:1] != tokens:
            raise TraceError(f"{path}: {name} and experts disagree on the number of tokens")
    if file.get_slice("experts").get_shape()[1:] != [shape.layers, shape.top_k]:
        raise TraceError(
            f"{path}: experts is not [tokens, {shape.layers} layers, top {shape.top_k}] as the header says"
        )


def _read(file: Any, name: str) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = file.get_tensor(name)
    return signed(array, name) if name in _NARROW else array


def signed(stored: npt.NDArray[Any], name: str) -> npt.NDArray[np.int16]:
    """Unsigned ids as int16, with -1 where all bits are set."""
    unused = stored == np.iinfo(stored.dtype).max
    if stored.itemsize > 1 and (largest := int(stored.max(initial=0, where=~unused))) > np.iinfo(np.int16).max:
        raise TraceError(f"{name} holds an id beyond {np.iinfo(np.int16).max}: {largest} is out of range")
    wide = stored.astype(np.int16)
    wide[unused] = -1
    return wide


def _parse_labels(header: dict[str, Any]) -> Labels:
    labels = header.get("labels", [])
    if not isinstance(labels, list):
        raise TraceError("labels in the header must be a list, one entry per request")
    return tuple(_strings(label, "a label") for label in labels)


def _strings(value: Any, what: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise TraceError(f"{what} in the header must map names to text")
    return value

"""The header of a safetensors file: where every tensor's bytes lie, without reading any of them."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotset.errors import StoreError
from hotset.reading import TooLargeError, header_bytes, parse_bounded
from hotset.store.layout import ITEM_BYTES

MAX_HEADER_BYTES = 48 << 20
MAX_CONTAINERS, MAX_VALUES = 3 << 18, 1 << 22
"""A tensor has three lists and objects, and some ten values: a quarter of a million tensors in one file."""

DTYPES = {
    "F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: its type, its shape, and its bytes counted from the start of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int
    name: str = ""


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file; a file that does not hold all it promises raises StoreError."""
    try:
        data = header_bytes(path, MAX_HEADER_BYTES)
        file_bytes, length = os.stat(path).st_size, len(data)
        header = parse_bounded(data, values=MAX_VALUES, containers=MAX_CONTAINERS)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    except TooLargeError as error:
        raise StoreError(_damaged(path, str(error))) from error
    except (ValueError, RecursionError) as error:
        raise StoreError(_damaged(path, "its header cannot be read")) from error
    if not isinstance(header, dict):
        raise StoreError(_damaged(path, "its header is no table of tensors"))
    tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"}
    end = max((tensor.offset + tensor.size_bytes for tensor in tensors.values()), default=0)
    if end > file_bytes:
        raise StoreError(
            f"{path} is truncated: it has {file_bytes:,} of {end:,} bytes; copy or download the file again"
        )
    return tensors


def _tensor(path: Path, name: str, entry: Any, base: int) -> StoredTensor:
    try:
        begin, end = (_whole(offset) for offset in entry["data_offsets"])
        dtype = DTYPES[entry["dtype"]]
        shape = tuple(_whole(size) for size in entry["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(_damaged(path, f"the entry of {name} cannot be read")) from error
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise StoreError(_damaged(path, f"the bytes of {name} do not fit its shape"))
    return StoredTensor(path, dtype, shape, base + begin, end - begin, name)


def _whole(value: Any) -> int:
    """A number as a header may have it; a bool, a fraction or less than nothing is none."""
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value


def _damaged(path: Path, why: str) -> str:
    return f"{path} is not a valid safetensors file: {why}; copy or download it again"

"""Matrices that a checkpoint holds in a weight format: found by their tensors, known by the name of the matrix.

So the library's mapping from stored names to parameters serves them too: it sees one tensor of the matrix's shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from hotset.errors import FormatError, ModelError
from hotset.formats import Encoded, FormatPart, StoredModule, WeightFormat, find
from hotset.store.header import StoredTensor
from hotset.store.layout import ITEM_BYTES

HIDDEN = "_hotset_quantization"
"""Where a config keeps how its checkpoint is quantised, if transformers is not to know."""
REMEDY = "the checkpoint is damaged, or in a variant of the format that hotset does not know"
UNKNOWN = "use the original weights, which hotset pack --experts makes small as well"
CODES = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int8", "uint8", "int32")
"""Types that plain matrices of numbers do not have."""


@dataclass(frozen=True, slots=True)
class EncodedTensor(StoredTensor):
    """A matrix as if it were one tensor of plain numbers, with the tensors that it is made of."""

    format: WeightFormat = field(kw_only=True)
    parts: tuple[StoredTensor, ...] = field(kw_only=True)
    beside: tuple[str, ...] = field(kw_only=True, default=())  # names of tensors that nothing is read from


def fold(stored: Mapping[str, StoredTensor], config: Any, dtype: str) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, with those of each encoded matrix in one."""
    if not hasattr(config, HIDDEN) and getattr(config, "quantization_config", None) is not None:
        return dict(stored)  # transformers reads them
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        module, _, word = name.rpartition(".")
        modules.setdefault(module, {})[word] = tensor
    settings = encoding(config)
    folded = dict(stored)
    for module, tensors in modules.items():
        for found in _found(StoredModule(tensors, settings, dtype)):
            for word in (*found.tensors, *found.beside):
                del folded[tensors[word].name]
            name = f"{module}.{found.name}" if module else found.name
            folded[name] = _encoded(name, found, tensors)
    return folded


def _found(module: StoredModule) -> list[Encoded]:
    try:
        return find(module)
    except FormatError as error:
        name = next(iter(module.tensors.values())).name
        where = "" if name.rpartition(".")[0] in str(error) else f"{name}: "
        raise ModelError(f"{where}{error}: {REMEDY}") from error


def refuse_codes(key: str, tensor: StoredTensor) -> None:
    """Raise ModelError for codes that no format has taken: as plain numbers they would be wrong without a word."""
    if not isinstance(tensor, EncodedTensor) and tensor.dtype in CODES:
        raise ModelError(
            f"{key} is {tensor.dtype} {list(tensor.shape)}, and none of the weight formats that hotset knows has "
            f"such a tensor there: {UNKNOWN}"
        )


def encoding(config: Any) -> Mapping[str, Any]:
    """What a config says of how its checkpoint is quantised; nothing if it is not."""
    found = getattr(config, HIDDEN, None) or {}
    settings: Mapping[str, Any] = found if isinstance(found, dict) else found.to_dict()
    return settings


def _encoded(name: str, found: Encoded, tensors: Mapping[str, StoredTensor]) -> EncodedTensor:
    """One matrix, or one of every expert, whose tensors must be as the format has them."""
    *experts, outputs, inputs = found.shape
    try:
        wanted = found.format.parts(outputs, inputs)
    except FormatError as error:
        raise ModelError(f"{name}: {error}: {REMEDY}") from error
    parts = tuple(
        _as_part(tensors[word], part, tuple(experts), found.format)
        for word, part in zip(found.tensors, wanted, strict=True)
    )
    first, size = min(parts, key=lambda part: part.offset), sum(part.size_bytes for part in parts)
    return EncodedTensor(
        first.file, found.format.dtype, found.shape, first.offset, size, name,
        format=found.format, parts=parts, beside=tuple(tensors[word].name for word in found.beside),
    )  # fmt: skip


def _as_part(tensor: StoredTensor, wanted: FormatPart, experts: tuple[int, ...], chosen: WeightFormat) -> StoredTensor:
    """A stored tensor as its format has it: bytes may be stored as any type, their rows cut up, and a lone number bare.

    What it stands for, the format has looked at.
    """
    shape, own = (*experts, *wanted.shape), tensor.shape[len(experts) :]
    same_type = tensor.dtype == wanted.dtype or wanted.dtype == "uint8"
    same_rows = own[:1] == wanted.shape[:1] or wanted.shape[0] == 1
    size = math.prod(shape) * ITEM_BYTES[wanted.dtype]
    if tensor.shape[: len(experts)] != experts or not (same_type and same_rows) or tensor.size_bytes != size:
        raise ModelError(
            f"{tensor.name} is {tensor.dtype} {list(tensor.shape)}, and in {chosen.spec} it would be "
            f"{wanted.dtype} {list(shape)}: {REMEDY}"
        )
    return replace(tensor, dtype=wanted.dtype, shape=shape)


@contextmanager
def naming(tensor: EncodedTensor) -> Iterator[None]:
    """Have what its format cannot decode say which tensor it is: of the parts, the groups of inputs alone can be none.

    They are the last part, and any codes and scales are numbers.
    """
    try:
        yield
    except FormatError as error:
        raise ModelError(f"{tensor.parts[-1].name}: {error}") from error


def rows_of(tensor: StoredTensor, first: int, last: int) -> StoredTensor:
    """Some rows of a stored tensor, or some experts of an encoded one."""
    shape = (last - first, *tensor.shape[1:])
    if isinstance(tensor, EncodedTensor):
        parts = tuple(rows_of(part, first, last) for part in tensor.parts)
        at, size = min(part.offset for part in parts), sum(part.size_bytes for part in parts)
        return replace(tensor, shape=shape, offset=at, size_bytes=size, parts=parts)
    row_bytes = tensor.size_bytes // tensor.shape[0]
    start, size = tensor.offset + first * row_bytes, (last - first) * row_bytes
    return StoredTensor(tensor.file, tensor.dtype, shape, start, size, tensor.name)

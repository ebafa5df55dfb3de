"""Matrices that a checkpoint holds in a weight format: found by their tensors, known by the name of the matrix.

So the library's mapping from stored names to parameters serves them too: it sees one tensor of the matrix's shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hotset.errors import ModelError
from hotset.formats import Encoded, StoredModule, WeightFormat, find
from hotset.store.header import StoredTensor

HIDDEN = "_hotset_quantization"
"""Where a config keeps how its checkpoint is quantised, if transformers is not to know."""
REMEDY = "the checkpoint is damaged, or in a variant of the format that hotset does not know"


@dataclass(frozen=True, slots=True)
class EncodedTensor(StoredTensor):
    """A matrix as if it were one tensor of plain numbers, with the tensors that it is made of."""

    format: WeightFormat = field(kw_only=True)
    parts: tuple[StoredTensor, ...] = field(kw_only=True)


def fold(stored: Mapping[str, StoredTensor], config: Any, dtype: str) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, with those of each encoded matrix in one."""
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        module, _, word = name.rpartition(".")
        modules.setdefault(module, {})[word] = tensor
    settings = _settings(config)
    folded = dict(stored)
    for module, tensors in modules.items():
        for found in find(StoredModule(tensors, settings, dtype)):
            for word in found.tensors:
                del folded[f"{module}.{word}" if module else word]
            name = f"{module}.{found.name}" if module else found.name
            folded[name] = _encoded(name, found, tensors)
    return folded


def _settings(config: Any) -> Mapping[str, Any]:
    found = getattr(config, HIDDEN, None) or getattr(config, "quantization_config", None) or {}
    settings: Mapping[str, Any] = found if isinstance(found, dict) else found.to_dict()
    return settings


def _encoded(name: str, found: Encoded, tensors: Mapping[str, StoredTensor]) -> EncodedTensor:
    """One matrix, or one of every expert, whose tensors must be as the format has them."""
    *experts, outputs, inputs = found.shape
    parts = tuple(tensors[word] for word in found.tensors)
    for part, wanted in zip(parts, found.format.parts(outputs, inputs), strict=True):
        shape = (*experts, *wanted.shape)
        if (part.shape, part.dtype) != (shape, wanted.dtype):
            raise ModelError(
                f"{part.name} is {part.dtype} {list(part.shape)}, and in {found.format.spec} it would be "
                f"{wanted.dtype} {list(shape)}: {REMEDY}"
            )
    first, size = min(parts, key=lambda part: part.offset), sum(part.size_bytes for part in parts)
    return EncodedTensor(
        first.file, found.format.dtype, found.shape, first.offset, size, name, format=found.format, parts=parts
    )


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

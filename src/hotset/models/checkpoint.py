"""The checkpoint as transformers reads it: which stored tensors become which parameter, and by which conversion.

The library's own mapping decides, so that whatever it can load, hotset can find.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from hotset.errors import ModelError, StoreError
from hotset.models.encoded import fold
from hotset.store.header import StoredTensor, read_header


@dataclass
class ParameterSource:
    """The stored tensors of one parameter, by the pattern of the converter that they match."""

    converter: Any | None
    tensors: dict[str, list[StoredTensor]] = field(default_factory=dict)

    @property
    def dequantises(self) -> bool:
        """Whether the conversion takes the stored numbers as they are: transformers casts all others beforehand."""
        return any(getattr(operation, "hf_quantizer", None) for operation in getattr(self.converter, "operations", ()))

    def convert(self, name: str, pieces: dict[str, list[torch.Tensor]], model: Any) -> torch.Tensor:
        """Run the library's conversion on the tensors of one expert; the result has one leading row."""
        if self.converter is None:
            return next(iter(pieces.values()))[0]
        converter = deepcopy(self.converter)
        for pattern, tensors in pieces.items():
            for number, tensor in enumerate(tensors):
                converter.add_tensor(name, f"{pattern}.{number}", pattern, lambda tensor=tensor: tensor)
        results = converter.convert(name, model=_OneExpert(model), config=model.config, hf_quantizer=None)
        found = results[name] if name in results else next(iter(results.values()))
        result: torch.Tensor = found[0] if isinstance(found, list) else found
        return result


class _OneExpert:
    """The model as a conversion sees it that asks for shapes: every parameter has but one expert."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter_or_buffer(self, name: str) -> Any:
        shape = self._model._hotset_shapes[name]
        return SimpleNamespace(shape=torch.Size((1, *shape[1:])), dim=lambda: len(shape))

    get_parameter = get_parameter_or_buffer


def read_headers(files: Sequence[str]) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint's files."""
    for file in files:
        if not str(file).endswith(".safetensors"):
            raise StoreError(f"{file} is no safetensors file: save the model once with save_pretrained to convert it")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors.update(read_header(Path(file)))
    return tensors


def stored_tensors(model: Any, files: Sequence[str]) -> dict[str, StoredTensor]:
    """All tensors of a model's files, those of each encoded matrix in one."""
    return fold(read_headers(files), model.config, dtype_of(model))


def dtype_of(model: Any) -> str:
    """The type that a model computes in."""
    return str(model.dtype).removeprefix("torch.")


class StoredKey(NamedTuple):
    """A stored tensor, and what transformers makes of it."""

    key: str
    targets: list[str]  # parameters
    pattern: str | None  # of the converter that it matches
    converter: Any | None


def stored_keys(model: Any, stored: Iterable[str], mapping: Sequence[Any]) -> list[StoredKey]:
    """Where stored tensors go, found as the loader of transformers would, in its order."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known, prefix = model.state_dict(), model.base_model_prefix
    found = []
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], base_model_prefix=prefix, meta_state_dict=known)
        converter = None if pattern is None else by_pattern[pattern]
        targets = [name] if converter is None else _targets(name, converter)
        found.append(StoredKey(key, targets, pattern, converter))
    return found


def parameter_sources(
    stored: Mapping[str, StoredTensor], keys: Sequence[StoredKey], wanted: set[str]
) -> dict[str, ParameterSource]:
    """Where the wanted parameters come from."""
    found: dict[str, ParameterSource] = {}
    for key, targets, pattern, converter in keys:
        for target in targets:
            if target in wanted:
                source = found.setdefault(target, ParameterSource(converter))
                if source.converter is not converter:
                    raise ModelError(
                        f"the checkpoint holds {target} twice, the second time in {key}: remove one of them"
                    )
                source.tensors.setdefault(pattern or key, []).append(stored[key])
    absent = sorted(wanted - set(found))
    if absent:
        raise ModelError(
            f"the checkpoint does not hold {absent[0]}{f' and {len(absent) - 1} more' if absent[1:] else ''}: "
            "it is incomplete, or of another model than its config says"
        )
    return found


def _targets(name: str, converter: Any) -> list[str]:
    """All parameters that a converter fills, given the first."""
    first = re.escape(str(converter.target_patterns[0]))
    return [re.sub(first, str(target), name, count=1) for target in converter.target_patterns]

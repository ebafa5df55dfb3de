"""A GGUF model as a checkpoint: its tensors as stored ones, by the names that the file has for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from hotset.errors import ModelError
from hotset.formats.gguf import Gguf
from hotset.models.checkpoint import ParameterSource, StoredKey, parameter_sources
from hotset.models.decoded_state import LazyTensor, read_tensor
from hotset.models.encoded import EncodedTensor
from hotset.models.gguf_config import read_config, read_tokenizer
from hotset.models.gguf_names import architectures, rules_for
from hotset.models.gguf_place import is_gguf, local_file
from hotset.store.gguf import PLAIN, BlockTensor, GgufHeader, read_gguf
from hotset.store.header import StoredTensor

_EXPERTS = "_exps."


@dataclass
class GgufCheckpoint:
    """The files of a GGUF model."""

    header: GgufHeader

    @classmethod
    def open(cls, place: str) -> GgufCheckpoint | None:
        """The model at a place that names a GGUF file; one that transformers has no model for is refused."""
        if not is_gguf(place):
            return None
        header = read_gguf(local_file(place))
        _check(header)
        return cls(header)

    @cached_property
    def config(self) -> Any:
        """The config that transformers builds the model by."""
        return read_config(self.header)

    def tokenizer(self) -> Any:
        """The tokenizer that the file describes."""
        return read_tokenizer(self.header)

    @property
    def files(self) -> list[str]:
        """All files."""
        return [str(file) for file in self.header.files]

    def stored(self, dtype: str) -> dict[str, StoredTensor]:
        """All tensors, blocks in their format for a model that computes in this type."""
        return {name: _stored(tensor, dtype) for name, tensor in self.header.tensors.items()}

    def rules(self, model: Any) -> Sequence[Any]:
        """Which tensors become which parameters."""
        return rules_for(self.header.architecture, model.config)


def _check(header: GgufHeader) -> None:
    place, known = header.files[0], ", ".join(architectures())
    if not any(_EXPERTS in name for name in header.tensors):
        raise ModelError(f"{place} has no experts: it is a dense model; plain transformers or llama.cpp runs it")
    if header.architecture not in architectures():
        raise ModelError(
            f"{place} is of the architecture {header.architecture!r:.60}, which transformers does not map from GGUF; "
            f"it maps {known}: use the original checkpoint, which hotset pack --experts makes small as well"
        )
    scaled = next((name for name in header.tensors if name.endswith("_exps.scale")), None)
    if scaled is not None:
        raise ModelError(f"{place} has scales beside its blocks ({scaled}), which hotset does not read: use another")


def _stored(tensor: BlockTensor, dtype: str) -> StoredTensor:
    kind, shape = tensor.type, tensor.shape
    if tensor.name.endswith("ffn_gate_inp_shexp.weight") and len(shape) == 1:
        shape = (1, *shape)  # a matrix of one output
    if kind.name in PLAIN:
        return StoredTensor(tensor.file, PLAIN[kind.name], shape, tensor.offset, tensor.size_bytes, tensor.name)
    own = (*shape[:-1], shape[-1] // kind.weights * kind.size_bytes)
    part = StoredTensor(tensor.file, "uint8", own, tensor.offset, tensor.size_bytes, tensor.name)
    chosen = Gguf(dtype, kind.name)
    return EncodedTensor(
        tensor.file, dtype, shape, tensor.offset, tensor.size_bytes, tensor.name, format=chosen, parts=(part,)
    )


def converted_state(
    model: Any, stored: Mapping[str, StoredTensor], keys: Sequence[StoredKey], left_out: set[str]
) -> dict[str, Any]:
    """The parameters of a model, by their own names, made of a GGUF file's tensors as the loader asks for them."""
    known = {name: tensor.shape for name, tensor in model.state_dict().items() if name not in left_out}
    sources = parameter_sources(stored, keys, {name for key in keys for name in key.targets if name in known})
    return {
        name: LazyTensor(partial(_converted, name, source, model), known[name], "F32")
        for name, source in sources.items()
    }


def _converted(name: str, source: ParameterSource, model: Any) -> torch.Tensor:
    """One parameter, read, decoded and converted."""
    pieces = {pattern: [read_tensor(t) for t in tensors] for pattern, tensors in source.tensors.items()}
    return source.convert(name, pieces, model)

"""Weights beside the experts that a checkpoint holds in a weight format: decoded as transformers asks for them.

The loader of transformers slices one stored tensor after another; here it is given some that are made when sliced. So
its own conversions, types and devices apply to them as to plain ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from hotset.errors import ModelError, StoreError
from hotset.formats import element_type
from hotset.models.checkpoint import StoredKey
from hotset.models.encoded import EncodedTensor, encoding, naming, refuse_codes
from hotset.models.pieces import tensor_of
from hotset.store.header import StoredTensor

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class LazyTensor:
    """A tensor that is read and converted when it is sliced, with the methods of a slice of a safetensors file."""

    def __init__(self, read: Callable[[], torch.Tensor], shape: Sequence[int], dtype: str) -> None:
        self._read, self._shape, self._dtype = read, shape, dtype

    def __getitem__(self, place: Any) -> torch.Tensor:
        return self._read()[place]

    def get_shape(self) -> list[int]:
        """The shape of the whole."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """The type, as safetensors names it."""
        return self._dtype


def decoded(tensor: EncodedTensor) -> LazyTensor:
    """An encoded matrix that is decoded when it is sliced."""
    return LazyTensor(partial(read_tensor, tensor), tensor.shape, _DTYPES.get(tensor.format.dtype, "F64"))


def read_tensor(tensor: StoredTensor) -> torch.Tensor:
    """A stored tensor; that of an encoded matrix, or of one for each expert, decoded."""
    if not isinstance(tensor, EncodedTensor):
        return _read(tensor)
    shape, chosen = tensor.shape, tensor.format
    out = torch.empty(shape, dtype=element_type(chosen.dtype))
    parts = [_read(part) for part in tensor.parts]
    with naming(tensor):
        if len(shape) == 2:
            chosen.decode(parts, out)
        else:
            for number in range(shape[0]):
                chosen.decode([part[number] for part in parts], out[number])
    return out


def needs_decoding(
    model: Any, stored: Mapping[str, StoredTensor], keys: Sequence[StoredKey], experts: set[str]
) -> bool:
    """Whether the model has encoded matrices that are not its experts.

    Codes of a quantised checkpoint that are in no format of ours raise ModelError.
    """
    known, found = model.state_dict(), False
    quantised = bool(encoding(model.config))
    for key, targets, _, _ in keys:
        there = [known[name] for name in targets if name in known]
        if quantised and any(parameter.is_floating_point() for parameter in there):
            refuse_codes(key, stored[key])
        found = found or (isinstance(stored[key], EncodedTensor) and bool(there) and experts.isdisjoint(targets))
    return found


@contextmanager
def decoded_state(stored: Mapping[str, StoredTensor], experts: set[str]) -> Iterator[dict[str, Any]]:
    """The tensors of all files for the loader of transformers, with encoded ones decoded and without the experts."""
    from safetensors import safe_open

    files = sorted({tensor.file for tensor in stored.values()})
    with ExitStack() as stack:
        opened = {file: stack.enter_context(safe_open(file, framework="pt")) for file in files}
        yield {
            key: decoded(tensor) if isinstance(tensor, EncodedTensor) else opened[tensor.file].get_slice(key)
            for key, tensor in stored.items()
            if key not in experts
        }


def _read(tensor: StoredTensor) -> torch.Tensor:
    try:
        data = np.fromfile(tensor.file, np.uint8, tensor.size_bytes, offset=tensor.offset)
    except OSError as error:
        raise StoreError(f"cannot read {tensor.file}: {error.strerror or error}") from error
    if len(data) != tensor.size_bytes:
        raise ModelError(f"{tensor.file} became shorter while it was read: copy or download it again")
    return tensor_of(data, tensor.dtype, tensor.shape)

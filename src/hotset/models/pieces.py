"""The stored tensors of one expert: whether transformers would take them, and what its conversion makes of them.

Every expert is looked at. Experts whose tensors are of the same types and shapes are converted alike, so that one trial
on zeros or on numbered elements answers for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hotset.errors import ModelError
from hotset.formats import element_type
from hotset.models.checkpoint import ParameterSource
from hotset.models.layers import RowRange
from hotset.store.catalog import Bytes
from hotset.store.header import StoredTensor

REMEDY = "the checkpoint is damaged, or of another model than its config says; download it again"


@dataclass(frozen=True, slots=True)
class Piece:
    """The stored tensors of one take of one expert."""

    row_range: RowRange
    stored: dict[str, list[StoredTensor]]

    def flat(self) -> list[StoredTensor]:
        """All stored tensors in order."""
        return [tensor for tensors in self.stored.values() for tensor in tensors]

    def read(self) -> list[StoredTensor]:
        """All tensors to be read, those of encoded matrices one by one."""
        return [part for tensor in self.flat() for part in (getattr(tensor, "parts", None) or (tensor,))]

    def kind(self) -> tuple[Any, ...]:
        """The types and shapes of the stored tensors: what a conversion depends on."""
        return tuple((p, tuple((t.dtype, t.shape) for t in tensors)) for p, tensors in self.stored.items())


class Trials:
    """Runs the library's conversion once for every kind of piece, on made-up numbers."""

    def __init__(self, model: Any, sources: Mapping[str, ParameterSource]) -> None:
        self.model, self.sources = model, sources
        self._dtypes: dict[Any, str] = {}
        self._starts: dict[Any, list[int] | None] = {}
        self._orders: dict[Any, torch.Tensor | None] = {}

    def dtype(self, piece: Piece) -> str:
        """The type that a piece gets: its parameter's, or what dequantisation makes of it.

        What transformers cannot convert, or makes another shape of, is refused as transformers refuses it.
        """
        if self.sources[piece.row_range.parameter].converter is None:
            return self._parameter_dtype(piece)
        key = self._key(piece)
        if key not in self._dtypes:
            made = self._convert_zeros(piece)
            dequantises = self.sources[piece.row_range.parameter].dequantises
            self._dtypes[key] = _name(made.dtype) if dequantises else self._parameter_dtype(piece)
        return self._dtypes[key]

    def starts(self, piece: Piece) -> list[int] | None:
        """Where each stored tensor begins in the converted one, in elements; None if one does not stay in one piece."""
        source = self.sources[piece.row_range.parameter]
        if source.converter is None:
            return [0]
        key = self._key(piece)
        if key not in self._starts:
            self._starts[key] = self._probe(piece, source)
        return self._starts[key]

    def row_order(self, piece: Piece) -> torch.Tensor | None:
        """Which rows of the stored matrices, end to end, become which outputs; None if rows do not stay whole."""
        source = self.sources[piece.row_range.parameter]
        key = self._key(piece)
        if key not in self._orders:
            self._orders[key] = _row_order(self._numbered(piece, source), piece.flat()[0].shape[-1])
        return self._orders[key]

    def _key(self, piece: Piece) -> tuple[Any, ...]:
        name = piece.row_range.parameter
        return id(self.sources[name].converter), self.model._hotset_shapes[name], piece.kind()

    def _parameter_dtype(self, piece: Piece) -> str:
        return _name(self.model._hotset_dtypes[piece.row_range.parameter])

    def _convert_zeros(self, piece: Piece) -> torch.Tensor:
        name = piece.row_range.parameter
        source, named = self.sources[name], piece.flat()[0].name
        dtype = None if source.dequantises else self._parameter_dtype(piece)
        empty = {p: [tensor_of(np.zeros(t.size_bytes, np.uint8), t.dtype, t.shape) for t in tensors]
                 for p, tensors in piece.stored.items()}  # fmt: skip
        zeros = {p: [as_cast(tensor, dtype) for tensor in tensors] for p, tensors in empty.items()}
        try:
            result = source.convert(name, zeros, self.model)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ModelError(f"{named} cannot be converted to {name} ({why:.200}): {REMEDY}") from error
        shape = (piece.row_range.last - piece.row_range.first, *self.model._hotset_shapes[name][1:])
        if tuple(result.shape) != shape:
            raise ModelError(
                f"{named} and what belongs to it come to {list(result.shape)}, and an expert of {name} is "
                f"{list(shape)}: {REMEDY}"
            )
        return result

    def _probe(self, piece: Piece, source: ParameterSource) -> list[int] | None:
        result = self._numbered(piece, source)
        return None if result is None else _runs(result.reshape(-1), [math.prod(t.shape) for t in piece.flat()])

    def _numbered(self, piece: Piece, source: ParameterSource) -> torch.Tensor | None:
        """What becomes of numbers in the place of a piece's elements; None if the conversion computes."""
        numbered: dict[str, list[torch.Tensor]] = {}
        end = 0
        for pattern, tensors in piece.stored.items():
            numbered[pattern] = []
            for tensor in tensors:
                size = math.prod(tensor.shape)
                numbered[pattern].append(torch.arange(end, end + size, dtype=torch.int32).view(tensor.shape))
                end += size
        try:
            return source.convert(piece.row_range.parameter, numbered, self.model)
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return None  # not a rearrangement


def check_shape(tensor: StoredTensor, shape: tuple[int, ...], name: str) -> None:
    """Raise ModelError if a tensor that is taken as it is has not the shape of its parameter."""
    if tensor.shape != tuple(shape):
        raise ModelError(f"{tensor.name} is {list(tensor.shape)}, and {name} is {list(shape)}: {REMEDY}")


def check_shapes(experts: Sequence[Sequence[Sequence[Piece]]]) -> None:
    """Raise ModelError if a tensor of some expert has another shape than that of the first: none could be stacked."""
    firsts = [tensor for pieces in experts[0] for piece in pieces for tensor in piece.flat()]
    for expert in experts[1:]:
        own = [tensor for pieces in expert for piece in pieces for tensor in piece.flat()]
        for first, tensor in zip(firsts, own, strict=True):
            if tensor.shape != first.shape:
                raise ModelError(
                    f"{tensor.name} is {list(tensor.shape)}, and {first.name} is {list(first.shape)}: {REMEDY}"
                )


def as_cast(tensor: torch.Tensor, dtype: str | None) -> torch.Tensor:
    """A stored tensor as transformers casts it before it converts; one that will be dequantised is left as it is."""
    return tensor if dtype is None else tensor.to(element_type(dtype))


def tensor_of(data: Bytes, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """Bytes as a tensor."""
    return torch.from_numpy(data).view(element_type(dtype)).view(shape)


def _runs(result: torch.Tensor, sizes: list[int]) -> list[int] | None:
    """Where each run of numbers begins, if each is in one piece."""
    if result.numel() != sum(sizes):
        return None
    starts, base = [], 0
    flat = result.numpy()
    for size in sizes:
        start = int(np.argmax(flat == base))
        if not np.array_equal(flat[start : start + size], np.arange(base, base + size, dtype=flat.dtype)):
            return None
        starts.append(start)
        base += size
    return starts


def _row_order(numbered: torch.Tensor | None, inputs: int) -> torch.Tensor | None:
    """The order of whole rows in one expert's matrix of numbered elements, which may be transposed."""
    if numbered is None or numbered.dim() != 3 or len(numbered) != 1 or numbered.numel() % inputs:
        return None
    for matrix in (numbered[0], numbered[0].T):
        rows = matrix[:, 0] // inputs
        whole = torch.arange(inputs, dtype=matrix.dtype) + rows[:, None] * inputs
        if torch.equal(matrix, whole) and torch.equal(rows.sort().values, torch.arange(len(rows), dtype=rows.dtype)):
            return rows.long()
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

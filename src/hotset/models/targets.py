"""One tensor of an expert in its slot: which stored bytes go where, and how they are converted if they must be."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hotset.errors import FormatError, ModelError
from hotset.formats import Weight, WeightFormat
from hotset.models.encoded import EncodedTensor, naming
from hotset.models.pieces import REMEDY, Piece, Trials, as_cast, tensor_of
from hotset.store import Part
from hotset.store.catalog import Bytes
from hotset.store.header import StoredTensor
from hotset.store.layout import PART_ALIGNMENT_BYTES, round_up

PieceImportance = Callable[[Piece], torch.Tensor | None]
"""How much errors count at each input of the matrix that a piece is the first of; None where they all count alike."""


class Target(ABC):
    """Where the pieces of one tensor go, the same for all experts of a layer."""

    def is_direct(self, pieces: Sequence[Piece]) -> bool:  # noqa: ARG002 - codes are no numbers, nor the reverse
        """Whether the bytes can be read straight into the slot; not unless a target says so."""
        return False

    def places(self, pieces: Sequence[Piece]) -> Iterator[tuple[StoredTensor, int]]:
        """The stored tensors, and where each begins in the slot, if that is so."""
        raise ModelError(f"{pieces[0].flat()[0].name} must be converted")

    @abstractmethod
    def decode(self, pieces: Sequence[Piece], raw: RawBytes, slot: Bytes) -> None:
        """Fill this tensor's part of the slot from the raw bytes of its pieces."""


class RawBytes:
    """The raw bytes of an expert end to end, each tensor aligned, read one after another."""

    def __init__(self, data: Bytes) -> None:
        self._data, self._at = data, 0

    def take(self, tensor: StoredTensor) -> torch.Tensor:
        """The next tensor."""
        begin, end = self._at, self._at + tensor.size_bytes
        self._at = round_up(end, PART_ALIGNMENT_BYTES)
        return tensor_of(self._data[begin:end], tensor.dtype, tensor.shape)


class PlainTarget(Target):
    """A tensor of plain numbers, converted as transformers would have done while loading."""

    def __init__(self, part: Part, trials: Trials) -> None:
        self.part, self.trials = part, trials

    def is_direct(self, pieces: Sequence[Piece]) -> bool:
        """Whether all stored tensors are of the slot's type and stay in one piece."""
        return all(
            all(tensor.dtype == self.part.dtype for tensor in piece.flat()) and self.trials.starts(piece) is not None
            for piece in pieces
        )

    def places(self, pieces: Sequence[Piece]) -> Iterator[tuple[StoredTensor, int]]:
        """The stored tensors where the library's conversion puts them."""
        at = self.part.offset
        for piece in pieces:
            stored = piece.flat()
            for tensor, start in zip(stored, self.trials.starts(piece) or [0], strict=True):
                item = tensor.size_bytes // max(math.prod(tensor.shape), 1)
                yield tensor, at + start * item
            at += sum(tensor.size_bytes for tensor in stored)

    def decode(self, pieces: Sequence[Piece], raw: RawBytes, slot: Bytes) -> None:
        """Run the library's conversion."""
        part, model, sources = self.part, self.trials.model, self.trials.sources
        target = tensor_of(slot[part.offset : part.offset + part.size_bytes], part.dtype, (-1,))
        filled = 0
        for piece in pieces:
            name = piece.row_range.parameter
            # Cast as transformers casts before it converts; what is dequantised stays as it is.
            wanted = None if sources[name].dequantises else part.dtype
            inputs = {p: [as_cast(raw.take(t), wanted) for t in tensors] for p, tensors in piece.stored.items()}
            result = sources[name].convert(name, inputs, model).reshape(-1)
            target[filled : filled + result.numel()].copy_(result)
            filled += result.numel()


class EncodedTarget(Target):
    """A matrix that stays in its format, or in that format's variant for the device."""

    def __init__(self, weight: Weight, trials: Trials) -> None:
        self.weight, self.trials = weight, trials

    def is_direct(self, pieces: Sequence[Piece]) -> bool:
        """Whether the format is the one stored, and the matrices of all pieces are one if they follow each other."""
        stacked = stacked_tensors(pieces, self.trials)
        if row_order(pieces, self.trials) is not None:
            return False
        same = all(self.weight.format.holds(tensor.format) for tensor in stacked)
        return same and self.weight.format.stacks([tensor.shape[-2] for tensor in stacked], self.weight.inputs)

    def places(self, pieces: Sequence[Piece]) -> Iterator[tuple[StoredTensor, int]]:
        """The parts of all matrices, part by part."""
        for number, part in enumerate(self.weight.parts):
            at = part.offset
            for tensor in stacked_tensors(pieces, self.trials):
                yield tensor.parts[number], at
                at += tensor.parts[number].size_bytes

    def decode(self, pieces: Sequence[Piece], raw: RawBytes, slot: Bytes) -> None:
        """Have the format take in all matrices."""
        taken, views = taken_parts(pieces, self.trials, raw), _views(self.weight.parts, slot)
        order = row_order(pieces, self.trials)
        stacked = views if order is None else [torch.empty_like(view) for view in views]
        try:
            self.weight.format.fill(taken, stacked)
        except FormatError:
            _decode_each(taken, stacked_tensors(pieces, self.trials))  # for the name of the one that is damaged
            raise
        for view, part in zip(views, stacked, strict=True):
            if order is not None:
                torch.index_select(part, 0, order, out=view)


class ExpandedTarget(Target):
    """A matrix of plain numbers that the checkpoint has in a format."""

    def __init__(self, part: Part, transposed: bool, trials: Trials) -> None:
        self.part, self.transposed, self.trials = part, transposed, trials

    def decode(self, pieces: Sequence[Piece], raw: RawBytes, slot: Bytes) -> None:
        """Have each matrix decoded by its own format."""
        (whole,) = _views([self.part], slot)
        rows = whole.T if self.transposed else whole
        order = row_order(pieces, self.trials)
        stacked = rows if order is None else torch.empty_like(rows)
        first = 0
        tensors = stacked_tensors(pieces, self.trials)
        for tensor, (stored, parts) in zip(tensors, taken_parts(pieces, self.trials, raw), strict=True):
            last = first + stored.shape(parts)[0]
            with naming(tensor):
                stored.decode(parts, stacked[first:last])
            first = last
        if order is not None:
            rows.copy_(stacked[order])


class MadeTarget(Target):
    """A matrix in a format that is made of the checkpoint's plain numbers."""

    def __init__(self, weight: Weight, transposed: bool, trials: Trials, importance: PieceImportance) -> None:
        self.weight, self.transposed, self.importance = weight, transposed, importance
        shape = (weight.inputs, weight.outputs) if transposed else (weight.outputs, weight.inputs)
        self.plain = PlainTarget(Part("", shape, weight.format.dtype), trials)

    def decode(self, pieces: Sequence[Piece], raw: RawBytes, slot: Bytes) -> None:
        """Convert as transformers would, and encode the result."""
        part = self.plain.part
        numbers = np.empty(part.size_bytes, np.uint8)
        self.plain.decode(pieces, raw, numbers)
        matrix = tensor_of(numbers, part.dtype, part.shape)
        rows, importance = matrix.T if self.transposed else matrix, self.importance(pieces[0])
        self.weight.format.encode(rows, _views(self.weight.parts, slot), importance)


def _views(parts: Sequence[Part], slot: Bytes) -> list[torch.Tensor]:
    """The parts of a slot as tensors."""
    return [tensor_of(slot[p.offset : p.offset + p.size_bytes], p.dtype, p.shape) for p in parts]


def taken_parts(
    pieces: Sequence[Piece], trials: Trials, raw: RawBytes
) -> list[tuple[WeightFormat, list[torch.Tensor]]]:
    """The encoded matrices of an expert, each with its format and parts, in the order in which they are stacked."""
    taken = {id(one): _parts(one, raw) for piece in pieces for one in piece.flat()}
    return [taken[id(tensor)] for tensor in stacked_tensors(pieces, trials)]


def _decode_each(taken: Sequence[tuple[WeightFormat, list[torch.Tensor]]], tensors: Sequence[EncodedTensor]) -> None:
    """Decode matrices one by one; the first that cannot be is named."""
    for tensor, (stored, parts) in zip(tensors, taken, strict=True):
        with naming(tensor):
            stored.decode(parts, torch.empty(stored.shape(parts)))


def _parts(tensor: Any, raw: RawBytes) -> tuple[WeightFormat, list[torch.Tensor]]:
    """The parts of one matrix, without the dimension that counts experts."""
    shapes = [part.shape for part in tensor.format.parts(*tensor.shape[-2:])]
    return tensor.format, [raw.take(part).view(shape) for part, shape in zip(tensor.parts, shapes, strict=True)]


def stacked_tensors(pieces: Sequence[Piece], trials: Trials) -> list[EncodedTensor]:
    """Encoded matrices in the order in which the library puts them below each other."""
    found: list[EncodedTensor] = []
    for piece in pieces:
        starts, tensors = trials.starts(piece), [t for t in piece.flat() if isinstance(t, EncodedTensor)]
        if starts is None and len(pieces) == 1 and trials.row_order(piece) is not None:
            return tensors
        if starts is None or len(starts) != len(tensors):
            raise ModelError(
                f"{piece.flat()[0].name} is in a weight format, and {piece.row_range.parameter} is made of it by more "
                "than a rearrangement of rows: use the original weights"
            )
        found += [tensors[i] for i in sorted(range(len(tensors)), key=starts.__getitem__)]
    return found


def row_order(pieces: Sequence[Piece], trials: Trials) -> torch.Tensor | None:
    """Which rows of the stacked matrices are which outputs; None if all are where they are."""
    if len(pieces) != 1 or trials.starts(pieces[0]) is not None:
        return None
    order = trials.row_order(pieces[0])
    return None if order is None or torch.equal(order, torch.arange(len(order))) else order


def encoded_as(experts: Sequence[Sequence[Piece]]) -> list[WeightFormat]:
    """The formats that the pieces of all experts are in; none for plain numbers."""
    tensors = [tensor for pieces in experts for piece in pieces for tensor in piece.flat()]
    found = {tensor.format: tensor for tensor in tensors if isinstance(tensor, EncodedTensor)}
    plain = next((tensor for tensor in tensors if not isinstance(tensor, EncodedTensor)), None)
    if found and plain is not None:
        stored, other = next(iter(found.items()))
        raise ModelError(
            f"{other.name} is stored as {stored.spec} and {plain.name} as plain numbers, and all experts of a layer "
            "must be alike: use a checkpoint in which they are"
        )
    return list(found)


def check_encoded(experts: Sequence[Sequence[Piece]], outputs: int, inputs: int) -> None:
    """Raise ModelError unless the pieces of every expert make a matrix of so many outputs and inputs."""
    for pieces in experts:
        tensors = [tensor for piece in pieces for tensor in piece.flat()]
        if sum(t.shape[-2] for t in tensors) != outputs or any(t.shape[-1] != inputs for t in tensors):
            shapes = " and ".join(str(list(t.shape[-2:])) for t in tensors)
            raise ModelError(f"{tensors[0].name} is {shapes}, and the model has {[outputs, inputs]}: {REMEDY}")


def plain_dtype(experts: Sequence[Sequence[Piece]], trials: Trials) -> str:
    """The type of one tensor of plain numbers in the slot: the same for every expert, for a slot can take any."""
    found: dict[str, Piece] = {}
    for piece in (piece for pieces in experts for piece in pieces):
        found.setdefault(trials.dtype(piece), piece)
    if len(found) > 1:
        (one, first), (other, second) = list(found.items())[:2]
        raise ModelError(
            f"{second.flat()[0].name} becomes {other} and {first.flat()[0].name} {one}, and all experts of a layer "
            "must be of one type: load the model with transformers, save it with save_pretrained, and use that"
        )
    return next(iter(found))

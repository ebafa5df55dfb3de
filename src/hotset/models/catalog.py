"""Builds the catalog of a checkpoint: the byte ranges of every expert, found once, without reading a weight.

Whether bytes can be used as they lie is found by running the library's conversion on numbered elements instead of
weights: where every source stays in one piece, its bytes are read straight to that place. What is transposed, of
another type or quantised is read as it is and converted on arrival.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hotset.errors import ModelError
from hotset.models.checkpoint import ParameterSource
from hotset.models.pieces import Piece, Trials, as_cast, check_shape, check_shapes, tensor_of
from hotset.models.site import Site, SitePart, Take
from hotset.store import Catalog, LayerSource, Part, Segment, SlotLayout
from hotset.store.catalog import Bytes
from hotset.store.header import StoredTensor
from hotset.store.layout import PART_ALIGNMENT_BYTES, round_up

Sources = dict[str, ParameterSource]


class CatalogBuilder:
    """Turns sites and their sources into a catalog."""

    def __init__(self, model: Any, sources: Sources) -> None:
        self.model = model
        self.sources = sources
        self.files: dict[Path, int] = {}
        self._trials = Trials(model, sources)

    def build(self, sites: Sequence[Site]) -> Catalog:
        """The catalog of all sites."""
        layers = tuple(self._layer(site) for site in sites)
        return Catalog(tuple(self.files), layers)

    def _layer(self, site: Site) -> LayerSource:
        pieces = [[self._pieces(part, expert, site) for part in site.parts] for expert in range(site.experts)]
        order = sorted(range(len(site.parts)), key=lambda i: self._position(pieces[0][i][0]))
        parts = [site.parts[i] for i in order]
        pieces = [[expert[i] for i in order] for expert in pieces]
        check_shapes(pieces)
        dtypes = [self._dtype([expert[i] for expert in pieces]) for i in range(len(parts))]
        layout = SlotLayout.of([Part(p.name, p.shape, dtype) for p, dtype in zip(parts, dtypes, strict=True)])
        if all(self._direct(layout, expert) for expert in pieces):
            return LayerSource(layout, [self._straight(layout, expert) for expert in pieces])
        experts = [_packed_segments(self, expert) for expert in pieces]
        return LayerSource(layout, experts, Decoder(self, layout, pieces))

    def _pieces(self, part: SitePart, expert: int, site: Site) -> list[Piece]:
        pieces = []
        for take in part.takes(expert):
            source = self.sources[take.parameter]
            if source.converter is None:
                (key, (tensor, *_)) = next(iter(source.tensors.items()))
                check_shape(tensor, self.model._hotset_shapes[take.parameter], take.parameter)
                pieces.append(Piece(take, {key: [_rows(tensor, take.first, take.last)]}))
            else:
                stored = {p: [self._of_expert(t, take, site)] for p, t in source.tensors.items()}
                pieces.append(Piece(take, stored))
        return pieces

    def _of_expert(self, tensors: list[StoredTensor], take: Take, site: Site) -> StoredTensor:
        if len(tensors) == site.experts:
            return tensors[take.first]
        if len(tensors) == 1 and tensors[0].shape and tensors[0].shape[0] == site.experts:
            return _rows(tensors[0], take.first, take.last)
        raise ModelError(
            f"{take.parameter} is stored in a way that hotset cannot cut into experts "
            f"({len(tensors)} tensors for {site.experts} experts): load the model with transformers, save it with "
            "save_pretrained, and use that"
        )

    def _position(self, piece: Piece) -> tuple[int, int]:
        first = min(piece.flat(), key=lambda t: t.offset)
        return self.file(first.file), first.offset

    def file(self, path: Path) -> int:
        """The number of a file in the catalog."""
        return self.files.setdefault(path, len(self.files))

    def _dtype(self, experts: list[list[Piece]]) -> str:
        """The type of one part in the slot: the same for every expert, for a slot can take any of them."""
        found: dict[str, Piece] = {}
        for piece in (piece for pieces in experts for piece in pieces):
            found.setdefault(self._trials.dtype(piece), piece)
        if len(found) > 1:
            (one, first), (other, second) = list(found.items())[:2]
            raise ModelError(
                f"{second.flat()[0].name} becomes {other} and {first.flat()[0].name} {one}, and all experts of a layer "
                "must be of one type: load the model with transformers, save it with save_pretrained, and use that"
            )
        return next(iter(found))

    def _direct(self, layout: SlotLayout, expert: list[list[Piece]]) -> bool:
        """Whether the bytes of an expert can be read straight into a slot."""
        return all(
            all(tensor.dtype == part.dtype for tensor in piece.flat()) and self._trials.starts(piece) is not None
            for part, pieces in zip(layout.parts, expert, strict=True)
            for piece in pieces
        )

    def _straight(self, layout: SlotLayout, expert: list[list[Piece]]) -> tuple[Segment, ...]:
        segments = []
        for part, pieces in zip(layout.parts, expert, strict=True):
            at = part.offset
            for piece in pieces:
                stored = piece.flat()
                for tensor, start in zip(stored, self._trials.starts(piece) or [0], strict=True):
                    item = tensor.size_bytes // max(math.prod(tensor.shape), 1)
                    segments.append(
                        Segment(self.file(tensor.file), tensor.offset, tensor.size_bytes, at + start * item)
                    )
                at += sum(tensor.size_bytes for tensor in stored)
        return tuple(segments)


class Decoder:
    """Converts the raw bytes of an expert on arrival, as transformers would have done while loading."""

    def __init__(self, builder: CatalogBuilder, layout: SlotLayout, experts: list[list[list[Piece]]]) -> None:
        self.model, self.sources = builder.model, builder.sources
        self.layout, self.experts = layout, experts

    def __call__(self, expert: int, raw: Bytes, slot: Bytes) -> None:
        """Fill the slot from the raw bytes of the expert of this number."""
        at = 0
        for part, pieces in zip(self.layout.parts, self.experts[expert], strict=True):
            target = tensor_of(slot[part.offset : part.offset + part.size_bytes], part.dtype, (-1,))
            filled = 0
            for piece in pieces:
                inputs, at = self._inputs(piece, raw, at, part.dtype)
                name = piece.take.parameter
                result = self.sources[name].convert(name, inputs, self.model).reshape(-1)
                target[filled : filled + result.numel()].copy_(result)
                filled += result.numel()

    def _inputs(self, piece: Piece, raw: Bytes, at: int, dtype: str) -> tuple[dict[str, list[torch.Tensor]], int]:
        """The stored tensors of a piece, cast as transformers casts them before it converts, and where they end."""
        wanted = None if self.sources[piece.take.parameter].dequantises else dtype
        inputs: dict[str, list[torch.Tensor]] = {}
        for pattern, tensors in piece.stored.items():
            inputs[pattern] = []
            for t in tensors:
                stored = tensor_of(raw[at : at + t.size_bytes], t.dtype, t.shape)
                inputs[pattern].append(as_cast(stored, wanted))
                at = round_up(at + t.size_bytes, PART_ALIGNMENT_BYTES)
        return inputs, at


def _packed_segments(builder: CatalogBuilder, expert: list[list[Piece]]) -> tuple[Segment, ...]:
    """The raw bytes of an expert end to end, each tensor aligned."""
    segments, at = [], 0
    for pieces in expert:
        for tensor in (tensor for piece in pieces for tensor in piece.flat()):
            segments.append(Segment(builder.file(tensor.file), tensor.offset, tensor.size_bytes, at))
            at = round_up(at + tensor.size_bytes, PART_ALIGNMENT_BYTES)
    return tuple(segments)


def _rows(tensor: StoredTensor, first: int, last: int) -> StoredTensor:
    """Some rows of a stored tensor."""
    row_bytes = tensor.size_bytes // tensor.shape[0]
    shape = (last - first, *tensor.shape[1:])
    start, size = tensor.offset + first * row_bytes, (last - first) * row_bytes
    return StoredTensor(tensor.file, tensor.dtype, shape, start, size, tensor.name)

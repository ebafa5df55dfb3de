"""Builds the catalog of a checkpoint: the byte ranges of every expert, found once, without reading a weight.

Whether bytes can be used as they lie is found by running the library's conversion on numbered elements instead of
weights: where every source stays in one piece, its bytes are read straight to that place. What is transposed, of
another type or quantised is read as it is and converted on arrival.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotset.errors import ModelError
from hotset.models.checkpoint import ParameterSource
from hotset.models.site import Site, SitePart, Take
from hotset.store import Catalog, LayerSource, Part, Segment, SlotLayout
from hotset.store.catalog import Bytes
from hotset.store.header import StoredTensor
from hotset.store.layout import PART_ALIGNMENT_BYTES, round_up

Sources = dict[str, ParameterSource]


@dataclass(frozen=True, slots=True)
class Piece:
    """The stored tensors of one take of one expert."""

    take: Take
    stored: dict[str, list[StoredTensor]]

    def flat(self) -> list[StoredTensor]:
        """All stored tensors in order."""
        return [tensor for tensors in self.stored.values() for tensor in tensors]


class CatalogBuilder:
    """Turns sites and their sources into a catalog."""

    def __init__(self, model: Any, sources: Sources) -> None:
        self.model = model
        self.sources = sources
        self.files: dict[Path, int] = {}
        self._runs: dict[Any, list[int] | None] = {}
        self._dtypes: dict[Any, str] = {}

    def build(self, sites: Sequence[Site]) -> Catalog:
        """The catalog of all sites."""
        layers = tuple(self._layer(site) for site in sites)
        return Catalog(tuple(self.files), layers)

    def _layer(self, site: Site) -> LayerSource:
        pieces = [[self._pieces(part, expert, site) for part in site.parts] for expert in range(site.experts)]
        order = sorted(range(len(site.parts)), key=lambda i: self._position(pieces[0][i][0]))
        parts = [site.parts[i] for i in order]
        pieces = [[expert[i] for i in order] for expert in pieces]
        layout = SlotLayout.of([Part(p.name, p.shape, self._dtype(p, pieces[0][i])) for i, p in enumerate(parts)])
        if all(self._direct(part, each) for part, each in zip(layout.parts, pieces[0], strict=True)):
            return LayerSource(layout, [self._straight(layout, expert) for expert in pieces])
        experts = [_packed_segments(self, expert) for expert in pieces]
        return LayerSource(layout, experts, Decoder(self, layout, pieces[0]))

    def _pieces(self, part: SitePart, expert: int, site: Site) -> list[Piece]:
        pieces = []
        for take in part.takes(expert):
            source = self.sources[take.parameter]
            if source.converter is None:
                (key, (tensor,)) = next(iter(source.tensors.items()))
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

    def _dtype(self, part: SitePart, pieces: list[Piece]) -> str:
        """The type in the slot: the parameter's, or what dequantisation makes of it."""
        name = pieces[0].take.parameter
        stored = pieces[0].flat()
        expected = str(self.model._hotset_dtypes[name]).removeprefix("torch.")
        if len(stored) == 1 or all(t.dtype.startswith(("float32", "float16", "bfloat16", "float64")) for t in stored):
            return expected
        key = (part.name, tuple((t.dtype, t.shape) for t in stored))
        if key not in self._dtypes:
            zeros = {p: [_zeros(t) for t in tensors] for p, tensors in pieces[0].stored.items()}
            result = self.sources[name].convert(name, zeros, self.model)
            self._dtypes[key] = str(result.dtype).removeprefix("torch.")
        return self._dtypes[key]

    def _direct(self, part: Part, pieces: list[Piece]) -> bool:
        return all(t.dtype == part.dtype for piece in pieces for t in piece.flat()) and all(
            self._run_starts(piece) is not None for piece in pieces
        )

    def _run_starts(self, piece: Piece) -> list[int] | None:
        """Where each stored tensor begins in the converted one, in elements; None if one does not stay in one piece."""
        source = self.sources[piece.take.parameter]
        if source.converter is None:
            return [0]
        key = (id(source.converter), tuple((p, tuple(t.shape for t in s)) for p, s in piece.stored.items()))
        if key not in self._runs:
            self._runs[key] = self._probe(piece, source)
        return self._runs[key]

    def _probe(self, piece: Piece, source: ParameterSource) -> list[int] | None:
        numbered: dict[str, list[torch.Tensor]] = {}
        end = 0
        for pattern, tensors in piece.stored.items():
            numbered[pattern] = []
            for tensor in tensors:
                size = math.prod(tensor.shape)
                numbered[pattern].append(torch.arange(end, end + size, dtype=torch.int32).view(tensor.shape))
                end += size
        try:
            result = source.convert(piece.take.parameter, numbered, self.model).reshape(-1)
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return None  # a conversion that is arithmetic, not a rearrangement
        return _starts(result, [math.prod(t.shape) for t in piece.flat()])

    def _straight(self, layout: SlotLayout, expert: list[list[Piece]]) -> tuple[Segment, ...]:
        segments = []
        for part, pieces in zip(layout.parts, expert, strict=True):
            at = part.offset
            for piece in pieces:
                stored = piece.flat()
                for tensor, start in zip(stored, self._run_starts(piece) or [0], strict=True):
                    item = tensor.size_bytes // max(math.prod(tensor.shape), 1)
                    segments.append(
                        Segment(self.file(tensor.file), tensor.offset, tensor.size_bytes, at + start * item)
                    )
                at += sum(tensor.size_bytes for tensor in stored)
        return tuple(segments)


class Decoder:
    """Converts the raw bytes of an expert on arrival, as transformers would have done while loading."""

    def __init__(self, builder: CatalogBuilder, layout: SlotLayout, pieces: list[list[Piece]]) -> None:
        self.model, self.sources = builder.model, builder.sources
        self.layout, self.pieces = layout, pieces

    def __call__(self, raw: Bytes, slot: Bytes) -> None:
        """Fill the slot from the raw bytes of its expert."""
        at = 0
        for part, pieces in zip(self.layout.parts, self.pieces, strict=True):
            target = _tensor(slot[part.offset : part.offset + part.size_bytes], part.dtype, (-1,))
            filled = 0
            for piece in pieces:
                inputs: dict[str, list[torch.Tensor]] = {}
                for pattern, tensors in piece.stored.items():
                    inputs[pattern] = []
                    for t in tensors:
                        inputs[pattern].append(_tensor(raw[at : at + t.size_bytes], t.dtype, t.shape))
                        at = round_up(at + t.size_bytes, PART_ALIGNMENT_BYTES)
                name = piece.take.parameter
                result = self.sources[name].convert(name, inputs, self.model).reshape(-1)
                target[filled : filled + result.numel()].copy_(result)
                filled += result.numel()


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
    return StoredTensor(tensor.file, tensor.dtype, shape, tensor.offset + first * row_bytes, (last - first) * row_bytes)


def _starts(result: torch.Tensor, sizes: list[int]) -> list[int] | None:
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


def _tensor(data: Bytes, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(data).view(getattr(torch, dtype)).view(shape)


def _zeros(tensor: StoredTensor) -> torch.Tensor:
    return _tensor(np.zeros(tensor.size_bytes, np.uint8), tensor.dtype, tensor.shape)

"""Builds the catalog of a checkpoint: the byte ranges of every expert, found once, without reading a weight.

Whether bytes can be used as they lie is found by running the library's conversion on numbered elements instead of
weights: where every source stays in one piece, its bytes are read straight to that place. What is transposed, of
another type or quantised is read as it is and converted on arrival. A matrix that the checkpoint has in a weight format
stays in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hotset.errors import ModelError
from hotset.formats import WeightFormat, laid_out, parse, weight_of
from hotset.formats.dense import Dense
from hotset.models.checkpoint import ParameterSource
from hotset.models.encoded import EncodedTensor, rows_of
from hotset.models.layers import LayerPart, MoeLayer, RowRange
from hotset.models.moments import Moments
from hotset.models.pieces import Piece, Trials, check_shape, check_shapes
from hotset.models.targets import (
    EncodedTarget,
    ExpandedTarget,
    MadeTarget,
    PieceImportance,
    PlainTarget,
    RawBytes,
    Target,
    check_encoded,
    encoded_as,
    plain_dtype,
    stacked_tensors,
)
from hotset.options.run import AUTO, DENSE
from hotset.store import Catalog, LayerSource, Matrix, Part, Segment, SlotLayout
from hotset.store.catalog import Bytes
from hotset.store.header import StoredTensor
from hotset.store.layout import PART_ALIGNMENT_BYTES, round_up

Sources = dict[str, ParameterSource]
STORED_AS = "stored_as"
"""Of what a catalog says: the formats of experts that are not plain numbers in their checkpoint."""
EXPANDED = "expanded"
"""And which of them become plain numbers when they are read, by request or because nothing else can serve them."""


class CatalogBuilder:
    """Turns MoE layers and their sources into a catalog for a kind of device."""

    def __init__(
        self,
        model: Any,
        sources: Sources,
        kind: str = "cpu",
        experts: str = AUTO,
        importance: Moments | None = None,
    ) -> None:
        self.model, self.sources, self.kind, self.experts = model, sources, kind, experts
        self.importance = importance
        self.files: dict[Path, int] = {}
        self._trials = Trials(model, sources)
        self._formats: set[str] = set()
        self._expanded: set[str] = set()

    def build(self, moe_layers: Sequence[MoeLayer]) -> Catalog:
        """The catalog of all MoE layers."""
        layers = tuple(self._layer(number, moe_layer) for number, moe_layer in enumerate(moe_layers))
        meta = {STORED_AS: " and ".join(sorted(self._formats)), EXPANDED: " and ".join(sorted(self._expanded))}
        return Catalog(tuple(self.files), layers, meta=meta)

    def _layer(self, number: int, moe_layer: MoeLayer) -> LayerSource:
        pieces = [
            [self._pieces(part, expert, moe_layer) for part in moe_layer.parts] for expert in range(moe_layer.experts)
        ]
        order = sorted(range(len(moe_layer.parts)), key=lambda i: self._position(pieces[0][i][0]))
        parts = [moe_layer.parts[i] for i in order]
        pieces = [[expert[i] for i in order] for expert in pieces]
        check_shapes(pieces)
        by_part = [[expert[i] for expert in pieces] for i in range(len(parts))]
        layout = self._layout(moe_layer, parts, by_part)
        targets = [
            self._target(
                layout,
                part.name,
                moe_layer.spec.is_transposed(part.name),
                bool(encoded_as(experts)),
                self._importance(number, part, moe_layer.experts),
            )
            for part, experts in zip(parts, by_part, strict=True)
        ]
        if all(t.is_direct(few) for expert in pieces for t, few in zip(targets, expert, strict=True)):
            return LayerSource(layout, [self._straight(targets, expert) for expert in pieces])
        experts = [_packed_segments(self, expert) for expert in pieces]
        return LayerSource(layout, experts, Decoder(targets, pieces))

    def _layout(
        self, moe_layer: MoeLayer, parts: Sequence[LayerPart], pieces: Sequence[Sequence[list[Piece]]]
    ) -> SlotLayout:
        """How an expert lies in a slot: plain numbers, and matrices in the variant of their format for the device."""
        laid: list[Part] = []
        matrices: list[Matrix] = []
        for part, experts in zip(parts, pieces, strict=True):
            chosen = self._format(moe_layer, part, experts)
            if isinstance(chosen, Dense):
                laid.append(Part(part.name, part.shape, chosen.dtype))
                continue
            own, matrix = laid_out(part.name, chosen, *self._sides(moe_layer, part))
            laid += own
            matrices += [matrix] if matrix is not None else []
        return SlotLayout.of(laid, matrices)

    def _format(self, moe_layer: MoeLayer, part: LayerPart, experts: Sequence[list[Piece]]) -> WeightFormat:
        """The format that a tensor of an expert has in its slot."""
        found = encoded_as(experts)
        if not found:
            plain = Dense(plain_dtype(experts, self._trials))
            made = self.experts not in (AUTO, DENSE) and part.name in (moe_layer.spec.up, moe_layer.spec.down)
            return replace(parse(self.experts), dtype=plain.dtype) if made else plain
        if self.experts not in (AUTO, DENSE):
            raise ModelError(
                f"{experts[0][0].flat()[0].name} is stored as {found[0].name} already: pack the original weights, or "
                "leave them as they are"
            )
        self._formats |= {each.name for each in found}
        check_encoded(experts, *self._sides(moe_layer, part))
        stacked = [tensor.shape[-2] for tensor in stacked_tensors(experts[0], self._trials)]
        if self.experts == DENSE or len(found) > 1 or not found[0].served:  # a slot can take any expert
            self._expanded |= {each.title for each in found}
            return Dense(found[0].dtype)
        return found[0].on(self.kind, stacked)

    def _sides(self, moe_layer: MoeLayer, part: LayerPart) -> tuple[int, int]:
        """The outputs and inputs of a matrix."""
        outputs, inputs = part.shape[::-1] if moe_layer.spec.is_transposed(part.name) else part.shape
        return outputs, inputs

    def _importance(self, layer: int, part: LayerPart, experts: int) -> PieceImportance:
        """What is known of the inputs of a matrix, by the rows of the model that it is made of."""
        known = self.importance
        if known is None:
            return lambda _: None
        numbers = {part.row_ranges(expert)[0]: expert for expert in range(experts)}
        return lambda piece: known.of(layer, part.name, numbers[piece.row_range])

    def _target(
        self, layout: SlotLayout, name: str, transposed: bool, encoded: bool, importance: PieceImportance
    ) -> Target:
        if layout.matrix(name) is None:
            part = layout.part(name)
            return ExpandedTarget(part, transposed, self._trials) if encoded else PlainTarget(part, self._trials)
        weight = weight_of(layout, name)
        if encoded:
            return EncodedTarget(weight, self._trials)
        return MadeTarget(weight, transposed, self._trials, importance)

    def _pieces(self, part: LayerPart, expert: int, moe_layer: MoeLayer) -> list[Piece]:
        pieces = []
        for row_range in part.row_ranges(expert):
            source = self.sources[row_range.parameter]
            if source.converter is None:
                (key, (tensor, *_)) = next(iter(source.tensors.items()))
                if not isinstance(tensor, EncodedTensor):
                    check_shape(tensor, self.model._hotset_shapes[row_range.parameter], row_range.parameter)
                pieces.append(Piece(row_range, {key: [rows_of(tensor, row_range.first, row_range.last)]}))
            else:
                stored = {p: [self._of_expert(t, row_range, moe_layer)] for p, t in source.tensors.items()}
                pieces.append(Piece(row_range, stored))
        return pieces

    def _of_expert(self, tensors: list[StoredTensor], row_range: RowRange, moe_layer: MoeLayer) -> StoredTensor:
        if len(tensors) == moe_layer.experts:
            return tensors[row_range.first]
        if len(tensors) == 1 and tensors[0].shape and tensors[0].shape[0] == moe_layer.experts:
            return rows_of(tensors[0], row_range.first, row_range.last)
        raise ModelError(
            f"{row_range.parameter} is stored in a way that hotset cannot cut into experts "
            f"({len(tensors)} tensors for {moe_layer.experts} experts): load the model with transformers, save it with "
            "save_pretrained, and use that"
        )

    def _position(self, piece: Piece) -> tuple[int, int]:
        first = min(piece.flat(), key=lambda t: t.offset)
        return self.file(first.file), first.offset

    def file(self, path: Path) -> int:
        """The number of a file in the catalog."""
        return self.files.setdefault(path, len(self.files))

    def _straight(self, targets: Sequence[Target], expert: Sequence[Sequence[Piece]]) -> tuple[Segment, ...]:
        return tuple(
            Segment(self.file(tensor.file), tensor.offset, tensor.size_bytes, at)
            for target, pieces in zip(targets, expert, strict=True)
            for tensor, at in target.places(pieces)
        )


class Decoder:
    """Converts the raw bytes of an expert on arrival."""

    def __init__(self, targets: Sequence[Target], experts: Sequence[Sequence[Sequence[Piece]]]) -> None:
        self.targets, self.experts = targets, experts

    def __call__(self, expert: int, raw: Bytes, slot: Bytes) -> None:
        """Fill the slot from the raw bytes of the expert of this number."""
        source = RawBytes(raw)
        for target, pieces in zip(self.targets, self.experts[expert], strict=True):
            target.decode(pieces, source, slot)


def _packed_segments(builder: CatalogBuilder, expert: Sequence[Sequence[Piece]]) -> tuple[Segment, ...]:
    """The raw bytes of an expert end to end, each tensor aligned."""
    segments, at = [], 0
    for tensor in (tensor for pieces in expert for piece in pieces for tensor in piece.read()):
        segments.append(Segment(builder.file(tensor.file), tensor.offset, tensor.size_bytes, at))
        at = round_up(at + tensor.size_bytes, PART_ALIGNMENT_BYTES)
    return tuple(segments)

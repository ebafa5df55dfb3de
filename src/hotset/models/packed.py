"""Whether a packed store is of the model that is about to run on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from hotset.errors import ModelError
from hotset.formats import element_type, weight_of
from hotset.models.layers import LayerPart, MoeLayer
from hotset.store import Catalog, LayerSource, SlotLayout
from hotset.store.dense_check import check_dense
from hotset.store.packed import is_packed, open_packed


def check_if_packed(folder: Path | None) -> Path | None:
    """Check what transformers reads of a packed store against its digests; returns the folder if it is one."""
    if folder is None or not is_packed(folder):
        return None
    check_dense(folder)
    return folder


def open_fitting(folder: Path, moe_layers: Sequence[MoeLayer], dtypes: Mapping[str, torch.dtype]) -> Catalog:
    """The catalog of a packed store that fits the model, given the types of the experts' parameters."""
    catalog = open_packed(folder)
    check_packed(catalog, moe_layers, dtypes)
    return catalog


def refuse_expansion(catalog: Catalog) -> None:
    """Raise ModelError for a pack whose experts are in a format: they are used as they were packed."""
    packed = next((matrix for layer in catalog.layers for matrix in layer.layout.matrices), None)
    if packed is not None:
        raise ModelError(
            f"{catalog.files[0]} holds its experts as {packed.format.partition(':')[0]}, and those of a pack are not "
            "expanded: leave out --experts dense, or pack the model again with it"
        )


def check_packed(catalog: Catalog, moe_layers: Sequence[MoeLayer], dtypes: Mapping[str, torch.dtype]) -> None:
    """Raise ModelError where layers, experts, shapes or types are not those of the model."""
    store, names = catalog.files[0], catalog.meta["layers"].split("\n")
    wanted = [moe_layer.name for moe_layer in moe_layers]
    if names != wanted:
        odd = next((a for a, b in zip(wanted, names, strict=False) if a != b), f"{len(wanted)} layers")
        raise _misfit(store, f"the model has {odd}, which the pack has not ({len(names)} layers)")
    for moe_layer, source in zip(moe_layers, catalog.layers, strict=True):
        _check_layer(store, moe_layer, source, dtypes)
    asked = dtype_name(dtypes)
    if catalog.meta.get("dtype") != asked:
        raise ModelError(
            f"{store} was packed for a model in {catalog.meta.get('dtype')}, and it is to run in {asked}: pass "
            f'dtype="auto" to load it as it was packed, or pack the model again with --dtype {asked}'
        )


def dtype_name(dtypes: Mapping[str, torch.dtype]) -> str:
    """The type of the experts' parameters in a word; a model may mix them."""
    return "+".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes.values()}))


def _check_layer(store: Path, moe_layer: MoeLayer, source: LayerSource, dtypes: Mapping[str, torch.dtype]) -> None:
    if len(source.experts) != moe_layer.experts:
        raise _misfit(store, f"{moe_layer.name} has {moe_layer.experts} experts, and {len(source.experts)} in the pack")
    packed = {part.name for part in source.layout.parts}
    for part in moe_layer.parts:
        if not _fits(part, moe_layer, source.layout, dtypes):
            raise _misfit(store, f"{part.name} of {moe_layer.name} is not {list(part.shape)} in the pack")
        matrix = source.layout.matrix(part.name)
        packed -= {part.name} if matrix is None else set(matrix.parts)
    if packed:
        raise _misfit(store, f"the pack has {next(iter(packed))} in {moe_layer.name}, which the model has not")


def _fits(part: LayerPart, moe_layer: MoeLayer, layout: SlotLayout, dtypes: Mapping[str, torch.dtype]) -> bool:
    """Whether a pack has a tensor of an expert as the model has it, if in another format."""
    matrix = layout.matrix(part.name)
    if matrix is None:
        return any((other.name, other.shape) == (part.name, part.shape) for other in layout.parts)
    weight = weight_of(layout, part.name)
    shape = (weight.outputs, weight.inputs)
    same = shape[::-1] if moe_layer.spec.is_transposed(part.name) else shape
    return same == part.shape and element_type(weight.format.dtype) == dtypes[part.row_ranges(0)[0].parameter]


def _misfit(store: Path, why: str) -> ModelError:
    return ModelError(f"{store} is of another model than config.json beside it: {why}; pack the model again")

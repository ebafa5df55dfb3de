"""`hotset.attach` and `hotset.detach`: the same for a model that is already loaded, and back again."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotset.cache.plan import SlotPlan
from hotset.engine.memory import available_memory_bytes
from hotset.errors import BudgetError, ModelError
from hotset.models.account import bound_library_caches
from hotset.models.connect import connect, watch
from hotset.models.deferred import remember_shapes
from hotset.models.find_layers import find_moe_layers
from hotset.models.handle import Handle
from hotset.models.layers import MoeLayer
from hotset.models.learning import begin, read_profile
from hotset.models.memory_plan import MemoryPlanner
from hotset.models.placeholders import Placeholder, install_placeholders
from hotset.options import Place, RunOptions, takes_options
from hotset.owner import Owner
from hotset.profile import Profile
from hotset.shape import format_size
from hotset.store import Catalog, LayerSource, Part, SlotLayout
from hotset.store.catalog import Bytes
from hotset.store.pack import Packer
from hotset.store.packed import open_packed
from hotset.store.plan import PackLayer, PackPlan


@takes_options(RunOptions, Place.ATTACH)
def attach(model: Any, options: RunOptions) -> Any:
    """Keep only a budget's worth of a loaded model's experts in memory; returns the model.

    The experts are written to a temporary folder, in `spill` if given; it goes with `detach`, `model.hotset.close`, the
    model itself or the process.
    """
    if isinstance(getattr(model, "hotset", None), Handle):
        raise ModelError("hotset is attached to this model already: hotset.detach(model) first")
    options = replace(options, device=str(next(model.parameters()).device))
    moe_layers = find_moe_layers(model)
    try:
        return _attach(model, moe_layers, options)
    except BaseException:
        _forget(model)
        raise


def _attach(model: Any, moe_layers: list[MoeLayer], options: RunOptions) -> Any:
    remember_shapes(model, {name for moe_layer in moe_layers for name in moe_layer.parameters()})
    layouts = [layout_of(model, moe_layer) for moe_layer in moe_layers]
    known = read_profile(options)
    bound_library_caches()
    planner = MemoryPlanner(options, loaded=True)
    pairs = zip(moe_layers, layouts, strict=True)
    unwritten = Catalog((), tuple(LayerSource(layout, [()] * moe_layer.experts) for moe_layer, layout in pairs))
    if planner(model, moe_layers, unwritten):
        handle = watch(model, moe_layers, _planned(planner), options, known)
    else:
        handle = _detach_experts(model, moe_layers, layouts, planner, known)
    handle.warn(*planner.notes)
    try:
        begin(handle, options)
    except BaseException:
        detach(model)  # the only copy of the experts is ours now
        raise
    return model


def detach(model: Any) -> Any:
    """Give a model all its experts back, bit for bit, and end hotset's part in it; returns the model."""
    handle = getattr(model, "hotset", None)
    if not isinstance(handle, Handle):
        raise ModelError("hotset is not attached to this model")
    handle.check_open()
    if handle.engine.offload is not None:
        whole = _gather(model, handle)
        handle.close()
        for placeholder in reversed(handle.placeholders):
            placeholder.fill(whole[placeholder.name])
    handle.close()
    handle.patches.lift()
    _forget(model)
    return model


def _forget(model: Any) -> None:
    for name in ("hotset", "_hotset_shapes", "_hotset_dtypes"):
        model.__dict__.pop(name, None)


def layout_of(model: Any, moe_layer: MoeLayer) -> SlotLayout:
    """How an expert of a model in memory lies in a slot."""
    parts = []
    for part in moe_layer.parts:
        dtype = model._hotset_dtypes[part.row_ranges(0)[0].parameter]
        parts.append(Part(part.name, part.shape, str(dtype).removeprefix("torch.")))
    return SlotLayout.of(parts)


def blocks_of(
    model: Any, moe_layers: Sequence[MoeLayer], layouts: Sequence[SlotLayout]
) -> Iterator[tuple[int, int, Bytes]]:
    """All experts of a model in memory as the bytes of a slot."""
    for layer, (moe_layer, layout) in enumerate(zip(moe_layers, layouts, strict=True)):
        for expert in range(moe_layer.experts):
            block = np.zeros(layout.used_bytes, np.uint8)
            for part in moe_layer.parts:
                target, at = layout.part(part.name), 0
                for row_range in part.row_ranges(expert):
                    rows = model.get_parameter(row_range.parameter).data[row_range.first : row_range.last]
                    flat = rows.contiguous().cpu().view(-1).view(torch.uint8).numpy()
                    block[target.offset + at : target.offset + at + len(flat)] = flat
                    at += len(flat)
            yield layer, expert, block


def _detach_experts(
    model: Any,
    moe_layers: list[MoeLayer],
    layouts: Sequence[SlotLayout],
    planner: MemoryPlanner,
    profile: Profile | None,
) -> Handle:
    placeholders: list[Placeholder] = []
    folder = Path(tempfile.mkdtemp(prefix="hotset-", dir=planner.options.spill))
    try:
        layers = tuple(PackLayer(s.name, layout, s.experts) for s, layout in zip(moe_layers, layouts, strict=True))
        with Packer(folder / "experts", PackPlan(layers), durable=False) as packer:
            packer.add_all(blocks_of(model, moe_layers, layouts))
            packer.finish()
        catalog, plan = open_packed(folder / "experts"), _planned(planner)
        handle = connect(model, moe_layers, catalog, plan, planner.options, placeholders=placeholders, profile=profile)
    except BaseException:
        remove_folder(folder, Owner())
        raise
    remove = weakref.finalize(handle.engine, remove_folder, folder, Owner())  # at the latest when the process ends
    placeholders += install_placeholders(model, moe_layers)
    handle.patches.add(remove)
    return handle


def remove_folder(folder: Path, owner: Owner) -> None:
    """Remove what this process has spilled; of a parent's folder a child keeps its hands off."""
    if owner.is_here:
        shutil.rmtree(folder, ignore_errors=True)


def _gather(model: Any, handle: Handle) -> dict[str, torch.Tensor]:
    """Read all experts into tensors as the model had them."""
    shapes, dtypes = model._hotset_shapes, model._hotset_dtypes
    needed = sum(torch.Size(shape).numel() * dtypes[name].itemsize for name, shape in shapes.items())
    if needed > available_memory_bytes():
        raise BudgetError(
            f"all experts together need {format_size(needed)} and {format_size(available_memory_bytes())} are available"
        )
    whole = {name: torch.zeros(shape, dtype=dtypes[name]) for name, shape in shapes.items()}
    engine, catalog = handle.engine, handle.engine.offloaded("gather").catalog
    for layer, moe_layer in enumerate(handle.moe_layers):
        layout = catalog.layers[layer].layout
        for expert in range(moe_layer.experts):
            _scatter(moe_layer, expert, layout, engine.fetch(layer, expert), whole)
    return whole


def _scatter(
    moe_layer: MoeLayer, expert: int, layout: SlotLayout, block: Bytes, whole: dict[str, torch.Tensor]
) -> None:
    for part in moe_layer.parts:
        source, at = layout.part(part.name), 0
        for row_range in part.row_ranges(expert):
            rows = whole[row_range.parameter][row_range.first : row_range.last].view(-1).view(torch.uint8).numpy()
            start = source.offset + at
            rows[:] = block[start : start + len(rows)]
            at += len(rows)


def _planned(planner: MemoryPlanner) -> SlotPlan:
    """The plan of a planner that has planned."""
    if planner.plan is None:
        raise ModelError("no slots were planned for this model")
    return planner.plan

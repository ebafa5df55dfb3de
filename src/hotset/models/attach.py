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
from hotset.models.handle import Handle
from hotset.models.lean import remember_shapes
from hotset.models.learning import begin, read_profile
from hotset.models.memory_plan import MemoryPlanner
from hotset.models.shell import strip
from hotset.models.site import Site
from hotset.models.sites import find_sites
from hotset.options import Place, RunOptions, takes_options
from hotset.owner import Owner
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
    sites = find_sites(model)
    try:
        return _attach(model, sites, options)
    except BaseException:
        _forget(model)
        raise


def _attach(model: Any, sites: list[Site], options: RunOptions) -> Any:
    remember_shapes(model, {name for site in sites for name in site.parameters()})
    layouts = [layout_of(model, site) for site in sites]
    known = read_profile(options)
    bound_library_caches()
    planner = MemoryPlanner(options, loaded=True)
    if planner(model, sites, _unwritten(sites, layouts)):
        handle = watch(model, sites, _planned(planner), options)
    else:
        handle = _take_out(model, sites, layouts, planner)
    handle.remark(*planner.notes)
    try:
        begin(handle, options, known)
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
        for shell in reversed(handle.shells):
            shell.fill(whole[shell.name])
    handle.close()
    handle.lift()
    _forget(model)
    return model


def _forget(model: Any) -> None:
    for name in ("hotset", "_hotset_shapes", "_hotset_dtypes"):
        model.__dict__.pop(name, None)


def layout_of(model: Any, site: Site) -> SlotLayout:
    """How an expert of a model in memory lies in a slot."""
    parts = []
    for part in site.parts:
        dtype = model._hotset_dtypes[part.takes(0)[0].parameter]
        parts.append(Part(part.name, part.shape, str(dtype).removeprefix("torch.")))
    return SlotLayout.of(parts)


def blocks_of(model: Any, sites: Sequence[Site], layouts: Sequence[SlotLayout]) -> Iterator[tuple[int, int, Bytes]]:
    """All experts of a model in memory as the bytes of a slot."""
    for layer, (site, layout) in enumerate(zip(sites, layouts, strict=True)):
        for expert in range(site.experts):
            block = np.zeros(layout.used_bytes, np.uint8)
            for part in site.parts:
                target, at = layout.part(part.name), 0
                for take in part.takes(expert):
                    rows = model.get_parameter(take.parameter).data[take.first : take.last]
                    flat = rows.contiguous().cpu().view(-1).view(torch.uint8).numpy()
                    block[target.offset + at : target.offset + at + len(flat)] = flat
                    at += len(flat)
            yield layer, expert, block


def _take_out(model: Any, sites: list[Site], layouts: Sequence[SlotLayout], planner: MemoryPlanner) -> Handle:
    folder = Path(tempfile.mkdtemp(prefix="hotset-", dir=planner.options.spill))
    try:
        layers = tuple(PackLayer(s.name, layout, s.experts) for s, layout in zip(sites, layouts, strict=True))
        with Packer(folder / "experts", PackPlan(layers), durable=False) as packer:
            packer.add_all(blocks_of(model, sites, layouts))
            packer.finish()
        handle = connect(model, sites, open_packed(folder / "experts"), _planned(planner), planner.options)
    except BaseException:
        remove_folder(folder, Owner())
        raise
    remove = weakref.finalize(handle.engine, remove_folder, folder, Owner())  # at the latest when the process ends
    handle.shells = strip(model, sites)
    handle.on_close(remove)
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
    for shell in handle.shells:
        shell.put_rest(whole[shell.name])
    engine, catalog = handle.engine, handle.engine.offloaded("gather").catalog
    for layer, site in enumerate(handle.sites):
        layout = catalog.layers[layer].layout
        for expert in range(site.experts):
            _scatter(site, expert, layout, engine.fetch(layer, expert), whole)
    return whole


def _scatter(site: Site, expert: int, layout: SlotLayout, block: Bytes, whole: dict[str, torch.Tensor]) -> None:
    for part in site.parts:
        source, at = layout.part(part.name), 0
        for take in part.takes(expert):
            rows = whole[take.parameter][take.first : take.last].view(-1).view(torch.uint8).numpy()
            start = source.offset + at
            rows[:] = block[start : start + len(rows)]
            at += len(rows)


def _unwritten(sites: Sequence[Site], layouts: Sequence[SlotLayout]) -> Catalog:
    """The catalog of experts that are nowhere yet, for planning."""
    layers = [LayerSource(layout, [()] * site.experts) for site, layout in zip(sites, layouts, strict=True)]
    return Catalog((), tuple(layers))


def _planned(planner: MemoryPlanner) -> SlotPlan:
    """The plan of a planner that has planned."""
    if planner.plan is None:
        raise ModelError("no slots were planned for this model")
    return planner.plan

"""A packed store: a model folder in which every expert is one block that one direct read fetches."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from hotset.errors import StoreError
from hotset.files import write_beside
from hotset.store.catalog import Catalog, LayerSource, Segment
from hotset.store.index import REMEDY, PackIndex, read_index
from hotset.store.plan import PackKey, PackPlan

BLOCKS_FILE = "experts.hotset"
INDEX_FILE = "experts.json"


def is_packed(folder: Path) -> bool:
    """Whether a folder is, or at least was, a packed store."""
    return (folder / INDEX_FILE).is_file() or (folder / BLOCKS_FILE).is_file()


def open_packed(folder: Path) -> Catalog:
    """The catalog of a packed store; anything about it that cannot be right raises StoreError."""
    index = open_index(folder)
    layers = tuple(_source(index.plan, number) for number in range(len(index.plan.layers)))
    names = "\n".join(layer.name for layer in index.plan.layers)
    return Catalog((folder / BLOCKS_FILE,), layers, index.digests, index.plan.meta | {"layers": names})


def open_index(folder: Path) -> PackIndex:
    """The index of a packed store whose file of blocks has the size that it promises."""
    index, path = read_index(folder / INDEX_FILE), folder / BLOCKS_FILE
    try:
        size_bytes = os.stat(path).st_size
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}; {REMEDY}") from error
    if size_bytes < index.plan.end_bytes:
        raise StoreError(f"{path} is truncated: it has {size_bytes:,} of {index.plan.end_bytes:,} bytes; {REMEDY}")
    if size_bytes > index.plan.end_bytes:
        raise StoreError(
            f"{path} is of another pack than {INDEX_FILE} beside it: it has {size_bytes:,} bytes and should have "
            f"{index.plan.end_bytes:,}; {REMEDY}"
        )
    return index


def write_quality(folder: Path, quality: dict[str, Any]) -> None:
    """Put into a complete pack how far it is from its original."""
    index = replace(open_index(folder), quality=quality)
    with write_beside(folder / INDEX_FILE) as scratch:
        scratch.write_bytes(index.to_bytes())


def _source(plan: PackPlan, number: int) -> LayerSource:
    """Whole blocks are read, so that both ends of every read lie on pages."""
    layer = plan.layers[number]
    experts = [(Segment(0, plan.offset(PackKey(number, e)), layer.block_bytes, 0),) for e in range(layer.experts)]
    return LayerSource(layer.layout, experts)

"""A small pack of made-up experts, and the forging of its index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hotset.store import Part, SlotLayout
from hotset.store.catalog import Bytes
from hotset.store.index import seal_of
from hotset.store.pack import Packer
from hotset.store.plan import PackKey, PackLayer, PackPlan

# The first layout has a gap behind "up", the second is larger than a page and has none.
LAYOUTS = (
    SlotLayout.of([Part("up", (3, 11), "bfloat16"), Part("down", (5, 3), "float32")]),
    SlotLayout.of([Part("up", (64, 32), "bfloat16"), Part("down", (32, 64), "bfloat16")]),
)
META = {"model": "made-up", "dtype": "bfloat16", "fingerprint": "f" * 32}


def plan_of(experts: tuple[int, ...] = (5, 7), **meta: str) -> PackPlan:
    layers = [PackLayer(f"model.layers.{i}.experts", LAYOUTS[i % 2], count) for i, count in enumerate(experts)]
    return PackPlan(tuple(layers), META | meta)


def block(plan: PackPlan, key: PackKey) -> Bytes:
    """The bytes of an expert, with rubbish in the gaps between its parts."""
    random = np.random.default_rng([key.layer, key.expert])
    return random.integers(0, 256, plan.used_bytes(key), np.uint8)


def blocks(plan: PackPlan, keys: list[PackKey]) -> Iterator[tuple[int, int, Bytes]]:
    for key in keys:
        yield key.layer, key.expert, block(plan, key)


def write_pack(out: Path, plan: PackPlan | None = None, extra: bytes = b"dense weights") -> PackPlan:
    plan = plan or plan_of()
    with Packer(out, plan, file_bytes=len(extra)) as packer:
        packer.add_file("model.safetensors", [extra])
        packer.add_all(blocks(plan, packer.missing()))
        packer.finish()
    return plan


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def forge(path: Path, document: dict[str, Any]) -> None:
    """Write an index with a seal that fits."""
    document.pop("seal", None)
    path.write_text(json.dumps(document | {"seal": seal_of(document)}))

"""`experts.json`: what a packed store says about itself, written once and believed only after every claim is checked.

The seal tells an edited file from a written one; whoever forges it still meets the checks of every single claim.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hotset.errors import StoreError
from hotset.store.digest import DIGEST_BYTES, digest_of
from hotset.store.layout import ITEM_BYTES, Part, SlotLayout
from hotset.store.plan import PackLayer, PackPlan

FORMAT, VERSION = "hotset-pack", 1
MAX_INDEX_BYTES = 128 << 20
MAX_BYTES = 1 << 60
MAX_NAME = 1024
MAX_DIMENSIONS = 8
REMEDY = "pack the model again with hotset pack"

T = TypeVar("T")


    __slots__ = ()


@dataclass(frozen=True, slots=True)
class PackIndex:
    """A pack: its plan, the digests of its blocks [layers][experts], and its other files with weights."""

    plan: PackPlan
    digests: list[list[bytes]]
    files: dict[str, tuple[int, bytes]] = field(default_factory=dict)

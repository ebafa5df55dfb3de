"""Families with their own code for experts: one file each, found by the name of the experts' class.

A new family is a new file here; files whose name begins with an underscore are no families.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Protocol, cast

import torch

from hotset.models.layers import MoeLayer


class Adapter(Protocol):
    """What a file in this folder provides."""

    CLASSES: tuple[str, ...]

    def moe_layer_of(self, name: str, module: torch.nn.Module, model: torch.nn.Module) -> MoeLayer:
        """Describe the experts that this module holds."""
        ...


def adapter_for(module: torch.nn.Module) -> Adapter | None:
    """The adapter for a module, if it needs one."""
    return adapters().get(type(module).__name__)


@cache
def adapters() -> dict[str, Adapter]:
    """All adapters in this folder, by the classes that they are for."""
    names = [found.name for found in pkgutil.iter_modules(__path__) if not found.name.startswith("_")]
    files = [cast(Adapter, importlib.import_module(f"{__name__}.{name}")) for name in names]
    return {class_name: file for file in files for class_name in file.CLASSES}

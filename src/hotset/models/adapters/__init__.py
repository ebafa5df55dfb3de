"""Families with their own code for experts: one file each, found by the name of the experts' class."""

from __future__ import annotations

from typing import Protocol

import torch

from hotset.models.site import Site


class Adapter(Protocol):
    """What a file in this folder provides."""

    CLASSES: tuple[str, ...]

    def site_of(self, name: str, module: torch.nn.Module, model: torch.nn.Module) -> Site:
        """Describe the experts that this module holds."""
        ...


def adapter_for(module: torch.nn.Module) -> Adapter | None:
    """The adapter for a module, if it needs one."""
    return _BY_CLASS.get(type(module).__name__)


_BY_CLASS: dict[str, Adapter] = {}

"""Launches of Triton kernels with as little work for the host as can be."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch


class Launches:
    """The launches of one kernel on one device, whose arguments are of a few kinds.

    Triton looks at every argument of every launch to find the binary that was compiled for its kind. Here the caller
    says what kind they are, and the binary of the first launch of a kind serves all others.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self.kernel, self.options = kernel, options
        self._binaries: dict[Hashable, Any] = {}

    def __call__(self, grid: tuple[int, ...], kind: Hashable, *args: Any) -> None:
        """Launch it; `kind` tells apart whatever Triton compiles different binaries for."""
        binary = self._binaries.get(kind)
        if binary is not None:
            binary[(*grid, 1, 1)[:3]](*args)
            return
        made = self.kernel[grid](*args, **self.options)
        if made is not None:  # the interpreter has none
            self._binaries[kind] = made


def kind_of(*tensors: torch.Tensor) -> tuple[Hashable, ...]:
    """What Triton tells tensors apart by: their types, and whether they begin at whole 16 bytes."""
    return tuple((tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors)

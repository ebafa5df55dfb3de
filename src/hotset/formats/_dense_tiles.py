# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The tile loader of plain numbers, and what all loaders need."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def along(first, size: tl.constexpr, wanted):
    """Places from the first on, as the last dimension of tiles whose outputs have the shape of `wanted`."""
    places = first + tl.arange(0, size)
    if len(wanted.shape) == 2:
        return places[None, :]
    else:  # noqa: RET505 - Triton wants both arms of a choice at compile time
        tl.static_assert(len(wanted.shape) == 3)
        return places[None, None, :]


@triton.jit
def load_tile(
    parts, columns, wanted, start, block: tl.constexpr, n: tl.constexpr, k: tl.constexpr, settings: tl.constexpr
):
    """Numbers of a matrix of n outputs and k inputs, by rows of inputs or, transposed, by rows of outputs."""
    depth = along(start, block, wanted)
    places = depth * n + columns if settings[0] else columns * k + depth
    return tl.load(parts[0] + places, mask=wanted & (depth < k), other=0.0, eviction_policy="evict_first")

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The tile loader of plain numbers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(parts, columns, depth, mask, n: tl.constexpr, k: tl.constexpr, settings: tl.constexpr):
    """Numbers of a matrix of n outputs and k inputs, by rows of inputs or, transposed, by rows of outputs."""
    places = depth * n + columns if settings[0] else columns * k + depth
    return tl.load(parts[0] + places, mask=mask, other=0.0, eviction_policy="evict_first")

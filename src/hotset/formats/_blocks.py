"""Rows of outputs a few at a time: decoded numbers pass through float32, and a whole matrix of those would be large."""

from __future__ import annotations

from collections.abc import Iterator

TILE_VALUES = 1 << 18
"""A megabyte in float32: what stays in the cache of a core between two operations."""


def tiles(outputs: int, inputs: int, multiple: int = 1) -> Iterator[slice]:
    """Slices of outputs that are decoded together, each of whole multiples but the last."""
    step = max(TILE_VALUES // max(inputs, 1) // multiple, 1) * multiple
    for first in range(0, outputs, step):
        yield slice(first, min(first + step, outputs))

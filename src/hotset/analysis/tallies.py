"""Uses of experts, counted by groups of tokens: what every measure of a trace begins with."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.trace import Trace

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def layer_uses(trace: Trace, layer: int, group: npt.NDArray[Any], groups: int) -> Ints:
    """How many tokens of each group used each expert of a layer: [groups, experts]; a group of -1 is left out."""
    chosen, experts = trace.experts[:, layer], trace.shape.experts
    known = (chosen >= 0) & (group >= 0)[:, None]
    cells = (group.astype(np.int64)[:, None] * experts + chosen)[known]
    return np.bincount(cells, minlength=groups * experts).reshape(groups, experts).astype(np.int64)


def uses_by(trace: Trace, group: npt.NDArray[Any], groups: int) -> Ints:
    """How many tokens of each group used each expert: [groups, layers, experts]."""
    shape = trace.shape
    found = np.empty((groups, shape.layers, shape.experts), np.int64)
    for layer in range(shape.layers):
        found[:, layer] = layer_uses(trace, layer, group, groups)
    return found


def computed(trace: Trace, layer: int) -> Mask:
    """Which tokens ran through a layer."""
    return np.asarray((trace.experts[:, layer] >= 0).any(axis=1))


def tokens_of_layers(trace: Trace) -> Ints:
    """How many tokens ran through each layer."""
    return np.array([np.count_nonzero(computed(trace, layer)) for layer in range(trace.shape.layers)], np.int64)


def ratio(part: npt.NDArray[Any], whole: npt.NDArray[Any]) -> Floats:
    """A quotient, not a number where there is nothing to divide by."""
    part, whole = np.broadcast_arrays(np.asarray(part, np.float64), np.asarray(whole, np.float64))
    return np.asarray(np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole > 0))

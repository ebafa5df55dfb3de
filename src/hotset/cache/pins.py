"""Pins: experts that are never evicted, by a time of last use that no event reaches."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hotset.cache.plan import Scope, SlotPlan
from hotset.cache.table import FOREVER, WARM, Table
from hotset.errors import BudgetError
from hotset.policies import Grid
from hotset.shape import ExpertKey

Mask = npt.NDArray[np.bool_]


def keys_of(mask: Mask) -> list[ExpertKey]:
    """The experts of a grid that are marked, by layer and expert."""
    return [ExpertKey(*key) for key in np.argwhere(mask).tolist()]


def is_pinned(table: Table) -> Mask:
    """Which experts are pinned, for good or for now."""
    pinned: Mask = (table.last == FOREVER) | (table.last == WARM)
    return pinned


def count_pins(table: Table) -> None:
    """Write down how many slots of each group no event may take."""
    table.num_pinned[:] = per_group(table, is_pinned(table))


def check_pins(plan: SlotPlan, table: Table, keys: Iterable[ExpertKey]) -> Grid:
    """Refuse pins that leave a layer, or the pool, without room for one event; returns them as a grid."""
    grid = np.zeros((plan.shape.layers, plan.shape.experts))
    for key in keys:
        grid[plan.checked_key(key)] = 1.0
    pinned = per_group(table, is_pinned(table) | (grid > 0))
    room = np.diff(table.bounds) - plan.shape.top_k
    if (pinned > np.maximum(room, 0)).any():
        group = int(np.argmax(pinned - room))
        where = "the pool" if plan.scope is Scope.POOL else f"layer {group}"
        raise BudgetError(
            f"{pinned[group]} pins starve {where}: of its {room[group] + plan.shape.top_k} slots, "
            f"{plan.shape.top_k} must stay free for the running event; pin at most {max(room[group], 0)}"
        )
    return grid


def per_group(table: Table, mask: Mask) -> npt.NDArray[np.int64]:
    """How many of the marked experts belong to each group of slots."""
    counts = np.zeros(len(table.num_free), np.int64)
    np.add.at(counts, table.group_of, mask.sum(axis=1))
    return counts

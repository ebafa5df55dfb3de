"""Follows a replay by the log of its loads: which experts were resident before each event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hotset.analysis.tallies import Ints, Mask
from hotset.cache.controller import Replayed
from hotset.compiling import keep_compiled
from hotset.trace import Phase
from hotset.trace.events import EventTable


class Watched(NamedTuple):
    """Some events of one layer: what was resident before each, and what it used; both [events, experts]."""

    resident: Mask
    used: Mask

    @classmethod
    def joined(cls, parts: Sequence[Watched], experts: int) -> Watched:
        """Parts of a replay, one after the other."""
        none = np.zeros((0, experts), np.bool_)
        return cls(
            np.concatenate([none, *(part.resident for part in parts)]),
            np.concatenate([none, *(part.used for part in parts)]),
        )


def follow(events: EventTable, done: Replayed, watched: Mask, resident: Mask, sums: Ints) -> Watched:
    """Walk over events that were replayed, from what was resident before them, which is brought up to date.

    `sums` takes the experts resident in each layer before its decode events; `watched` are events of one layer.
    """
    number = int(watched.sum())
    seen = Watched(
        np.zeros((number, events.shape.experts), np.bool_), np.zeros((number, events.shape.experts), np.bool_)
    )
    _walk(
        events.start, events.layer, events.phase, events.expert, done.misses, done.log, watched, int(Phase.DECODE),
        resident, sums, seen.resident, seen.used,
    )  # fmt: skip
    return seen


@keep_compiled(nogil=True)
def _walk(
    start: Any, layers: Any, phases: Any, experts: Any, misses: Any, log: Any, watched: Any, decode: int,
    resident: Any, sums: Any, seen_resident: Any, seen_used: Any,
) -> None:  # fmt: skip
    number = np.zeros(len(resident), np.int64)
    for layer in range(len(resident)):
        for expert in range(resident.shape[1]):
            number[layer] += resident[layer, expert]
    at, seen = 0, 0
    for event in range(len(layers)):
        layer = layers[event]
        if phases[event] == decode:
            sums[layer] += number[layer]
        if watched[event]:
            for expert in range(resident.shape[1]):
                seen_resident[seen, expert] = resident[layer, expert]
            for i in range(start[event], start[event + 1]):
                seen_used[seen, experts[i]] = True
            seen += 1
        for i in range(at, at + misses[event]):
            if log[i, 4] >= 0:  # evicted for it
                resident[log[i, 3], log[i, 4]] = False
                number[log[i, 3]] -= 1
            if log[i, 2] >= 0:  # given a slot
                resident[log[i, 0], log[i, 1]] = True
                number[log[i, 0]] += 1
        at += misses[event]

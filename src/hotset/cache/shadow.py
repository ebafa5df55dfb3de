"""Shadow caches: other policies on the events of a live cache, who would be resident and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hotset.cache.controller import Controller
from hotset.cache.counters import Count
from hotset.cache.table import RESERVED
from hotset.cache.usage import LOG_FIELDS, LOG_HEADER, LOGGED_PASSES, Usage
from hotset.compiling import keep_compiled
from hotset.policies import parse
from hotset.shape import ModelShape
from hotset.trace import Phase
from hotset.trace.events import EventTable, Routed


def log_is_full(usage: Usage, shape: ModelShape) -> bool:
    """Whether the log holds all the passes it is made for, or could not take another prompt."""
    events, end = usage.log[:2].tolist()
    prompt = LOG_FIELDS * shape.layers + 2 * shape.total_experts
    return bool(events >= LOGGED_PASSES * shape.layers or end + prompt > len(usage.log))


def log_is_whole(usage: Usage) -> bool:
    """Whether the log holds all events since it was last read."""
    return bool(usage.log[2] == 0)


def take_log(usage: Usage, shape: ModelShape) -> EventTable:
    """The events since the last call, as the simulator takes them; the log is empty afterwards.

    It holds what the tokens of an event need together, so what each chose is known of events of one token only.
    """
    number, end = usage.log[:2].tolist()
    entries = (end - LOG_HEADER - LOG_FIELDS * number) // 2
    table = EventTable(
        shape,
        start=np.zeros(number + 1, np.int64),
        layer=np.zeros(number, np.int32),
        step=np.zeros(number, np.int32),
        tokens=np.zeros(number, np.int32),
        phase=np.zeros(number, np.uint8),
        request=np.zeros(number, np.int32),
        expert=np.zeros(entries, np.int32),
        count=np.zeros(entries, np.int32),
    )
    columns = table.layer, table.tokens, table.phase, table.request, table.expert, table.count
    _unpack(usage.log, table.start, *columns)
    usage.log[:LOG_HEADER] = 0, LOG_HEADER, 0
    routed = Routed(*_routes(table.start, table.layer, table.tokens, table.request, table.expert, shape.layers))
    return replace(table, routed=routed)


@keep_compiled(nogil=True)
def _routes(start: Any, layer: Any, tokens: Any, request: Any, expert: Any, layers: int) -> Any:
    """What the one token of each event chose, in every layer of its pass; no token where there were several."""
    bounds, token, most = np.zeros((len(layer), 2), np.int64), 0, 1
    for event in range(len(layer)):
        if tokens[event] != 1:
            continue
        goes_on = event > 0 and tokens[event - 1] == 1 and request[event] == request[event - 1]
        token += not (goes_on and layer[event] > layer[event - 1])
        bounds[event] = token - 1, token
        most = max(most, start[event + 1] - start[event])
    experts, owner = np.full((token, layers, most), -1, np.int16), np.zeros(token, np.int32)
    for event in range(len(layer)):
        if tokens[event] == 1:
            own = expert[start[event] : start[event + 1]]
            experts[bounds[event, 0], layer[event], : len(own)] = own
            owner[bounds[event, 0]] = request[event]
    return bounds, experts, owner


@keep_compiled(nogil=True)
def _unpack(log: Any, start: Any, layer: Any, tokens: Any, phase: Any, request: Any, expert: Any, count: Any) -> None:
    at, entry = LOG_HEADER, 0
    for event in range(len(layer)):
        layer[event], tokens[event], phase[event], request[event] = log[at], log[at + 1], log[at + 2], log[at + 3]
        size, first = log[at + 4], at + LOG_FIELDS
        for i in range(size):
            expert[entry + i] = log[first + i]
            count[entry + i] = log[first + size + i]
        at = first + 2 * size
        entry += size
        start[event + 1] = entry


def shadow_of(live: Controller, spec: str) -> Controller:
    """An empty cache of the same plan under another policy, without bytes."""
    return Controller(live.plan, parse(spec), prefill=live.prefill)


def twin_of(live: Controller) -> Controller:
    """A shadow that begins as the live cache is now: the same residents, pins and learning."""
    twin = shadow_of(live, live.policy.spec)
    for mine, theirs in zip(twin.table, live.table, strict=True):
        mine[...] = theirs
    twin.restore(live.save())
    for (layer, expert), held in live.residency.reserved.items():  # nothing ever arrives here
        twin.residency.vacate(layer, held.slot)
        if twin.table.last[layer, expert] == RESERVED:
            twin.table.last[layer, expert] = held.last
    return twin


def decode_counts(controller: Controller) -> tuple[int, int, int]:
    """Decode tokens, hits and misses of a cache so far."""
    decode = controller.table.counters[Phase.DECODE]
    return int(decode[Count.TOKENS].max()), int(decode[Count.HITS].sum()), int(decode[Count.MISSES].sum())


class CounterDelta:
    """Decode tokens, hits and misses of a cache since the last read."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._seen = decode_counts(controller)

    def read(self) -> tuple[int, int, int]:
        """What has been added since the last call."""
        now = decode_counts(self._controller)
        tokens, hits, misses = (a - b for a, b in zip(now, self._seen, strict=True))
        self._seen = now
        return tokens, hits, misses

"""Shadow caches: other policies on the events of a live cache, who would be resident and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np

from hotset.cache.controller import Controller, Reservation
from hotset.cache.counters import Count, Counters
from hotset.cache.table import RESERVED
from hotset.cache.usage import LOG_FIELDS, LOG_HEADER, LOGGED_PASSES, Usage
from hotset.compiling import keep_compiled
from hotset.policies import parse
from hotset.shape import ExpertKey, ModelShape
from hotset.trace import Phase
from hotset.trace.events import EventTable


def log_is_full(usage: Usage, shape: ModelShape) -> bool:
    """Whether the log holds all the passes it is made for, or could not take another prompt."""
    events, end = usage.log[:2].tolist()
    prompt = LOG_FIELDS * shape.layers + 2 * shape.total_experts
    return bool(events >= LOGGED_PASSES * shape.layers or end + prompt > len(usage.log))


def log_is_whole(usage: Usage) -> bool:
    """Whether the log holds all events since it was last read."""
    return bool(usage.log[2] == 0)


def take_log(usage: Usage, shape: ModelShape) -> EventTable:
    """The events since the last call, as the simulator takes them; the log is empty afterwards."""
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
    return table


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


class Shadow:
    """A cache of the same plan under another policy, without bytes."""

    def __init__(self, live: Controller, spec: str) -> None:
        self.controller = Controller(live.plan, parse(spec), prefill=live.prefill)

    @classmethod
    def twin(cls, live: Controller) -> Shadow:
        """A shadow that begins as the live cache is now: the same residents, pins and learning."""
        shadow = cls(live, live.policy.spec)
        for name, array in live.table._asdict().items():
            getattr(shadow.controller.table, name)[...] = array
        shadow.controller.restore(live.save())
        shadow._forget_reserved(live.reserved)
        return shadow

    def _forget_reserved(self, reserved: dict[ExpertKey, Reservation]) -> None:
        """Empty the slots held for experts on their way: nothing ever arrives here."""
        table = self.controller.table
        for (layer, expert), held in reserved.items():
            same = (table.layer_in == layer) & (table.expert_in == expert)
            for slot in np.flatnonzero(same).tolist():
                if slot != table.slot_of[layer, expert]:
                    self.controller.vacate(layer, slot)
            if table.last[layer, expert] == RESERVED:
                table.last[layer, expert] = held.last

    def take(self, events: EventTable) -> None:
        """Serve what the live cache was asked for."""
        self.controller.replay(events)

    def counters(self) -> Counters:
        """What this cache would have done so far."""
        return self.controller.counters()


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

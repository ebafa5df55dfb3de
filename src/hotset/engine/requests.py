"""What each request used and cost, kept apart however many of them take turns."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.cache.controller import Controller
from hotset.cache.counters import Count, Counters
from hotset.cache.usage import USES
from hotset.engine.step import NO_REQUEST
from hotset.policies.base import compiled_entry
from hotset.profile.statistics import Counts
from hotset.shape import format_size
from hotset.trace import Phase

KEPT = 64
"""Requests that are remembered."""


class Request(NamedTuple):
    """One answered prompt: its activation matrix and its counters."""

    number: int
    uses: npt.NDArray[np.int32]  # [phases, layers, experts]
    tokens: Counts  # [phases]
    counters: Counters
    loaded_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """The figures of the request as plain values."""
        return {
            "request": self.number,
            "prefill_tokens": int(self.tokens[Phase.PREFILL]),
            "decode_tokens": int(self.tokens[Phase.DECODE]),
            "prefill": self.counters.as_dict(Phase.PREFILL),
            "decode": self.counters.as_dict(Phase.DECODE),
            "loaded_bytes": self.loaded_bytes,
        }

    def __repr__(self) -> str:
        prompt, new = int(self.tokens[Phase.PREFILL]), int(self.tokens[Phase.DECODE])
        hits, misses = self.counters.total(Count.HITS), self.counters.total(Count.MISSES)
        rate = f", hit rate {100 * hits / (hits + misses):.1f} %" if hits + misses else ""
        read = format_size(self.loaded_bytes)
        return f"<Request {self.number}: {prompt:,} tokens of prompt and {new:,} new{rate}, {read} loaded>"


class Account(NamedTuple):
    """What an engine did, or its part for one request."""

    uses: Any  # [phases, layers, experts], tokens that used each expert
    counters: Any  # int64 [phases, counters, layers]
    loaded_bytes: Any  # int64 [1]


class RequestLog:
    """Credits what an engine does to the request it serves; callers hold the engine's lock.

    What was done since the last change of request is credited when the next one has its turn, in one call of compiled
    code: an interrupt comes before it or after it, so nothing is counted twice or lost. A batch is served as a whole,
    and counts for the first of its requests.
    """

    def __init__(self, controller: Controller) -> None:
        shape = controller.plan.shape
        self._total = Account(controller.usage.counts[USES], controller.table.counters, np.zeros(1, np.int64))
        self._credited = Account(*(np.copy(part) for part in self._total))
        self._accounts: OrderedDict[int, Account] = OrderedDict()
        self._touched = np.zeros(shape.layers, np.bool_)
        self._turn = NO_REQUEST, self._empty()  # the request that is served, and its account

    def serve(self, request: int, layer: int, loaded_bytes: int) -> None:
        """Say, before an event is served, whose it is, and the bytes that all events before it have loaded."""
        if request != self._turn[0]:
            self._credit(loaded_bytes)
            self._turn = request, self._account(request)
        self._touched[layer] = True

    def all(self, loaded_bytes: int) -> list[Request]:
        """The last requests, those under way included, by number."""
        self._credit(loaded_bytes)
        found = [
            # Layers that some of a request's tokens pass by have seen fewer.
            Request(
                number,
                account.uses.copy(),
                account.counters[:, Count.TOKENS].max(axis=1),
                Counters(account.counters.copy()),
                int(account.loaded_bytes[0]),
            )
            for number, account in sorted(self._accounts.items())
        ]
        return [request for request in found if request.number != NO_REQUEST and request.tokens.any()]

    def _account(self, request: int) -> Account:
        """The account of a request whose turn it is; the one that had its turn longest ago is forgotten."""
        account = self._accounts.get(request)
        if account is None:
            account = self._accounts[request] = self._empty()
        self._accounts.move_to_end(request)
        while len(self._accounts) > KEPT:
            self._accounts.popitem(last=False)
        return account

    def _empty(self) -> Account:
        uses, counters, _ = self._total
        return Account(np.zeros(uses.shape, np.int32), np.zeros_like(counters), np.zeros(1, np.int64))

    def _credit(self, loaded_bytes: int) -> None:
        self._total.loaded_bytes[0] = loaded_bytes
        _credit(self._total, self._credited, self._turn[1], self._touched)


@compiled_entry
def _credit(total: Account, credited: Account, account: Account, touched: Any) -> None:
    """Add to an account what was done in the layers touched and is credited to none yet."""
    for layer in range(len(touched)):
        if not touched[layer]:
            continue
        touched[layer] = False
        for phase in range(total.uses.shape[0]):
            for expert in range(total.uses.shape[2]):
                new = total.uses[phase, layer, expert] - credited.uses[phase, layer, expert]
                account.uses[phase, layer, expert] += new
                credited.uses[phase, layer, expert] += new
            for count in range(total.counters.shape[1]):
                more = total.counters[phase, count, layer] - credited.counters[phase, count, layer]
                account.counters[phase, count, layer] += more
                credited.counters[phase, count, layer] += more
    loaded = total.loaded_bytes[0] - credited.loaded_bytes[0]
    account.loaded_bytes[0] += loaded
    credited.loaded_bytes[0] += loaded

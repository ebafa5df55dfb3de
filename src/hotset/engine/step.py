"""One forward pass of the whole model: whose tokens it computes, and in which phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.trace import Phase

if TYPE_CHECKING:
    from hotset.engine.driver import Driver

Ints = npt.NDArray[np.int32]
_NO_REQUESTS: Ints = np.zeros(0, np.int32)

NO_REQUEST = 2**31 - 1
"""What an event is served under that belongs to no forward pass; no request comes to this number."""


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass over a batch: a value, made once and handed down as an argument."""

    number: int
    batch: int
    length: int  # new tokens of each sequence
    phase: Phase
    first_request: int
    driver: Driver  # who serves its MoE layers
    token_ids: npt.NDArray[np.int32] | None = None  # [batch * length], where the model was given ids
    recording: int = 0  # the number of the recording that was on when it began; 0 if none was

    def per_token(self, rows: int) -> int:
        """How many rows each token has, where a model's own code gives its experts a row for each of their tokens."""
        tokens = self.batch * self.length
        return rows // tokens if rows > tokens and rows % tokens == 0 else 1

    def requests(self, tokens: int) -> Ints:
        """Which request each token is of."""
        request = self.first_request + np.repeat(np.arange(self.batch), self.length)
        return (request if len(request) == tokens else np.full(tokens, self.first_request)).astype(np.int32)


class Asking(NamedTuple):
    """Who asks for the experts of an event, in the order in which a cache is told."""

    tokens: int
    phase: Phase
    request: int  # of the first token
    routes: Ints | None = None  # what each token chose, for policies that look at it
    requests: Ints = _NO_REQUESTS  # whose each of them is


def asking(step: Step, chosen: Ints, *, routed: bool) -> Asking:
    """Who asks, of tokens that chose these (-1 is no expert of the layer): such as chose none are no part of an event.

    A recording says nothing else, so a replay serves the same.
    """
    requests, here = step.requests(len(chosen)), chosen.max(axis=1) >= 0
    if not here.all():
        chosen, requests = chosen[here], requests[here]
    who = Asking(len(chosen), step.phase, int(requests[0]))
    return who._replace(routes=chosen, requests=requests) if routed else who

"""One forward pass of the whole model: whose tokens it computes, and in which phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hotset.trace import Phase

if TYPE_CHECKING:
    from hotset.engine.driver import Driver

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

    def requests(self, tokens: int) -> npt.NDArray[np.int32]:
        """Which request each token is of."""
        request = self.first_request + np.repeat(np.arange(self.batch), self.length)
        return (request if len(request) == tokens else np.full(tokens, self.first_request)).astype(np.int32)

"""What is known of the forward pass under way: whose tokens it computes, and in which phase."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotset.trace import Phase


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass of the whole model over a batch."""

    number: int
    batch: int
    length: int  # new tokens of each sequence
    phase: Phase
    first_request: int
    token_ids: npt.NDArray[np.int32] | None = None  # [batch * length], where the model was given ids

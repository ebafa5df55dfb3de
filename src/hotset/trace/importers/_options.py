"""What the caller may state about a foreign trace, and what is worked out where nothing is stated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hotset.shape import ModelShape
from hotset.trace.event import Phase


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """Facts about the model that win over whatever the file says."""

    experts: int | None = None
    expert_bytes: int | None = None
    model: str | None = None
    request_tokens: int | None = None  # where a file does not say where requests begin
    steps: str | None = None  # "request" or "shared": whether each request numbers its own
    first: int | None = None  # tokens to read, where a file may hold far more than memory does


def choose_shape(
    options: ImportOptions,
    layers: int,
    top_k: int,
    largest_id: int,
    experts: int | None = None,
    expert_bytes: int | None = None,
) -> ModelShape:
    """The shape of the model: what the options say, else what the file says, else what the ids suggest."""
    count = options.experts or experts or guess_experts(largest_id, top_k)
    return ModelShape(layers, count, top_k, options.expert_bytes or expert_bytes or None)


def guess_experts(largest_id: int, top_k: int) -> int:
    """The next power of two that has room for all ids seen: most models have such a number of experts."""
    return 1 << (max(largest_id + 1, top_k) - 1).bit_length()


def describe_source(
    path: Path, options: ImportOptions, shape: ModelShape, *, stated: bool, model: str | None = None
) -> dict[str, str]:
    """The `meta` of an imported trace: the file, the model, and whether the number of experts is an estimate."""
    meta = {"source": path.name}
    if name := options.model or model:
        meta["model"] = name
    if not stated and options.experts is None:
        meta["experts_guessed"] = str(shape.experts)
    return meta


def number_passes(request: npt.NDArray[np.int32], phase: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """One forward pass per decode token, and one per run of prompt tokens of the same request."""
    joined = (phase[1:] == Phase.PREFILL) & (phase[:-1] == Phase.PREFILL) & (request[1:] == request[:-1])
    return np.concatenate(([0], np.cumsum(~joined))).astype(np.int32)

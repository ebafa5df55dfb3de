"""Grids of experts, one row per token, made into a trace: what importers of arrays have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.errors import TraceError
from hotset.shape import MAX_LAYERS
from hotset.trace.importers._options import ImportOptions, choose_shape, describe_source, number_passes
from hotset.trace.trace import NONE, Labels, Trace, dense_steps

MAX_ID = np.iinfo(np.int16).max - 1
_MAX_GROWTH = 64
_SPARE_BYTES = 1 << 20

Array = npt.NDArray[Any]


def most_bytes(path: Path) -> int:
    """The most that a file may unpack to: far beyond what sound ones do, and bounded by its size."""
    return _MAX_GROWTH * path.stat().st_size + _SPARE_BYTES


def expert_ids(stored: Array, what: str) -> npt.NDArray[np.int16]:
    """Whole numbers [tokens, layers, top_k] as ids; -1 stays: not computed."""
    if stored.dtype.kind not in "iu" or stored.ndim != 3 or 0 in stored.shape[1:] or stored.shape[1] > MAX_LAYERS:
        raise TraceError(f"{what} is {stored.dtype} {stored.shape}, not whole numbers [tokens, layers, top_k]")
    if stored.size and (int(stored.max()) > MAX_ID or int(stored.min()) < NONE):
        wrong = int(stored.max()) if int(stored.max()) > MAX_ID else int(stored.min())
        raise TraceError(f"{what} holds an expert {wrong}, which is out of range: ids go from 0 to {MAX_ID}")
    return stored.astype(np.int16)


def join_grids(grids: Iterable[npt.NDArray[np.int16]], what: str) -> npt.NDArray[np.int16]:
    """Grids of one model, laid end to end."""
    parts = list(grids)
    if not parts or not sum(map(len, parts)):
        raise TraceError(f"the file holds no {what}: nothing was recorded")
    if len({part.shape[1:] for part in parts}) > 1:
        sizes = sorted({f"{part.shape[1]} x top {part.shape[2]}" for part in parts})
        raise TraceError(f"layers and top_k differ within the file ({' and '.join(sizes[:2])}): import them one by one")
    return np.concatenate(parts)


def build_dense(
    path: Path,
    options: ImportOptions,
    experts: npt.NDArray[np.int16],
    request: Array,
    phase: Array,
    *,
    step: Array | None = None,
    layer_ids: Array | None = None,
    facts: Mapping[str, Any] | None = None,
    labels: Labels = (),
    **columns: Array | None,
) -> Trace:
    """The trace of a grid; layers that no token computed are not MoE layers, and are left out.

    `step` is the forward pass of each token, rising; without it requests ran one by one. `facts` are those of the model
    that the file states, and `columns` the weights and token ids.
    """
    used = (experts >= 0).any(axis=(0, 2))
    wide = (experts >= 0).any(axis=(0, 1))
    if not used.any():
        raise TraceError("no token has an expert: nothing was recorded")
    experts = experts[:, used][:, :, : int(np.flatnonzero(wide)[-1]) + 1]
    if (weights := columns.get("weights")) is not None:
        columns["weights"] = np.where(experts >= 0, weights[:, used][:, :, : experts.shape[2]], 0).astype(np.float16)
    facts, ids = facts or {}, np.flatnonzero(used) if layer_ids is None else layer_ids[used]
    shape = choose_shape(
        options, experts.shape[1], experts.shape[2], int(experts.max()), facts.get("experts"), facts.get("expert_bytes")
    )
    meta = describe_source(path, options, shape, stated=facts.get("experts") is not None, model=facts.get("model"))
    numbered = number_passes(request.astype(np.int32), phase) if step is None else dense_steps(step)
    return Trace(
        shape=shape,
        experts=np.ascontiguousarray(experts),
        request=request.astype(np.int32),
        step=numbered,
        phase=phase.astype(np.uint8),
        labels=labels,
        meta=meta | {"layer_ids": ",".join(map(str, ids.tolist()))},
        **columns,
    )

"""Importer for the routing traces of FLAME-MoE: a parquet file for each layer, `layer_NN.parquet`, in one folder.

Each row is a token: `indices`, its experts, and `scores`, their weights. Give any of the files: its neighbours are read
with it, and the token ids of `samples`, two folders up, where they are. Reading parquet needs pyarrow.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hotset.errors import TraceError
from hotset.shape import MAX_LAYERS
from hotset.trace.event import Phase
from hotset.trace.importers._dense import build_dense, expert_ids
from hotset.trace.importers._options import ImportOptions
from hotset.trace.importers._parquet import Columns, Wanted, read_parquet
from hotset.trace.trace import Trace

SUFFIXES = (".parquet",)
_LAYER = re.compile(r"layer_(\d{1,4})\.parquet")


def recognises(head: bytes) -> bool:
    """Whether the first bytes of a file are those of parquet."""
    return head.startswith(b"PAR1")


def read(path: Path, options: ImportOptions) -> Trace:
    """Read the layers of one checkpoint; its tokens, of training texts, are replayed as if a model had written them.

    The files do not say where a text begins: all is one request, unless the options say how long one is.
    """
    files = _layers(path)
    grids: list[npt.NDArray[np.int16]] = []
    weights: list[npt.NDArray[np.float16]] = []
    for file, columns in zip(
        files.values(),
        read_parquet([Wanted(file, ("indices", "scores"), options.first) for file in files.values()]),
        strict=True,
    ):
        grids.append(_experts(file, columns))
        weights.append(_weights(file, columns))
        if grids[-1].shape != grids[0].shape:
            sizes = " and ".join(f"{tokens} tokens and top {k}" for tokens, k in (grids[0].shape, grids[-1].shape))
            raise TraceError(f"the layers differ ({sizes} in {file.name}): all must be of one checkpoint")
    tokens = len(grids[0])
    return build_dense(
        path,
        options,
        np.stack(grids, axis=1),
        np.arange(tokens) // (options.request_tokens or tokens),
        np.full(tokens, Phase.DECODE, np.uint8),
        layer_ids=np.array(list(files)),
        weights=np.stack(weights, axis=1),
        token_ids=_token_ids(path, tokens),
    )


def _layers(path: Path) -> dict[int, Path]:
    """The files of all layers, by the layer's number; a file of another name is a layer by itself."""
    if not _LAYER.fullmatch(path.name):
        return {0: path}
    found = {int(name[1]): file for file in path.parent.iterdir() if (name := _LAYER.fullmatch(file.name))}
    if len(found) > MAX_LAYERS:
        raise TraceError(f"there are more than {MAX_LAYERS} layers beside it")
    return dict(sorted(found.items()))


def _experts(file: Path, columns: Columns) -> npt.NDArray[np.int16]:
    indices = columns["indices"]
    if indices.ndim != 2:
        raise TraceError(f"{file.name}: indices is not lists of experts")
    return expert_ids(indices[:, None], f"indices of {file.name}")[:, 0]


def _weights(file: Path, columns: Columns) -> npt.NDArray[np.float16]:
    indices, scores = columns["indices"], columns["scores"]
    if scores.shape != indices.shape or scores.dtype.kind != "f":
        raise TraceError(f"{file.name}: scores is {scores.dtype} {scores.shape}, indices {indices.shape}")
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and validation names it
        return scores.astype(np.float16)


def _token_ids(path: Path, tokens: int) -> npt.NDArray[np.int32] | None:
    """The ids of the tokens, where the samples lie beside the layers and reach so far."""
    folder, parts, left = path.parent.parent.parent / "samples", [], tokens
    if path.parent.parent.name != "actives" or not folder.is_dir():
        return None
    for file in sorted(folder.glob("*.parquet")):
        (columns,) = read_parquet([Wanted(file, ("token_id",), left)])
        ids = columns["token_id"]
        if ids.dtype.kind not in "iu" or ids.ndim != 1 or not 0 <= int(ids.min()) <= int(ids.max()) < 1 << 31:
            raise TraceError(f"token_id of {file.name} is not whole numbers from 0")
        parts.append(ids.astype(np.int32))
        left -= len(ids)
        if left <= 0:
            return np.concatenate(parts)
    return None

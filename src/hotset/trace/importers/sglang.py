"""Importer for SGLang's expert distribution recorder in mode per_token: a .pt file of one rank.

Its records are forward passes: `topk_ids_of_layer` [layers, tokens, 8] with the tokens' ids and positions. They do not
say whose tokens these are; positions tell which tokens can follow each other, and requests are made from that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.errors import TraceError
from hotset.shape import MAX_EXPERTS
from hotset.trace.event import Phase
from hotset.trace.importers._archive import first_member
from hotset.trace.importers._dense import build_dense, expert_ids, join_grids, most_bytes
from hotset.trace.importers._options import ImportOptions
from hotset.trace.importers._torch_file import StoredTensor, TorchFile
from hotset.trace.trace import NONE, Trace

SUFFIXES = (".pt", ".pth")
_EXTEND, _DECODE, _MIXED, _IDLE = 1, 2, 3, 4  # SGLang's forward modes; those after them are of speculation and others
_MAX_INT = (1 << 31) - 1
_MODE = "record with --expert-distribution-recorder-mode per_token"

Array = npt.NDArray[Any]


def recognises(head: bytes) -> bool:
    """Whether the first bytes of a file look like those of torch.save."""
    return first_member(head).endswith(b"/data.pkl")


def read(path: Path, options: ImportOptions) -> Trace:
    """Read a recording of SGLang; experts that it keeps several copies of are numbered as the model numbers them."""
    with TorchFile(path) as file:
        passes = list(_passes(file, most_bytes(path)))
        logical = _logical(file)
    experts = join_grids((_grid(each["ids"], logical) for each in passes), "routed tokens")
    ran = (experts >= 0).any(axis=(1, 2))
    if not ran.any():
        raise TraceError("no token has an expert: nothing was recorded")
    follow, request = _Followed(), []
    for each in passes:
        request += follow.requests(each)
    lengths = [len(each["tokens"]) for each in passes]
    columns = {name: np.concatenate([each[name] for each in passes])[ran] for name in ("phase", "tokens")}
    numbered = np.unique(np.array(request)[ran], return_inverse=True)[1]
    return build_dense(
        path,
        options,
        experts[ran],
        numbered,
        columns["phase"],
        step=np.repeat(np.arange(len(passes)), lengths)[ran],
        facts={"experts": None if logical is None else int(logical.max()) + 1},
        token_ids=columns["tokens"].astype(np.int32),
    )


def _passes(file: TorchFile, most: int) -> Iterator[dict[str, Array]]:
    """The forward passes that computed something, in their order."""
    value = file.value
    if isinstance(value, dict) and "logical_count" in value:
        raise TraceError(f"it holds counts, not tokens: {_MODE}")
    records = value.get("records") if isinstance(value, dict) else None
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise TraceError("it is no recording of SGLang: there are no records in it")
    if any("global_physical_count" in record for record in records):
        raise TraceError(f"its records are counts, not tokens: {_MODE}")
    numbers = [_whole(record, "forward_pass_id", (1 << 62)) for record in records]
    for place in sorted(range(len(records)), key=numbers.__getitem__):
        try:
            found = _pass(file, records[place], most)
            most -= records[place]["topk_ids_of_layer"].bytes
            if len(found["tokens"]) and _mode(records[place]) != _IDLE:
                yield found
        except TraceError as error:
            raise TraceError(f"forward pass {numbers[place]}: {error}") from None


def _pass(file: TorchFile, record: dict[str, Any], most: int) -> dict[str, Array]:
    """The columns of one record: token ids, positions, phases, and where the sequences begin."""
    tokens, positions = (_column(record.get(name), name) for name in ("input_ids", "positions"))
    ids = record.get("topk_ids_of_layer")
    if not isinstance(ids, StoredTensor) or len(ids.shape) != 3 or 0 in ids.shape[::2] or ids.shape[1] != len(tokens):
        raise TraceError(f"topk_ids_of_layer is no tensor of layers, {len(tokens)} tokens and top_k")
    if len(positions) != len(tokens):
        raise TraceError(f"{len(positions)} positions for {len(tokens)} tokens")
    if ids.bytes > most:
        raise TraceError("the records name more tokens than the file has bytes for")
    mode, lengths = _mode(record), record.get("extend_seq_lens")
    if mode == _DECODE or lengths is None:
        lengths = [1] * len(tokens)
    sizes = _column(lengths, "extend_seq_lens")
    if (sizes < 1).any() or int(sizes.sum()) != len(tokens):
        raise TraceError(f"extend_seq_lens adds up to {int(sizes.sum())} tokens, not to {len(tokens)}")
    starts = np.cumsum(sizes) - sizes
    decodes = (mode == _DECODE) | ((mode == _MIXED) & (sizes == 1) & (positions[starts] > 0))
    phase = np.where(decodes, Phase.DECODE, Phase.PREFILL).astype(np.uint8)
    return {
        "ids": file.read(ids), "tokens": tokens, "positions": positions, "starts": starts, "sizes": sizes,
        "phase": np.repeat(phase, sizes),
    }  # fmt: skip


def _mode(record: dict[str, Any]) -> int:
    mode = _whole(record, "forward_mode", 1 << 16)
    if mode not in (_EXTEND, _DECODE, _MIXED, _IDLE):
        raise TraceError(
            f"forward_mode {mode} is neither a prompt nor plain decode: record without speculative decoding"
        )
    return mode


def _whole(record: dict[str, Any], name: str, most: int) -> int:
    value = record.get(name)
    if type(value) is not int or not 0 <= value < most:
        raise TraceError(f"{name} must be a whole number from 0")
    return value


def _column(values: Any, name: str) -> npt.NDArray[np.int64]:
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value <= _MAX_INT for value in values):
        raise TraceError(f"{name} must be a list of whole numbers from 0")
    return np.array(values, np.int64)


def _logical(file: TorchFile) -> Array | None:
    """The expert of the model that each copy is of, [layers, copies]."""
    stored = file.value.get("last_physical_to_logical_map")
    if stored is None:
        return None
    if not isinstance(stored, StoredTensor) or len(stored.shape) != 2 or 0 in stored.shape:
        raise TraceError("last_physical_to_logical_map is no tensor of layers and experts")
    table = file.read(stored)
    if table.dtype.kind not in "iu" or int(table.min()) < 0 or int(table.max()) >= MAX_EXPERTS:
        raise TraceError("last_physical_to_logical_map names experts that no model has")
    return table


def _grid(ids: Array, logical: Array | None) -> npt.NDArray[np.int16]:
    """Tokens first, and every copy by the expert that it is of."""
    grid = expert_ids(ids.transpose(1, 0, 2), "topk_ids_of_layer")
    if logical is None:
        return grid
    if logical.shape[0] != grid.shape[1] or int(grid.max(initial=NONE)) >= logical.shape[1]:
        raise TraceError("last_physical_to_logical_map is of another model than topk_ids_of_layer")
    layers = np.arange(grid.shape[1])[None, :, None]
    return np.where(grid >= 0, logical[layers, np.maximum(grid, 0)], NONE).astype(np.int16)


class _Followed:
    """The requests that tokens belong to, followed by the position that the next token of each must have.

    A decode pass computes all requests that run, in the order of the pass before and new ones after them: what it
    leaves out has ended. A prompt may be computed in pieces, with decode passes in between.
    """

    def __init__(self) -> None:
        self.next: dict[int, int] = {}  # of each request
        self.running: dict[int, deque[int]] = {}  # by next position
        self.prompts: dict[int, deque[int]] = {}  # the same for those that have not decoded yet, the latest first

    def requests(self, columns: dict[str, Array]) -> list[int]:
        """The request of each token of a pass."""
        own: list[int] = []
        going_on: list[int] = []
        starts, decodes = columns["starts"], columns["phase"][columns["starts"]] == Phase.DECODE
        positions = columns["positions"][starts].tolist()
        for position, size, decode in zip(positions, columns["sizes"].tolist(), decodes.tolist(), strict=True):
            request = self._take(self.running if decode else self.prompts, position)
            self.next[request] = position + size
            if not decode:
                self.prompts.setdefault(position + size, deque()).appendleft(request)
            going_on.append(request)
            own += [request] * size
        if decodes.all():
            self.running.clear()
        for request in going_on:
            self.running.setdefault(self.next[request], deque()).append(request)
        return own

    def _take(self, pool: dict[int, deque[int]], position: int) -> int:
        """The request of a pool that waits for this position, or a new one."""
        waiting = pool.get(position) if position else None
        while waiting:
            if self.next[request := waiting.popleft()] == position:  # else it went on in the other pool
                return request
        return len(self.next)

"""Rows of text formats, one per token and layer, put together into a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.errors import TraceError
from hotset.shape import ModelShape
from hotset.trace.event import Phase
from hotset.trace.importers._options import ImportOptions, choose_shape, describe_source
from hotset.trace.trace import NONE, Labels, Trace, dense_steps

_ROWS_AT_ONCE = 1 << 14
_MAX_SPARSITY = 16
_SPARE_PLACES = 1 << 16


@dataclass(frozen=True, eq=False)
class Cells:
    """What one token did in one layer, row by row; row i owns the entries start[i] to start[i + 1]."""

    request: npt.NDArray[np.int32]
    step: npt.NDArray[np.int32]
    token: npt.NDArray[np.int32]  # place of the token within its request and step
    phase: npt.NDArray[np.uint8]
    layer: npt.NDArray[np.int32]  # as the file numbers it
    line: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]  # [rows + 1]
    expert: npt.NDArray[np.int16]  # [entries]
    weight: npt.NDArray[np.float32] | None = None  # [entries]
    token_id: npt.NDArray[np.int32] | None = None


@dataclass(frozen=True, eq=False)
class _Order:
    """The rows sorted by token and layer, and where each token begins among them."""

    rows: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]  # [tokens], places in `rows`
    token: npt.NDArray[np.int64]  # [rows], token number of each sorted row


def text_of(line: bytes, number: int, most_bytes: int, what: str) -> str:
    """A line of a text format without its ends."""
    if len(line) > most_bytes:
        raise TraceError(f"line {number} is longer than {most_bytes} bytes: {what}")
    try:
        return line.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise TraceError(f"line {number} is not UTF-8 text") from None


def refuse(wrong: npt.NDArray[np.bool_], lines: npt.NDArray[Any], why: Callable[[int], str]) -> None:
    """Raise TraceError for the first wrong entry, with the line of the file that it is from."""
    if wrong.any():
        at = int(np.argmax(wrong))
        raise TraceError(f"line {lines[at]}{why(at)}")


def build_trace(
    path: Path,
    options: ImportOptions,
    cells: Cells,
    facts: Mapping[str, Any],
    describe: Callable[[int], str],
    labels: Labels = (),
) -> Trace:
    """The trace of a file that states these facts of the model; what it does not state is worked out.

    `describe` names the token of a row in error messages.
    """
    layer_ids = _layer_ids(cells, facts.get("layers"))
    top_k = facts.get("top_k") or int(np.diff(cells.start).max())
    refuse(np.diff(cells.start) > top_k, cells.line, lambda _: f" lists more than {top_k} experts, the header's top_k")
    largest = int(cells.expert.max(initial=-1))
    shape = choose_shape(options, len(layer_ids), top_k, largest, facts.get("experts"), facts.get("expert_bytes"))
    stated = facts.get("experts") is not None
    meta = describe_source(path, options, shape, stated=stated, model=facts.get("model"))
    meta["layer_ids"] = ",".join(map(str, layer_ids.tolist()))
    meta |= {"arch": facts["arch"]} if facts.get("arch") else {}
    return _assemble(cells, shape, layer_ids, describe, labels, meta)


def _layer_ids(cells: Cells, layers: int | None) -> npt.NDArray[np.int32]:
    """The file's numbers of the MoE layers: all that the header states, else those that occur."""
    if layers is None:
        return np.unique(cells.layer)
    refuse(
        cells.layer >= layers, cells.line, lambda at: f": layer {cells.layer[at]}, but the model has {layers} layers"
    )
    return np.arange(layers, dtype=np.int32)


def _assemble(
    cells: Cells,
    shape: ModelShape,
    layer_ids: npt.NDArray[np.int32],
    describe: Callable[[int], str],
    labels: Labels,
    meta: dict[str, str],
) -> Trace:
    _check_experts(cells, shape.experts)
    order = _sort(cells)
    _check_phases(cells, order)
    _check_ragged(cells, order, describe)
    tokens = len(order.first)
    if tokens * shape.token_cycle > _MAX_SPARSITY * len(cells.expert) + _SPARE_PLACES:
        raise TraceError(
            f"{tokens} tokens x {shape.layers} layers x top {shape.top_k} are nearly all empty: "
            "is the model in the header the one that was recorded?"
        )
    first, dims = order.rows[order.first], (tokens, shape.layers, shape.top_k)
    zeros = np.zeros(dims if cells.weight is not None else 0, np.float16)
    layer = np.searchsorted(layer_ids, cells.layer)
    return Trace(
        shape=shape,
        experts=_scatter(cells, order, layer, cells.expert, np.full(dims, NONE, np.int16)),
        request=cells.request[first],
        step=dense_steps(cells.step[first]),
        phase=cells.phase[first],
        weights=None if cells.weight is None else _scatter(cells, order, layer, cells.weight, zeros),
        token_ids=_token_ids(cells, order),
        labels=labels,
        meta=meta,
    )


def _sort(cells: Cells) -> _Order:
    rows = np.lexsort((cells.layer, cells.token, cells.request, cells.step))
    changed = np.zeros(len(rows), bool)
    changed[0] = True
    for column in (cells.token, cells.request, cells.step):
        changed[1:] |= np.diff(column[rows]) != 0
    twice = ~changed[1:] & (np.diff(cells.layer[rows]) == 0)
    if twice.any():
        lines = sorted(cells.line[rows[int(np.argmax(twice)) :][:2]].tolist())
        raise TraceError(f"line {lines[1]} gives the same token and layer as line {lines[0]}")
    return _Order(rows, np.flatnonzero(changed), np.cumsum(changed) - 1)


def _check_experts(cells: Cells, experts: int) -> None:
    lines = np.repeat(cells.line, np.diff(cells.start))
    refuse(
        cells.expert >= experts, lines,
        lambda at: f": expert {cells.expert[at]} is out of range: the model has experts 0 to {experts - 1}",
    )  # fmt: skip


def _check_phases(cells: Cells, order: _Order) -> None:
    phase = cells.phase[order.rows]
    wrong = phase != phase[order.first][order.token]
    refuse(wrong, cells.line[order.rows], lambda _: ": the token is prefill in one layer and decode in another")


def _check_ragged(cells: Cells, order: _Order, describe: Callable[[int], str]) -> None:
    """A decode token runs through every layer; only a prompt token may leave some out."""
    decode = cells.phase[order.rows] == Phase.DECODE
    if not decode.any():
        return
    wanted = np.unique(cells.layer[order.rows[decode]])
    sizes = np.diff(np.append(order.first, len(order.rows)))
    short = (cells.phase[order.rows[order.first]] == Phase.DECODE) & (sizes != len(wanted))
    if short.any():
        token = int(np.argmax(short))
        own = order.rows[order.first[token] :][: sizes[token]]
        missing = np.setdiff1d(wanted, cells.layer[own])[0]
        raise TraceError(f"{describe(int(own[0]))} lacks layer {missing}, which other decode tokens have")


def _scatter(
    cells: Cells, order: _Order, layer: npt.NDArray[Any], values: npt.NDArray[Any], grid: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Put each row's entries at the front of its place in the grid."""
    flat = grid.reshape(-1)
    for at in range(0, len(order.rows), _ROWS_AT_ONCE):
        rows = order.rows[at : at + _ROWS_AT_ONCE]
        counts = cells.start[rows + 1] - cells.start[rows]
        place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        cell = (order.token[at : at + _ROWS_AT_ONCE] * grid.shape[1] + layer[rows]) * grid.shape[2]
        flat[np.repeat(cell, counts) + place] = values[np.repeat(cells.start[rows], counts) + place]
    return grid


def _token_ids(cells: Cells, order: _Order) -> npt.NDArray[np.int32] | None:
    """The id that any row of the token states; all rows that state one must agree."""
    if cells.token_id is None:
        return None
    stated, lines = cells.token_id[order.rows], cells.line[order.rows]
    ids: npt.NDArray[np.int32] = np.maximum.reduceat(stated, order.first)
    wrong = (stated >= 0) & (stated != ids[order.token])
    refuse(wrong, lines, lambda _: ": another layer of the same token states another token_id")
    refuse(ids < 0, lines[order.first], lambda _: ": token_id is missing here, but given elsewhere: give all or none")
    return ids

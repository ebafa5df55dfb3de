"""Importer for the CSV of `llama-moe-trace`, of forks of llama.cpp: no header, position, layer and the experts.

Positions of a prompt are negative, and a batch that is computed in pieces repeats them; so the order of the rows
counts: a forward pass writes its layers one after the other, and in each its tokens.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hotset.errors import TraceError
from hotset.reading import open_regular
from hotset.shape import MAX_LAYERS
from hotset.trace.event import Phase
from hotset.trace.importers._cells import Cells, build_trace, refuse
from hotset.trace.importers._columns import read_numbers, whole_column
from hotset.trace.importers._options import ImportOptions
from hotset.trace.trace import Trace

SUFFIXES = ()  # .csv is told by its content
_ROW = re.compile(rb"-?\d{1,10},\d{1,5}(,\d{1,5})+\r?")
_MAX_POSITION = 1 << 31
_OTHER = "if these are request, token, layer and expert, begin the file with request,token,layer,expert"


def recognises(head: bytes) -> bool:
    """Whether the first line of a file is a position, a layer and experts."""
    return _ROW.fullmatch(head.partition(b"\n")[0]) is not None


def read(path: Path, options: ImportOptions) -> Trace:
    """Read a trace of llama-moe-trace; a position that falls back to a prompt begins another request."""
    with open_regular(path) as file:
        values, lines = read_numbers(file, 0, None, "a CSV of llama-moe-trace")
    if values.shape[1] < 3:
        raise TraceError(f"line {lines[0]} is not a position, a layer and at least one expert")
    position = values[:, 0]
    wrong = ~((np.abs(position) < _MAX_POSITION) & (position == np.floor(position)))
    refuse(wrong, lines, lambda at: f": the position {position[at]:g} is not a whole number")
    layer = whole_column(values[:, 1], lines, "layer", MAX_LAYERS)
    width = values.shape[1] - 2
    experts = whole_column(values[:, 2:].reshape(-1), np.repeat(lines, width), "expert", 32767, np.int16)
    cells = _to_cells(position.astype(np.int64), layer, lines, experts, width)
    return build_trace(
        path, options, cells, {}, lambda row: f"line {cells.line[row]}: the token at position {int(position[row])}"
    )


def _to_cells(
    position: npt.NDArray[np.int64],
    layer: npt.NDArray[np.int32],
    lines: npt.NDArray[np.int64],
    experts: npt.NDArray[np.int16],
    width: int,
) -> Cells:
    phase = np.where(position < 0, Phase.PREFILL, Phase.DECODE).astype(np.uint8)
    again = np.append(False, (np.diff(position) == 0) & (np.diff(layer) == 0) & (phase[1:] == Phase.DECODE))
    refuse(again, lines, lambda _: f" repeats a position and layer: {_OTHER}")
    step = _passes(position, layer, phase)
    return Cells(
        request=_requests(position, phase, step),
        step=step,
        token=_places(step, layer),
        phase=phase,
        layer=layer,
        line=lines,
        start=np.arange(len(lines) + 1, dtype=np.int64) * width,
        expert=experts,
    )


def _passes(
    position: npt.NDArray[np.int64], layer: npt.NDArray[np.int32], phase: npt.NDArray[np.uint8]
) -> npt.NDArray[np.int32]:
    """The forward pass of each row: one begins where the layers begin anew, and with every new token."""
    falls, stays, moved = np.diff(layer) < 0, np.diff(layer) == 0, np.diff(position)
    decodes = phase[1:] == Phase.DECODE
    begins = (
        falls | (np.diff(phase.astype(np.int8)) != 0) | (decodes & (moved != 0)) | (~decodes & stays & (moved <= 0))
    )
    return np.append(0, np.cumsum(begins)).astype(np.int32)


def _requests(
    position: npt.NDArray[np.int64], phase: npt.NDArray[np.uint8], step: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """One request, unless traces were laid end to end: a prompt after new tokens, or positions that begin again."""
    first = np.flatnonzero(np.append(True, np.diff(step) != 0))
    decodes, before = phase[first][1:] == Phase.DECODE, phase[first][:-1] == Phase.DECODE
    begins = before & (~decodes | (np.diff(position[first]) <= 0))
    return np.append(0, np.cumsum(begins)).astype(np.int32)[step]


def _places(step: npt.NDArray[np.int32], layer: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The place of each row's token in its pass; a layer with fewer rows than others computed the last tokens."""
    ends = np.append((np.diff(step) != 0) | (np.diff(layer) != 0), True)
    last = np.flatnonzero(ends)
    after = last[np.searchsorted(last, np.arange(len(step)))] - np.arange(len(step))
    most = np.zeros(int(step[-1]) + 1, np.int64)
    np.maximum.at(most, step, after)
    places: npt.NDArray[np.int32] = (most[step] - after).astype(np.int32)
    return places

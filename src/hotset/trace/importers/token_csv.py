"""Importer for a plain CSV with a header: request, token, layer and expert, one row per expert that was used.

A phase (0 prompt, 1 new token; new tokens without it), a step, a weight and a token_id may be there, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from hotset.errors import TraceError
from hotset.reading import lines_of, open_regular
from hotset.shape import MAX_LAYERS
from hotset.trace.event import Phase
from hotset.trace.importers._cells import Cells, build_trace, refuse
from hotset.trace.importers._columns import (
    MAX_LINE_BYTES,
    Columns,
    decode,
    read_numbers,
    weight_column,
    whole_columns,
)
from hotset.trace.importers._options import ImportOptions, number_passes
from hotset.trace.trace import Trace

SUFFIXES = ()  # .csv is told by its content
_WHAT = "a CSV of experts"
_NEEDED = ("request", "token", "layer", "expert")
_LIMITS = dict.fromkeys((*_NEEDED, "step", "token_id"), 1 << 31) | {"layer": MAX_LAYERS, "expert": 32767, "phase": 2}
_TYPES = {"phase": np.uint8, "expert": np.int16}


def recognises(head: bytes) -> bool:
    """Whether the first bytes of a file look like a header with these columns."""
    return {name.encode() for name in _NEEDED} <= {_bare(name) for name in head.partition(b"\n")[0].split(b",")}


def _bare(name: bytes) -> bytes:
    return name.removeprefix(b"\xef\xbb\xbf").strip().strip(b'"').lower()


def read(path: Path, options: ImportOptions) -> Trace:
    """Read a CSV of experts; without steps the prompt of a request is one forward pass, and every new token another."""
    with open_regular(path) as file:
        names, skipped = _header(file)
        values, lines = read_numbers(file, skipped, len(names), _WHAT)
    columns: Columns = {"line": lines} | whole_columns(values, lines, names, _LIMITS, _TYPES)
    if "weight" in names:
        columns["weight"] = weight_column(values[:, names.index("weight")], lines)
        refuse(np.isnan(columns["weight"]), lines, lambda _: ": the weight is not a number")
    cells, requests = _to_cells(columns)
    return build_trace(
        path,
        options,
        cells,
        {},
        lambda row: f"line {cells.line[row]}: token {cells.token[row]}",
        () if requests == list(range(len(requests))) else tuple({"name": str(name)} for name in requests),
    )


def _header(file: IO[bytes]) -> tuple[list[str], int]:
    """The names of the columns, and how many lines were read for them."""
    for number, line in enumerate(lines_of(file, MAX_LINE_BYTES), start=1):
        if decode(line, number, _WHAT):
            names = [_bare(name).decode("utf-8") for name in line.split(b",")]
            missing = [name for name in _NEEDED if name not in names]
            if missing or len(set(names)) != len(names):
                what = f"lacks the column {missing[0]!r}" if missing else "names a column twice"
                raise TraceError(f"line {number} {what}: expected a header with {', '.join(_NEEDED)}")
            return names, number
    raise TraceError(f"no line names the columns ({', '.join(_NEEDED)})")


def _to_cells(columns: Columns) -> tuple[Cells, list[int]]:
    """Gather the experts of each token and layer; requests are numbered by their first row."""
    request, names = _by_first_row(columns["request"])
    keys = ("step", "token") if "step" in columns else ("token",)
    rows = np.lexsort((np.arange(len(request)), columns["layer"], *(columns[key] for key in reversed(keys)), request))
    new_token = np.append(True, np.diff(request[rows]) != 0)
    for key in keys:
        new_token[1:] |= np.diff(columns[key][rows]) != 0
    first = np.flatnonzero(new_token | np.append(True, np.diff(columns["layer"][rows]) != 0))
    own = {name: column[rows[first]] for name, column in columns.items()} | {"request": request[rows[first]]}
    phase = own.get("phase", np.full(len(first), Phase.DECODE, np.uint8))
    _check_alike(columns, rows, first)
    return Cells(
        request=own["request"], step=own.get("step", _steps(own["request"], phase, new_token, first)),
        token=own["token"], phase=phase, layer=own["layer"], line=own["line"],
        start=np.append(first, len(rows)), expert=columns["expert"][rows],
        weight=columns["weight"][rows] if "weight" in columns else None, token_id=own.get("token_id"),
    ), names  # fmt: skip


def _by_first_row(request: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], list[int]]:
    """Numbers from 0; those of a file that numbers its requests so are kept."""
    names, first, numbered = np.unique(request, return_index=True, return_inverse=True)
    if int(names[-1]) == len(names) - 1:
        return request, names.tolist()
    order = np.argsort(first)
    return np.argsort(order)[numbered].astype(np.int32), names[order].tolist()


def _steps(
    request: npt.NDArray[np.int32],
    phase: npt.NDArray[np.uint8],
    new_token: npt.NDArray[np.bool_],
    first: npt.NDArray[np.int64],
) -> npt.NDArray[np.int32]:
    """The forward pass of each cell, where the file has no steps."""
    begins = new_token[first]
    passes = number_passes(request[begins], phase[begins])
    steps: npt.NDArray[np.int32] = passes[np.cumsum(begins) - 1]
    return steps


def _check_alike(columns: Columns, rows: npt.NDArray[np.int64], first: npt.NDArray[np.int64]) -> None:
    """Rows of one token and layer differ in expert and weight only."""
    owner = np.repeat(first, np.diff(np.append(first, len(rows))))
    for name in {"phase", "token_id"} & columns.keys():
        column = columns[name][rows]
        what = f": another row of the same token and layer has another {name}".format
        refuse(column != column[owner], columns["line"][rows], what)

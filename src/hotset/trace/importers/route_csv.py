"""Importer for the route CSV of BigMoeOnEdge: one row per token, layer and slot."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from hotset.errors import TraceError
from hotset.reading import lines_of, open_regular
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

SUFFIXES = (".csv",)
_VERSION = "v1"
_NEEDED = ("turn", "phase", "step", "layer", "slot", "expert")
_EITHER = (
    "begin the file with request,token,layer,expert (commas between them, then a row for each expert that was used); a "
    "route trace has turn,phase,step,layer,slot,expert,weight,..."
)
_LIMITS = {"turn": 1 << 31, "phase": 2, "step": 1 << 31, "layer": 4096, "slot": 32767, "expert": 32767}
_TYPES = {"phase": np.uint8, "layer": np.int16, "slot": np.int16, "expert": np.int16}
_MAX_COLUMNS = 64
_WHAT = "a route CSV"
_MODEL_FACTS = re.compile(
    r"model=(.*?)(?: arch=(\S+))?(?: n_layer=(\d{1,9}))?(?: n_expert=(\d{1,9}))?(?: n_expert_used=(\d{1,9}))?"
)
_LAYER_FACTS = re.compile(r"layer=\d+ expert_bytes=(\d{1,18})(?: .*)?")


@dataclass
class _Preamble:
    """What the comment lines and the column line state."""

    facts: dict[str, Any] = field(default_factory=dict)  # model, arch, experts, top_k, expert_bytes
    columns: list[str] = field(default_factory=list)
    lines: int = 0


def recognises(head: bytes) -> bool:
    """Whether the first bytes of a file look like a route trace."""
    return head.startswith((b"# route_trace", b"turn,"))


def read(path: Path, options: ImportOptions) -> Trace:
    """Read a route CSV; the prompt tokens of a turn become one forward pass."""
    with open_regular(path) as file:
        preamble = _read_preamble(file)
        columns = _read_columns(file, preamble)
    cells = _to_cells(columns)
    return build_trace(
        path,
        options,
        cells,
        preamble.facts,
        lambda row: f"line {cells.line[row]}: the token of step {cells.token[row]}",
    )


def _read_preamble(file: IO[bytes]) -> _Preamble:
    preamble = _Preamble()
    for line in lines_of(file, MAX_LINE_BYTES):
        preamble.lines += 1
        text = decode(line, preamble.lines, _WHAT)
        if text.startswith("#"):
            _note_fact(preamble.facts, text[1:].strip())
        elif text:
            preamble.columns = _check_columns(text.split(","), preamble.lines)
            return preamble
    raise TraceError(f"no line names the columns: {_EITHER}")


def _note_fact(facts: dict[str, Any], text: str) -> None:
    if text.startswith("route_trace") and text.split()[1:] != [_VERSION]:
        raise TraceError(f"this is {text[:60]!r}; hotset reads route_trace {_VERSION}")
    if found := _MODEL_FACTS.fullmatch(text):
        facts |= {"model": re.split(r"[/\\]", found[1])[-1] or None, "arch": found[2]}
        facts |= {"experts": int(found[4] or 0) or None, "top_k": int(found[5] or 0) or None}
    elif found := _LAYER_FACTS.fullmatch(text):
        facts["expert_bytes"] = max(facts.get("expert_bytes", 0), int(found[1]))


def _check_columns(names: list[str], line: int) -> list[str]:
    missing = [name for name in _NEEDED if name not in names]
    if "turn" in missing:  # the suffix alone led here
        raise TraceError(f"line {line} does not name the columns: {_EITHER}")
    if missing or len(set(names)) != len(names) or len(names) > _MAX_COLUMNS:
        what = f"lacks the column {missing[0]!r}" if missing else "names a column twice or too many columns"
        raise TraceError(f"line {line} {what}: expected turn,phase,step,layer,slot,expert,weight,...")
    return names


def _read_columns(file: IO[bytes], preamble: _Preamble) -> Columns:
    values, lines = read_numbers(file, preamble.lines, len(preamble.columns), _WHAT)
    limits = _LIMITS | {"slot": min(_LIMITS["slot"], preamble.facts.get("top_k") or _LIMITS["slot"])}
    columns: Columns = {"line": lines} | whole_columns(values, lines, preamble.columns, limits, _TYPES)
    if "weight" in preamble.columns:
        columns["weight"] = weight_column(values[:, preamble.columns.index("weight")], lines)
        _settle_weights(columns)
    return columns


def _settle_weights(columns: Columns) -> None:
    """The recorder writes nan throughout when the model exposes no weights; anywhere else nan is a fault."""
    unknown = np.isnan(columns["weight"])
    if unknown.all():
        del columns["weight"]
    else:
        refuse(unknown, columns["line"], lambda _: ": the weight is not a number")


def _to_cells(columns: Columns) -> Cells:
    """Gather the slots of each token and layer; rows may come in any order."""
    rows = np.lexsort((columns["slot"], columns["layer"], columns["step"], columns["turn"]))
    new_cell = np.zeros(len(rows), bool)
    new_cell[0] = True
    for name in ("layer", "step", "turn"):
        new_cell[1:] |= np.diff(columns[name][rows]) != 0
    first = np.flatnonzero(new_cell)
    _check_slots(columns, rows, first)
    own = {name: columns[name][rows[first]] for name in ("turn", "phase", "step", "layer", "line")}
    request, step = _number_tokens(own)
    return Cells(
        request=request, step=step, token=own["step"], phase=own["phase"],
        layer=own["layer"].astype(np.int32), line=own["line"],
        start=np.append(first, len(rows)), expert=columns["expert"][rows],
        weight=columns["weight"][rows] if "weight" in columns else None,
    )  # fmt: skip


def _check_slots(columns: Columns, rows: npt.NDArray[np.int64], first: npt.NDArray[np.int64]) -> None:
    sizes = np.diff(np.append(first, len(rows)))
    place = np.arange(len(rows)) - np.repeat(first, sizes)
    slot = columns["slot"][rows]
    why = ": slot {} of the token is there twice, or one before it is missing".format
    refuse(slot != place, columns["line"][rows], lambda at: why(slot[at]))


def _number_tokens(own: Columns) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Request and forward pass of every cell; cells are sorted by turn and step."""
    new_token = np.append(True, (np.diff(own["step"]) != 0) | (np.diff(own["turn"]) != 0))
    request = np.append(0, np.cumsum(np.diff(own["turn"]) != 0)).astype(np.int32)
    passes = number_passes(request[new_token], own["phase"][new_token])
    return request, passes[np.cumsum(new_token) - 1]

"""Importer for the route CSV of BigMoeOnEdge: one row per token, layer and slot."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from hotset.errors import TraceError
from hotset.reading import lines_of, open_regular
from hotset.trace.importers._cells import Cells, assemble, layer_ids_of
from hotset.trace.importers._options import ImportOptions, choose_shape, describe_source, number_passes
from hotset.trace.trace import Trace

SUFFIXES = (".csv",)
_VERSION = "v1"
_NEEDED = ("turn", "phase", "step", "layer", "slot", "expert")
_LIMITS = {"turn": 1 << 31, "phase": 2, "step": 1 << 31, "layer": 4096, "slot": 32767, "expert": 32767}
_TYPES = {
    "turn": np.int32,
    "phase": np.uint8,
    "step": np.int32,
    "layer": np.int16,
    "slot": np.int16,
    "expert": np.int16,
}
_MAX_COLUMNS = 64
_MAX_LINE_BYTES = 4096
_LINES_AT_ONCE = 1 << 14
_MODEL_FACTS = re.compile(
    r"model=(.*?)(?: arch=(\S+))?(?: n_layer=(\d{1,9}))?(?: n_expert=(\d{1,9}))?(?: n_expert_used=(\d{1,9}))?"
)
_LAYER_FACTS = re.compile(r"layer=\d+ expert_bytes=(\d{1,18})(?: .*)?")

Columns = dict[str, npt.NDArray[Any]]


@dataclass
class _Preamble:
    """What the comment lines and the column line state."""

    model: str | None = None
    arch: str | None = None
    experts: int | None = None
    top_k: int | None = None
    expert_bytes: int | None = None
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
    layer_ids = layer_ids_of(cells, None)
    top_k = preamble.top_k or int(columns["slot"].max()) + 1
    shape = choose_shape(
        options, len(layer_ids), top_k, int(cells.expert.max()), preamble.experts, preamble.expert_bytes
    )
    meta = describe_source(path, options, shape, stated=preamble.experts is not None, model=preamble.model)
    meta["layer_ids"] = ",".join(map(str, layer_ids.tolist()))
    if preamble.arch:
        meta["arch"] = preamble.arch
    return assemble(
        cells,
        shape,
        layer_ids,
        lambda row: f"line {cells.line[row]}: the token of step {cells.token[row]}",
        (),
        meta,
    )


def _read_preamble(file: IO[bytes]) -> _Preamble:
    preamble = _Preamble()
    for line in lines_of(file, _MAX_LINE_BYTES):
        preamble.lines += 1
        text = _decode(line, preamble.lines)
        if text.startswith("#"):
            _note_fact(preamble, text[1:].strip())
        elif text:
            preamble.columns = _check_columns(text.split(","), preamble.lines)
            return preamble
    raise TraceError("no line names the columns (turn,phase,step,layer,slot,expert,weight,...)")


def _decode(line: bytes, number: int) -> str:
    if len(line) > _MAX_LINE_BYTES:
        raise TraceError(f"line {number} is longer than {_MAX_LINE_BYTES} bytes: not a route CSV")
    try:
        return line.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise TraceError(f"line {number} is not UTF-8 text") from None


def _note_fact(preamble: _Preamble, text: str) -> None:
    if text.startswith("route_trace") and text.split()[1:] != [_VERSION]:
        raise TraceError(f"this is {text[:60]!r}; hotset reads route_trace {_VERSION}")
    if found := _MODEL_FACTS.fullmatch(text):
        preamble.model = re.split(r"[/\\]", found[1])[-1] or None
        preamble.arch = found[2]
        preamble.experts = int(found[4] or 0) or None
        preamble.top_k = int(found[5] or 0) or None
    elif found := _LAYER_FACTS.fullmatch(text):
        preamble.expert_bytes = max(preamble.expert_bytes or 0, int(found[1]))


def _check_columns(names: list[str], line: int) -> list[str]:
    missing = [name for name in _NEEDED if name not in names]
    if missing or len(set(names)) != len(names) or len(names) > _MAX_COLUMNS:
        what = f"lacks the column {missing[0]!r}" if missing else "names a column twice or too many columns"
        raise TraceError(f"line {line} {what}: expected turn,phase,step,layer,slot,expert,weight,...")
    return names


def _read_columns(file: IO[bytes], preamble: _Preamble) -> Columns:
    parts = [_convert(values, lines, preamble) for values, lines in _blocks(file, preamble)]
    if not parts:
        raise TraceError("the file holds no rows: nothing was recorded")
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if "weight" in columns:
        _settle_weights(columns)
    return columns


def _blocks(file: IO[bytes], preamble: _Preamble) -> Iterator[tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]]:
    """The rows as numbers, some thousands at a time, with their line numbers."""
    at, rest = preamble.lines, lines_of(file, _MAX_LINE_BYTES)
    while block := list(islice(rest, _LINES_AT_ONCE)):
        texts = [_decode(line, at + 1 + i) for i, line in enumerate(block)]
        lines = np.array([at + 1 + i for i, text in enumerate(texts) if text], np.int64)
        texts = [text for text in texts if text]
        at += len(block)
        if not texts:
            continue
        values = _parse(texts, len(preamble.columns))
        if values is None:
            fault = _first_fault(texts, len(preamble.columns))
            raise TraceError(f"line {lines[fault]} is not {len(preamble.columns)} numbers: {texts[fault][:60]!r}")
        yield values, lines


def _parse(texts: list[str], columns: int) -> npt.NDArray[np.float64] | None:
    try:
        values = np.loadtxt(texts, delimiter=",", comments=None, ndmin=2)
    except ValueError:
        return None
    return values if values.shape == (len(texts), columns) else None


def _first_fault(texts: list[str], columns: int) -> int:
    """Find the first row that does not parse, by halving."""
    low, high = 0, len(texts)
    while high - low > 1:
        middle = (low + high) // 2
        if _parse(texts[low:middle], columns) is None:
            high = middle
        else:
            low = middle
    return low


def _convert(values: npt.NDArray[np.float64], lines: npt.NDArray[np.int64], preamble: _Preamble) -> Columns:
    columns: Columns = {"line": lines}
    for name in _NEEDED:
        column = values[:, preamble.columns.index(name)]
        limit = min(_LIMITS[name], (preamble.top_k or _LIMITS[name]) if name == "slot" else _LIMITS[name])
        wrong = ~((column >= 0) & (column < limit) & (column == np.floor(column)))
        if wrong.any():
            at = int(np.argmax(wrong))
            raise TraceError(f"line {lines[at]}: {name} {column[at]:g} is not a whole number from 0 to {limit - 1}")
        columns[name] = column.astype(_TYPES[name])
    if "weight" in preamble.columns:
        columns["weight"] = _convert_weight(values[:, preamble.columns.index("weight")], lines)
    return columns


def _convert_weight(column: npt.NDArray[np.float64], lines: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    wrong = (column < 0) | (column > np.finfo(np.float16).max)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise TraceError(f"line {lines[at]}: the weight {column[at]:g} is negative or too large")
    return column.astype(np.float32)


def _settle_weights(columns: Columns) -> None:
    """The recorder writes nan throughout when the model exposes no weights; anywhere else nan is a fault."""
    unknown = np.isnan(columns["weight"])
    if unknown.all():
        del columns["weight"]
    elif unknown.any():
        raise TraceError(f"line {columns['line'][int(np.argmax(unknown))]}: the weight is not a number")


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
    wrong = columns["slot"][rows] != place
    if wrong.any():
        row = rows[int(np.argmax(wrong))]
        line, slot = columns["line"][row], columns["slot"][row]
        raise TraceError(f"line {line}: slot {slot} of the token is there twice, or one before it is missing")


def _number_tokens(own: Columns) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Request and forward pass of every cell; cells are sorted by turn and step."""
    new_token = np.append(True, (np.diff(own["step"]) != 0) | (np.diff(own["turn"]) != 0))
    request = np.append(0, np.cumsum(np.diff(own["turn"]) != 0)).astype(np.int32)
    passes = number_passes(request[new_token], own["phase"][new_token])
    return request, passes[np.cumsum(new_token) - 1]

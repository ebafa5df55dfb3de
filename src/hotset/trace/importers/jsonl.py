"""Importer for JSON lines: one object per token and layer."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from hotset.errors import TraceError
from hotset.reading import lines_of, open_regular, parse_bounded
from hotset.shape import MAX_LAYERS
from hotset.trace.event import Phase
from hotset.trace.importers._cells import Cells, build_trace, text_of
from hotset.trace.importers._options import ImportOptions
from hotset.trace.trace import Labels, Trace

SUFFIXES = (".jsonl", ".ndjson", ".json")
OWN_STEPS, SHARED_STEPS = "numbered in each request", "shared by requests that all begin with the same one"
"""What `meta` says of the steps where the file leaves them in doubt."""
_MAX_LINE_BYTES = 1 << 18
_MAX_VALUES = 1 << 17  # of a line: twice as many experts and weights as a model may have
_MAX_INT = (1 << 31) - 1
_MAX_ID = np.iinfo(np.int16).max - 1
_MAX_WEIGHT = float(np.finfo(np.float16).max)
_HEADER_FIELDS = {"layers", "experts", "top_k", "expert_bytes", "model"}
_FIELDS = {"request", "step", "layer", "experts", "weights", "phase", "token", "token_id"}
_PHASES = {"prefill": Phase.PREFILL, "decode": Phase.DECODE, 0: Phase.PREFILL, 1: Phase.DECODE}


def recognises(head: bytes) -> bool:
    """Whether the first bytes of a file look like JSON lines of tokens and layers."""
    line = head.lstrip().partition(b"\n")[0]
    return line.startswith(b"{") and (b'"layer"' in line or b'"hotset"' in line)


def read(path: Path, options: ImportOptions) -> Trace:
    """Read JSON lines; rows that share a step are one forward pass, also across requests.

    A file whose requests come one after the other, each with the same first step, numbers the steps of each request. If
    its requests are interleaved, they are taken for a batch, and `meta` says so.
    """
    rows = _Rows()
    with open_regular(path) as file:
        header = _read_lines(file, rows)
    if not rows.line:
        raise TraceError("the file holds no rows: nothing was recorded")
    cells = rows.cells()
    alike = options.steps is None and _begin_alike(cells)
    own = options.steps == "request" or (alike and _one_by_one(cells))
    if own:
        cells = replace(cells, step=_one_after_the_other(cells))
    trace = build_trace(path, options, cells, header, rows.describe, rows.labels())
    steps = {"steps": OWN_STEPS} if own else {"steps": SHARED_STEPS} if alike else {}
    return replace(trace, meta=trace.meta | steps)


def _begin_alike(cells: Cells) -> bool:
    """Whether there are several requests, and all begin with the same step."""
    requests, of_row = np.unique(cells.request, return_inverse=True)
    least = np.full(len(requests), _MAX_INT, np.int32)
    np.minimum.at(least, of_row, cells.step)
    return len(requests) > 1 and bool((least == least[0]).all())


def _one_by_one(cells: Cells) -> bool:
    """Whether requests come one after the other."""
    return bool(1 + np.count_nonzero(np.diff(cells.request)) == len(np.unique(cells.request)))


def _one_after_the_other(cells: Cells) -> npt.NDArray[np.int32]:
    """Steps of the requests laid end to end, in the order of their numbers."""
    pairs = cells.request.astype(np.int64) << 32 | cells.step
    numbered: npt.NDArray[np.int32] = np.unique(pairs, return_inverse=True)[1].astype(np.int32)
    return numbered


class _Rows:
    """The rows read so far, in typed columns: a list of objects would take many times the file."""

    def __init__(self) -> None:
        self.numbers: dict[str | int, int] = {}
        self.request, self.step, self.token, self.layer, self.token_id, self.count = (array("i") for _ in range(6))
        self.phase, self.line, self.expert, self.weight = array("B"), array("q"), array("h"), array("f")

    def add(self, row: dict[str, Any], line: int) -> None:
        """Check one row and append it; a fault raises TraceError."""
        if unknown := row.keys() - _FIELDS:
            raise TraceError(f"unknown key {min(unknown)[:40]!r}")
        name, phase = row.get("request"), row.get("phase", "decode")
        if not isinstance(name, str) and not (type(name) is int and 0 <= name <= _MAX_INT):
            raise TraceError("request must be a name or a whole number from 0")
        if not isinstance(phase, str | int) or phase not in _PHASES:
            raise TraceError('phase must be "prefill" or "decode"')
        self.step.append(_whole(row, "step", _MAX_INT))
        self.token.append(_whole(row, "token", _MAX_INT, 0))
        self.layer.append(_whole(row, "layer", MAX_LAYERS - 1))
        self.token_id.append(_whole(row, "token_id", _MAX_INT, -1))
        self._add_experts(row)
        self.request.append(self.numbers.setdefault(name, len(self.numbers)))
        self.phase.append(_PHASES[phase])
        self.line.append(line)

    def _add_experts(self, row: dict[str, Any]) -> None:
        experts = row.get("experts")
        if not isinstance(experts, list) or not experts:
            raise TraceError("experts must be a list of at least one id")
        for expert in experts:
            if type(expert) is not int or not 0 <= expert <= _MAX_ID:
                raise TraceError(f"expert {_show(expert)} is not a whole number from 0 to {_MAX_ID}")
        if len(set(experts)) != len(experts):
            raise TraceError("the same expert is named twice")
        if ("weights" in row) != bool(self.weight) and self.line:
            raise TraceError("weights are given on some lines and not on others: give all or none")
        self.weight.extend(_weights(row["weights"], len(experts)) if "weights" in row else ())
        self.expert.extend(experts)
        self.count.append(len(experts))

    def cells(self) -> Cells:
        """The columns as arrays; request numbers 0 to n - 1 in the file are kept as they are."""
        request = np.array(self.request, np.int32)
        if self._numbered():
            request = np.array(list(self.numbers), np.int32)[request]
        token_id = np.array(self.token_id, np.int32)
        return Cells(
            request=request, step=np.array(self.step, np.int32), token=np.array(self.token, np.int32),
            phase=np.array(self.phase, np.uint8), layer=np.array(self.layer, np.int32),
            line=np.array(self.line, np.int64), start=np.append(0, np.cumsum(np.array(self.count, np.int64))),
            expert=np.array(self.expert, np.int16),
            weight=np.array(self.weight, np.float32) if self.weight else None,
            token_id=token_id if (token_id >= 0).any() else None,
        )  # fmt: skip

    def _numbered(self) -> bool:
        wanted = range(len(self.numbers))
        return all(type(name) is int and name in wanted for name in self.numbers)

    def labels(self) -> Labels:
        """The names of the requests, where the file gives names."""
        if self._numbered():
            return ()
        return tuple({"name": str(name)} for name in self.numbers)

    def describe(self, row: int) -> str:
        """Name the token of a row."""
        names = {number: name for name, number in self.numbers.items()}
        name = str(names[self.request[row]])[:60]
        return f"line {self.line[row]}: request {name!r}, step {self.step[row]}, token {self.token[row]}"


def _read_lines(file: IO[bytes], rows: _Rows) -> dict[str, Any]:
    """Read all rows; returns what the header states, if there is one."""
    header: dict[str, Any] = {}
    for number, line in enumerate(lines_of(file, _MAX_LINE_BYTES), start=1):
        text = text_of(line, number, _MAX_LINE_BYTES, "expected one object per token and layer")
        if not text:
            continue
        try:
            row = _parse(line)
            if "hotset" in row and not rows.line and not header:
                header = _check_header(row)
            else:
                rows.add(row, number)
        except TraceError as error:
            raise TraceError(f"line {number}: {error}") from None
    return header


def _parse(line: bytes) -> dict[str, Any]:
    try:
        row = parse_bounded(line, values=_MAX_VALUES, containers=_MAX_VALUES)
    except (ValueError, RecursionError):
        raise TraceError("not valid JSON") from None
    if not isinstance(row, dict):
        raise TraceError("not a JSON object")
    return row


def _check_header(row: dict[str, Any]) -> dict[str, Any]:
    header = row["hotset"]
    if not isinstance(header, dict) or not header.keys() <= _HEADER_FIELDS:
        raise TraceError(f"the header may hold {', '.join(sorted(_HEADER_FIELDS))} and nothing else")
    for name in _HEADER_FIELDS - {"model"}:
        value = header.get(name, 1)
        if type(value) is not int or not 1 <= value < 1 << 60:
            raise TraceError(f"{name} in the header must be a positive whole number")
    if not isinstance(header.get("model", ""), str):
        raise TraceError("model in the header must be text")
    return header


def _whole(row: dict[str, Any], name: str, largest: int, default: int | None = None) -> int:
    if name not in row and default is not None:
        return default
    value = row.get(name)
    if type(value) is int and 0 <= value <= largest:
        return value
    raise TraceError(f"{name} must be a whole number from 0 to {largest}")


def _weights(value: Any, count: int) -> list[float]:
    if not isinstance(value, list) or len(value) != count:
        raise TraceError(f"weights must be a list of {count} numbers, as many as experts")
    for weight in value:
        if type(weight) not in (int, float) or not 0 <= weight <= _MAX_WEIGHT:
            raise TraceError(f"the weight {_show(weight)} is not a number from 0 to {_MAX_WEIGHT:g}")
    return value


def _show(value: Any) -> str:
    return str(value)[:40] if isinstance(value, str | int | float) else "given"

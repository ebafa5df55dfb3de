"""Lines of numbers with commas between them, as columns with the line that each row is from."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Iterator, Mapping
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from hotset.errors import TraceError
from hotset.reading import lines_of
from hotset.trace.importers._cells import refuse, text_of

MAX_LINE_BYTES = 4096
_MAX_WIDE_LINE = 1 << 18  # of a row with all experts of a token and layer

Floats = npt.NDArray[np.float64]
Lines = npt.NDArray[np.int64]
Columns = dict[str, npt.NDArray[Any]]


def decode(line: bytes, number: int, what: str, most_bytes: int = MAX_LINE_BYTES) -> str:
    """A line of a CSV file without its ends."""
    return text_of(line, number, most_bytes, f"not {what}")


def read_numbers(file: IO[bytes], skipped: int, width: int | None, what: str) -> tuple[Floats, Lines]:
    """The rows of an open file, after so many lines of it, as floats; without a width, all are as wide as the first."""
    numbers, last = array("q"), ""
    most_bytes = MAX_LINE_BYTES if width else _MAX_WIDE_LINE

    def rows() -> Iterator[str]:
        """The lines that hold something, as numpy asks for them: the last one asked for is the one it stumbles over."""
        nonlocal last
        for number, line in enumerate(lines_of(file, most_bytes), start=skipped + 1):
            if text := decode(line, number, what, most_bytes):
                numbers.append(number)
                last = text
                yield text

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # no rows at all
            values = np.loadtxt(rows(), delimiter=",", comments=None, ndmin=2)
    except ValueError:
        values = np.empty((0, 0))
    if not numbers:
        raise TraceError("the file holds no rows: nothing was recorded")
    if len(values) != len(numbers) or values.shape[1] != (width or values.shape[1]):
        wanted = f"{width} numbers" if width else "numbers, as many as in the lines before"
        raise TraceError(f"line {numbers[-1]} is not {wanted}: {last[:60]!r}")
    return values, np.array(numbers, np.int64)


def whole_column(column: Floats, lines: Lines, name: str, limit: int, dtype: Any = np.int32) -> npt.NDArray[Any]:
    """A column of whole numbers below a limit."""
    wrong = ~((column >= 0) & (column < limit) & (column == np.floor(column)))
    refuse(wrong, lines, lambda at: f": {name} {column[at]:g} is not a whole number from 0 to {limit - 1}")
    return column.astype(dtype)


def whole_columns(
    values: Floats, lines: Lines, names: list[str], limits: Mapping[str, int], types: Mapping[str, Any]
) -> Columns:
    """Those columns of whole numbers that there are, each below its limit."""
    return {
        name: whole_column(values[:, names.index(name)], lines, name, limit, types.get(name, np.int32))
        for name, limit in limits.items()
        if name in names
    }


def weight_column(column: Floats, lines: Lines) -> npt.NDArray[np.float32]:
    """A column of router weights; not-a-number is left for the caller to judge."""
    wrong = (column < 0) | (column > np.finfo(np.float16).max)
    refuse(wrong, lines, lambda at: f": the weight {column[at]:g} is negative or too large")
    return column.astype(np.float32)

"""Columns of parquet files, read by pyarrow in a process of its own.

A damaged file can end the process that reads it, or have it ask for any memory: the one that does has limits, hands its
arrays over as .npy files, and what becomes of it is an error line here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.errors import TraceError
from hotset.reading import check_regular

_ROWS_AT_ONCE = 1 << 16
_MEMORY_BYTES = 2 << 30  # what Python and pyarrow take, with room for a batch
_MAX_GROWTH = 64
_MAX_WHY = 200
_REFUSED = 3

Columns = dict[str, npt.NDArray[Any]]


class Wanted(NamedTuple):
    """What to read of a file: columns of numbers, or of lists of numbers that are all of one length."""

    path: Path
    columns: Sequence[str]
    rows: int | None = None  # so many, where there are more


def read_parquet(wanted: Sequence[Wanted]) -> Iterator[Columns]:
    """The columns of each file, in this order, one axis for plain numbers and two for lists."""
    _check_installed()
    for each in wanted:
        check_regular(each.path)
    with tempfile.TemporaryDirectory(prefix="hotset-parquet-") as folder:
        asked = [{"path": str(each.path), "columns": list(each.columns), "rows": each.rows} for each in wanted]
        size = max(each.path.stat().st_size for each in wanted)
        _run_child({"folder": folder, "files": asked, "memory": _MEMORY_BYTES + _MAX_GROWTH * size})
        for number, each in enumerate(wanted):
            yield {name: np.load(Path(folder) / f"{number}.{place}.npy") for place, name in enumerate(each.columns)}


def _check_installed() -> None:
    try:
        there = importlib.util.find_spec("pyarrow") is not None
    except ValueError:
        there = False
    if not there:
        raise TraceError("reading parquet needs pyarrow: pip install 'hotset[parquet]'")


def _run_child(question: dict[str, Any]) -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(  # noqa: S603 - this interpreter and our own module
        [sys.executable, "-P", "-m", __name__],
        input=json.dumps(question),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, "ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"},
    )
    if done.returncode == 0:
        return
    why = done.stdout.strip()[:_MAX_WHY] if done.returncode == _REFUSED else "pyarrow cannot read it"
    raise TraceError(why or "a parquet file is damaged: pyarrow cannot read it")


def main() -> int:
    """Answer the question on stdin: write arrays, or say on stdout what is wrong."""
    question = json.load(sys.stdin)
    with suppress(ImportError, ValueError, OSError):  # a system without limits
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (question["memory"],) * 2)
    for number, asked in enumerate(question["files"]):
        name = Path(asked["path"]).name
        try:
            found = _columns(asked)
        except TraceError as error:
            sys.stdout.write(f"{name}: {error}")
            return _REFUSED
        except Exception as error:  # pyarrow's are of many kinds
            sys.stdout.write(f"{name} is not a parquet file, or it is damaged: {' '.join(str(error).split())}")
            return _REFUSED
        for place, column in enumerate(asked["columns"]):
            np.save(Path(question["folder"]) / f"{number}.{place}.npy", found[column], allow_pickle=False)
    return 0


def _columns(asked: dict[str, Any]) -> Columns:
    from pyarrow import parquet

    parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in asked["columns"]}
    with parquet.ParquetFile(asked["path"], memory_map=False, pre_buffer=False) as file:
        for name in asked["columns"]:
            if name not in file.schema_arrow.names:
                raise TraceError(f"it has no column {name!r}")
        left = file.metadata.num_rows if asked["rows"] is None else asked["rows"]
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=asked["columns"], use_threads=False):
            for name, arrays in parts.items():
                arrays.append(_numbers(batch.slice(0, left).column(name), name))
            left -= len(batch)
            if left <= 0:
                break
    if not all(parts.values()):
        raise TraceError("it holds no rows: nothing was recorded")
    if any(len({array.shape[1:] for array in arrays}) > 1 for arrays in parts.values()):
        raise TraceError("its lists are not all of one length")
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def _numbers(column: Any, name: str) -> npt.NDArray[Any]:
    """A column of numbers or of lists of one length as an array."""
    column.validate(full=True)
    wrong = TraceError(f"{name} is {str(column.type)[:60]}, not numbers or lists of numbers of one length")
    rows, lists = len(column), hasattr(column, "flatten") and "list" in str(column.type)
    values = column.flatten() if lists else column
    if column.null_count or values.null_count or not rows or len(values) % rows:
        raise wrong
    array: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    if array.dtype.kind not in "iuf":
        raise wrong
    if not lists:
        return array
    width = len(values) // rows
    if hasattr(column, "value_lengths") and (np.asarray(column.value_lengths()) != width).any():
        raise wrong
    return array.reshape(rows, width)


if __name__ == "__main__":
    sys.exit(main())

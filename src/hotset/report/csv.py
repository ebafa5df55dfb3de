"""Rows as CSV, for spreadsheets and data frames."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotset.files import write_beside

if TYPE_CHECKING:
    from hotset.sim import Row
    from hotset.sim.forecasting import Evaluation
    from hotset.sim.studies import StudyResult

_NOT_FLAT = ("recall_by_layer", "bins")  # of a forecast's score; --json has them


def to_csv(rows: Iterable[Row]) -> str:
    """A header and one line per row; absent figures are empty, rates are fractions."""
    from hotset.sim.rows import FIELDS

    return _csv(FIELDS, (row.as_dict() for row in rows))


def forecasts_to_csv(results: Mapping[str, Evaluation]) -> str:
    """One line for each trace, forecast and distance."""
    return _csv(None, forecast_rows(results))


def forecast_rows(results: Mapping[str, Evaluation]) -> list[dict[str, Any]]:
    """The scores of forecasts as rows of plain figures."""
    return [
        {"trace": name} | {key: value for key, value in asdict(score).items() if key not in _NOT_FLAT}
        for name, result in results.items()
        for score in result.scores
    ]


def study_to_csv(result: StudyResult) -> str:
    """The rows of a study, its columns in the order of its table; whatever else a row holds comes after them."""
    keys = [column.key for column in result.study.columns]
    more = dict.fromkeys(key for row in result.rows for key in row if key not in keys)
    return _csv([*keys, *more], result.rows)


def write_csv(path: Path, text: str) -> None:
    """Write a table, whole or not at all."""
    with write_beside(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def _csv(fields: Sequence[str] | None, rows: Iterable[Mapping[str, Any]]) -> str:
    found = list(rows)
    text = StringIO()
    names = list(fields or dict.fromkeys(key for row in found for key in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return text.getvalue()

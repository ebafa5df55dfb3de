"""Rows as CSV, for spreadsheets and data frames."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotset.sim import Row


def to_csv(rows: Iterable[Row]) -> str:
    """A header and one line per row; absent figures are empty, rates are fractions."""
    from hotset.sim.rows import FIELDS

    text = StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.as_dict() for row in rows)
    return text.getvalue()

"""Results as data frames: of a sweep, of forecasts, of a study, and of a live model's counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hotset.checks import shown
from hotset.errors import HotsetError
from hotset.report.csv import forecast_rows
from hotset.trace import Trace
from hotset.trace.frame import pandas


def to_pandas(what: Any) -> Any:
    """A data frame of a trace, of what simulate, evaluate or a study gave, or of `requests()` or `stats()` of a model.

    What is nested becomes columns with a dot: `decode.hit_rate`.
    """
    if isinstance(what, Trace):
        return what.to_pandas()
    return pandas().DataFrame(_rows(what))


def _rows(what: Any) -> list[dict[str, Any]]:
    from hotset.sim.forecasting import Evaluation

    if isinstance(what, Mapping) and what and all(isinstance(each, Evaluation) for each in what.values()):
        return forecast_rows(what)
    if isinstance(what, Evaluation):
        return forecast_rows({"trace": what})
    if isinstance(what, Mapping):
        return [_flat(what)]
    found = what.rows if hasattr(what, "rows") else what
    if isinstance(found, Sequence) and not isinstance(found, str | bytes):
        rows = [each if isinstance(each, Mapping) else getattr(each, "as_dict", dict)() for each in found]
        return [_flat(row) for row in rows]
    raise HotsetError(f"there is no data frame of {shown(what)}: give a trace, a result, requests() or stats()")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The figures of nested dictionaries, side by side."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found

"""Whether a checkpoint held every weight of its model, as transformers reports it and then goes on with random ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hotset.errors import ModelError

NAMED = 3
"""How many weights a message names before it only counts them."""
REMEDY = "it is incomplete, damaged, or of another model than its config says; download it again"


def refuse_incomplete(report: Any) -> None:
    """Raise ModelError if weights are missing; those that the library ties or knows to be absent are not reported."""
    if report is not None and report.missing_keys:
        raise ModelError(f"the checkpoint does not hold {_some(report.missing_keys)}: {REMEDY}")


def refuse_misfits(report: Any, error: Exception) -> None:
    """Raise ModelError in place of the library's error if weights do not convert, or not to the model's shapes."""
    if report is not None and report.mismatched_keys:
        found = {f"{name} ({_shape(stored)}, not {_shape(own)})" for name, stored, own in report.mismatched_keys}
        raise ModelError(f"the checkpoint holds weights of other shapes: {_some(found)}: {REMEDY}") from error
    if report is not None and report.conversion_errors:
        raise ModelError(
            f"the checkpoint's weights do not make up {_some(report.conversion_errors)}: {REMEDY}"
        ) from error


def _some(names: Iterable[str]) -> str:
    """The first few of many names, and how many more there are."""
    known = sorted(names)
    return f"{', '.join(known[:NAMED])}{f' and {len(known) - NAMED:,} more' if known[NAMED:] else ''}"


def _shape(size: Iterable[int]) -> str:
    return str(list(size))

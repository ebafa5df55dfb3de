"""What comes next: one forecast per file, found by the file's name.

A module of this package that defines `FORECAST` is a forecast; nothing else has to be edited to add one.
"""

from __future__ import annotations

from hotset.checks import known
from hotset.errors import PolicyError
from hotset.forecasts.base import MAX_DISTANCE, Forecast, Seen
from hotset.policies.base import modules_in, parse_named

__all__ = ["MAX_DISTANCE", "Forecast", "Seen", "names", "parse"]


def names() -> list[str]:
    """All forecasts, by name, without importing them."""
    return modules_in(__path__)


def parse(spec: str) -> Forecast:
    """Make a forecast from text: a name, then options, as in "token:slots=1024"."""
    found = names()
    known(spec, "forecast", found, PolicyError)
    forecast: Forecast = parse_named(spec, "forecast", __name__, found)
    return forecast

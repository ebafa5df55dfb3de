"""What comes next: one forecast per file, found by the file's name.

A module of this package that defines `FORECAST` is a forecast; nothing else has to be edited to add one.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from hotset.checks import text
from hotset.errors import PolicyError
from hotset.forecasts.base import MAX_DISTANCE, Forecast, Seen
from hotset.policies.base import parse_options

__all__ = ["MAX_DISTANCE", "Forecast", "Seen", "names", "parse"]


def names() -> list[str]:
    """All forecasts, by name, without importing them."""
    found = (module.name for module in iter_modules(__path__))
    return sorted(name for name in found if name != "base" and not name.startswith("_"))


def parse(spec: str) -> Forecast:
    """Make a forecast from text: a name, then options, as in "token:slots=1024"."""
    name, _, rest = text(spec, "a forecast", PolicyError).strip().partition(":")
    if name not in names():
        raise PolicyError(f'no forecast is called "{name:.60}"; there are {", ".join(names())}')
    cls: type[Forecast] = import_module(f"{__name__}.{name}").FORECAST
    return cls(**parse_options(cls, rest))

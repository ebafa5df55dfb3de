"""What comes next: one forecast per file, found by the file's name.

A module of this package that defines `FORECAST` is a forecast; nothing else has to be edited to add one.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from hotset.checks import text
from hotset.errors import PolicyError
from hotset.forecasts.base import MAX_DISTANCE, Forecast, Seen

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
    return cls(**dict(_option(cls, part) for part in rest.split(",") if part.strip()))


def _option(cls: type[Forecast], part: str) -> tuple[str, Any]:
    key, equals, word = (side.strip() for side in part.partition("="))
    defaults = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
    if not defaults:
        raise PolicyError(f'{cls.name} has no options, so not "{part.strip()}"')
    if not equals or key not in defaults:
        raise PolicyError(f'{cls.name} has no option "{key}"; it has {", ".join(defaults)} (write name=value)')
    try:
        return key, type(defaults[key])(word)
    except (ValueError, OverflowError):
        raise PolicyError(f'{cls.name}: {key} must be a number, not "{word}"') from None

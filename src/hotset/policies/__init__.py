"""What to keep: one policy per file, found by the file's name.

A module of this package that defines `POLICY` is a policy; nothing else has to be edited to add one.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from hotset.checks import text
from hotset.errors import PolicyError
from hotset.policies.base import Admit, Ask, Grid, Policy, compiled, restore_state, save_state

__all__ = ["Admit", "Ask", "Grid", "Policy", "compiled", "names", "parse", "restore_state", "save_state"]

_ON_OFF = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}


def names() -> list[str]:
    """All policies, by name, without importing them."""
    return sorted(module.name for module in iter_modules(__path__) if module.name != "base")


def parse(spec: str) -> Policy:
    """Make a policy from text: a name, then options, as in "decay:half_life=8"."""
    name, _, rest = text(spec, "a policy", PolicyError).strip().partition(":")
    if name not in names():
        raise PolicyError(f'no policy is called "{name:.60}"; there are {", ".join(names())}')
    cls: type[Policy] = import_module(f"{__name__}.{name}").POLICY
    return cls(**dict(_option(cls, part) for part in rest.split(",") if part.strip()))


def _option(cls: type[Policy], part: str) -> tuple[str, Any]:
    key, equals, word = (side.strip() for side in part.partition("="))
    defaults = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
    if not equals or key not in defaults:
        raise PolicyError(f'{cls.name} has no option "{key}"; it has {", ".join(defaults)} (write name=value)')
    return key, _convert(cls, key, word, type(defaults[key]))


def _convert(cls: type[Policy], key: str, word: str, kind: type) -> Any:
    if kind is bool:
        if word.lower() not in _ON_OFF:
            raise PolicyError(f'{cls.name}: {key} is on or off, not "{word}"')
        return _ON_OFF[word.lower()]
    try:
        return kind(word)
    except (ValueError, OverflowError):
        raise PolicyError(f'{cls.name}: {key} must be a number, not "{word}"') from None

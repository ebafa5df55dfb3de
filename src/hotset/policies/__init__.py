"""What to keep: one policy per file, found by the file's name.

A module of this package that defines `POLICY` is a policy; nothing else has to be edited to add one.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from hotset.checks import text
from hotset.errors import PolicyError
from hotset.policies.base import Admit, EventView, Grid, Policy, compiled, parse_options, restore_state, save_state

__all__ = ["Admit", "EventView", "Grid", "Policy", "compiled", "names", "parse", "restore_state", "save_state"]


def __getattr__(name: str) -> Any:
    """Names of earlier versions."""
    if name == "Ask":
        warnings.warn("hotset.policies.Ask is deprecated: use hotset.policies.EventView", DeprecationWarning, 2)
        return EventView
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def names() -> list[str]:
    """All policies, by name, without importing them."""
    return sorted(module.name for module in iter_modules(__path__) if module.name != "base")


def parse(spec: str) -> Policy:
    """Make a policy from text: a name, then options, as in "decay:half_life=8"."""
    name, _, rest = text(spec, "a policy", PolicyError).strip().partition(":")
    if name not in names():
        raise PolicyError(f'no policy is called "{name:.60}"; there are {", ".join(names())}')
    cls: type[Policy] = import_module(f"{__name__}.{name}").POLICY
    return cls(**parse_options(cls, rest))

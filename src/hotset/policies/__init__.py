"""What to keep: one policy per file, found by the file's name.

A module of this package that defines `POLICY` is a policy; nothing else has to be edited to add one.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from hotset.checks import text
from hotset.errors import PolicyError
from hotset.policies.base import Admit, Ask, Grid, Policy, compiled, parse_options, restore_state, save_state

__all__ = ["Admit", "Ask", "Grid", "Policy", "compiled", "names", "parse", "restore_state", "save_state"]


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

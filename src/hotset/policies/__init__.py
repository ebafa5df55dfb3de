"""What to keep: one policy per file, found by the file's name.

A module of this package that defines `POLICY` is a policy; nothing else has to be edited to add one.
"""

from __future__ import annotations

import warnings
from typing import Any

from hotset.checks import known
from hotset.errors import PolicyError
from hotset.policies.base import (
    Admit,
    EventView,
    Grid,
    Policy,
    compiled,
    modules_in,
    parse_named,
    restore_state,
    save_state,
)  # fmt: skip

__all__ = ["Admit", "EventView", "Grid", "Policy", "compiled", "names", "parse", "restore_state", "save_state"]


def __getattr__(name: str) -> Any:
    """Names of earlier versions."""
    if name == "Ask":
        warnings.warn("hotset.policies.Ask is deprecated: use hotset.policies.EventView", DeprecationWarning, 2)
        return EventView
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def names() -> list[str]:
    """All policies, by name, without importing them."""
    return modules_in(__path__)


def parse(spec: str) -> Policy:
    """Make a policy from text: a name, then options, as in "decay:half_life=8"."""
    found = names()
    known(spec, "policy", found, PolicyError)
    policy: Policy = parse_named(spec, "policy", __name__, found)
    return policy

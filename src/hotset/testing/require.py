"""How a check says what does not hold."""

from __future__ import annotations

from typing import Any

import numpy as np


class ContractError(AssertionError):
    """A policy or a forecast that does not keep its contract; the message says which part of it."""


def require(ok: Any, what: str) -> None:
    """Raise ContractError unless this holds."""
    if not ok:
        raise ContractError(what)


def require_same(found: Any, wanted: Any, what: str) -> None:
    """Raise ContractError unless two arrays are equal; not-a-number equals itself."""
    one, other = np.asarray(found), np.asarray(wanted)
    floats = one.dtype.kind == "f" and other.dtype.kind == "f"
    require(one.shape == other.shape and np.array_equal(one, other, equal_nan=floats), what)

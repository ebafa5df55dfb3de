"""How many examples a test draws: few in `make test`, many in `make test-long`."""

from __future__ import annotations

import os

LONG = os.environ.get("HOTSET_LONG_TESTS") == "1"


def examples(few: int, many: int) -> int:
    """The smaller number, or the larger one where time is no matter."""
    return many if LONG else few

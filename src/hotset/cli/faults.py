"""Where an error comes from, for those who ask."""

from __future__ import annotations

import os
import sys
import traceback

from hotset.generation.errors import DEBUG


def show_traceback(error: BaseException) -> None:
    """Where an error comes from, if that was asked for."""
    if debugging():
        traceback.print_exception(error, file=sys.stderr)


def debugging() -> bool:
    """Whether errors show where they come from."""
    return os.environ.get(DEBUG, "") not in ("", "0")

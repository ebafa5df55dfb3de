"""Traces as the command line names them: a file, or `reference:NAME` for one that ships with hotset."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotset.trace import Trace

PREFIX = "reference:"


def load_trace(named: Path) -> Trace:
    """Read the trace that a person named."""
    from hotset.trace import Trace

    if not str(named).startswith(PREFIX):
        return Trace.load(named)
    from hotset.reference import trace

    return trace(str(named).removeprefix(PREFIX))


def short_name(named: Path) -> str:
    """What to call it in a table."""
    text = str(named)
    return text.removeprefix(PREFIX) if text.startswith(PREFIX) else named.stem

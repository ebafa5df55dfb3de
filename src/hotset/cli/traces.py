"""Traces as the command line names them: a file, or `reference:NAME` for one that ships with hotset."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hotset.generation.prompt_files import SHIPPED

if TYPE_CHECKING:
    from hotset.trace import Trace


def load_trace(named: Path) -> Trace:
    """Read the trace that a person named."""
    from hotset.trace import Trace

    if not str(named).startswith(SHIPPED):
        return Trace.load(named)
    from hotset.reference import trace

    return trace(str(named).removeprefix(SHIPPED))


def short_name(named: Path) -> str:
    """What to call it in a table."""
    text = str(named)
    return text.removeprefix(SHIPPED) if text.startswith(SHIPPED) else named.stem

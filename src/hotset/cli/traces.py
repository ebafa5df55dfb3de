"""Traces as the command line names them: a file, or `reference:NAME` for one that ships with hotset."""

from __future__ import annotations

from collections.abc import Iterable
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


def load_traces(named: Iterable[Path]) -> dict[str, Trace]:
    """Read several, each by what to call it in a table."""
    traces: dict[str, Trace] = {}
    for each in named:
        text = str(each)
        name = text.removeprefix(SHIPPED) if text.startswith(SHIPPED) else each.stem
        traces[text if name in traces else name] = load_trace(each)
    return traces

"""Traces as the command line names them: a file, or `reference:NAME` for one that ships with hotset."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset.generation.prompt_files import SHIPPED
from hotset.text import printable

if TYPE_CHECKING:
    from hotset.trace import Trace


TraceFile = Annotated[
    Path, typer.Argument(metavar="TRACE", help="A trace file, or reference:NAME.", show_default=False)
]
TraceFiles = Annotated[list[Path], typer.Argument(metavar="TRACE", help="Trace files, or reference:NAME.")]
OutFile = Annotated[Path, typer.Option("-o", "--out", help="Where to write the trace.", show_default=False)]


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


def written(trace: Trace, out: Path) -> dict[str, Any]:
    """What was written to a file, for scripts."""
    return {
        "file": str(out),
        "bytes": out.stat().st_size,
        "tokens": trace.tokens,
        "requests": trace.requests,
        "steps": trace.steps,
        "layers": trace.shape.layers,
        "experts": trace.shape.experts,
        "top_k": trace.shape.top_k,
    }


def written_line(document: dict[str, Any]) -> str:
    """The same for people."""
    from hotset.report.words import plural

    return printable(
        f"{document['file']}: {plural(document['tokens'], 'token')} of {plural(document['requests'], 'request')} in "
        f"{plural(document['steps'], 'step')}, {document['layers']} layers x {document['experts']} experts, "
        f"top {document['top_k']}"
    )

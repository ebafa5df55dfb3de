"""How every command speaks: text or one JSON document on stdout, progress and notes on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]


def emit(document: dict[str, Any], as_json: bool, *views: RenderableType) -> None:
    """Print the document as JSON, or its views for people."""
    if as_json:
        json.dump(_plain(document), sys.stdout, allow_nan=False)
        sys.stdout.write("\n")
        return
    console = Console()
    if not console.is_terminal:  # in a pipe a table must not be folded to an imagined screen
        console = Console(width=200)
    for view in views:
        console.print(view, soft_wrap=isinstance(view, str), highlight=False)


def note(text: str) -> None:
    """Say one line to the person, beside the result."""
    Console(stderr=True).print(f"note: {text}", style="dim", soft_wrap=True, highlight=False, markup=False)


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Any]:
    """Yield a callable that advances the bar; the bar shows on a terminal only."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def _plain(value: Any) -> Any:
    """Make numpy scalars plain, and what JSON cannot say null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, str):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

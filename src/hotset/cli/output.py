"""How every command speaks: text or one JSON document on stdout, progress and notes on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hotset.cli.log import LOG, is_quiet, log_step
from hotset.plain import plain
from hotset.text import printable, without_controls

T = TypeVar("T")
Bar = Callable[[str], AbstractContextManager[Callable[[int, int], None] | None]]
"""Given what is done, a progress callback for the length of a block."""
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]


class SafeConsole(Console):
    """A console that takes text as it is: no markup, no emoji codes, and no control character of a file's names."""

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of something to show; rich's own control segments pass."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else without_controls(text), style, control)


def emit(document: dict[str, Any], as_json: bool, *views: RenderableType) -> None:
    """Print the document as JSON, or its views for people."""
    if as_json:
        sys.stdout.write(json.dumps(plain(document), allow_nan=False) + "\n")
        return
    console = SafeConsole()
    if not console.is_terminal:  # in a pipe a table must not be folded to an imagined screen
        console = SafeConsole(width=200)
    for view in views:
        console.print(view, soft_wrap=isinstance(view, str))


def emit_result(result: Any, as_json: bool, tables: Callable[[], Iterable[RenderableType]], **more: Any) -> None:
    """Print a result as JSON, or its tables for people and a line for each of its notes."""
    if as_json:
        emit(more | result.as_dict(), True)
        return
    emit({}, False, *tables())
    for text in result.notes:
        note(text)


def note(text: str) -> None:
    """Say one line to the person, beside the result."""
    LOG.warning(text)
    _say(f"note: {text}")


def renamed(value: T, former: T | None, old: str, new: str) -> T:
    """The value of a flag, or of its earlier name with a deprecation line."""
    if former is None:
        return value
    note(f"{old} is deprecated: use {new}")
    return former


def message(*views: RenderableType) -> None:
    """Say something beside the text, on stderr."""
    for view in views:
        if isinstance(view, str):
            LOG.info(view)
    _say(*views)


def _say(*views: RenderableType) -> None:
    if is_quiet():
        return
    console = SafeConsole(stderr=True)
    for view in views:
        plain = isinstance(view, str)
        console.print(view, style="dim" if plain else None, soft_wrap=plain)


def show(text: str) -> None:
    """Write a model's text at once: as it is into a file or a pipe, on a terminal without what could steer it."""
    sys.stdout.write(without_controls(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def finish_text(text: str) -> None:
    """End the last line of an answer."""
    show("\n" if not text.endswith("\n") else "")


def facts_table(rows: Iterable[tuple[str, str]], title: str | None = None, *, name_width: int = 24) -> Table:
    """Facts, a line each: a name and its value."""
    table = Table(show_header=False, box=None, padding=(0, 2), title=title, title_justify="left", title_style="bold")
    table.add_column(style="dim", min_width=name_width, no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(printable(name)), Text(printable(value)))
    return table


@contextmanager
def progress_bar(what: str, total: int, *, elapsed: bool = False) -> Iterator[Callable[[], None]]:
    """Yield a callable that advances the bar by one; the bar shows on a terminal only.

    With the time that has passed where steps are few and long: what is left is not known before the first is done.
    """
    with _logged(what, of=total), progress_of(MofNCompleteColumn(), elapsed=elapsed) as shown:
        if shown is None:
            yield lambda: None
        else:
            task = shown.add_task(what, total=total)
            yield lambda: shown.advance(task)


@contextmanager
def bars() -> Iterator[Bar]:
    """Yield what makes progress bars, one below the other; they show on a terminal only."""
    with progress_of(TaskProgressColumn()) as shown:
        if shown is None:
            yield _logged
            return

        @contextmanager
        def bar(what: str) -> Iterator[Callable[[int, int], None]]:
            task = shown.add_task(what, total=None)
            with _logged(what):
                yield lambda done, total: shown.update(task, completed=done, total=total)
            shown.remove_task(task)

        yield bar


@contextmanager
def _logged(what: str, **values: Any) -> Iterator[None]:
    """Log that something long begins and that it is done."""
    began_s = time.perf_counter()
    log_step(what, **values)
    yield
    log_step(f"{what}: done", seconds=round(time.perf_counter() - began_s, 3))


@contextmanager
def progress_of(column: ProgressColumn, *, elapsed: bool = False) -> Iterator[Progress | None]:
    """Where bars with such a column, and the time that is left or has passed, show on a terminal; else None."""
    console = SafeConsole(stderr=True)
    if is_quiet() or not console.is_terminal:
        yield None
        return
    times = TimeElapsedColumn() if elapsed else TimeRemainingColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), column, times)
    with Progress(*columns, console=console, transient=True) as shown:
        yield shown

"""A model for the length of a command: signals, quiet libraries, and its notes for the person."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import typer

from hotset.cli.interrupts import interruptible, saving
from hotset.cli.output import note
from hotset.cli.streams import libraries_silent
from hotset.generation.errors import RUNNING, translate_errors
from hotset.generation.text_model import TextModel, need_transformers
from hotset.options import RunOptions


@contextmanager
def loaded_model(options: RunOptions) -> Iterator[TextModel]:
    """A model for the length of a block."""
    with ExitStack() as stack:
        with interruptible() as check:
            need_transformers()
            stack.enter_context(quiet_libraries())
            with libraries_silent():
                text_model = TextModel.load(options, check)
        notes = text_model.handle.notes
        told = _tell(notes)
        try:
            with translate_errors(text_model.place, "run the model", RUNNING, passing=(typer.Exit, typer.Abort)):
                yield text_model
        finally:
            try:
                with saving():  # what was learnt
                    text_model.close()
            finally:
                _tell(notes[told:])


def _tell(notices: list[str]) -> int:
    """Say what the model's handle had to warn of; returns how much that was."""
    for line in notices:
        note(line)
    return len(notices)


def quiet_libraries() -> AbstractContextManager[None]:
    """A context in which libraries warn of nothing, and have progress bars only where stderr is a terminal."""
    from hotset.models.patches import libraries_quiet

    return libraries_quiet(progress=sys.stderr.isatty())

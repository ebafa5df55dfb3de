"""A model for the length of a command: signals, quiet libraries, and its notes for the person."""

from __future__ import annotations

import logging as python_logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from hotset.cli.interrupts import InterruptGuard, saving
from hotset.cli.output import note
from hotset.cli.streams import libraries_silent
from hotset.generation.errors import RUNNING, translate_errors
from hotset.generation.text_model import TextModel, need_transformers
from hotset.options import RunOptions


@contextmanager
def loaded_model(options: RunOptions) -> Iterator[TextModel]:
    """A model for the length of a block."""
    with InterruptGuard() as guard:
        need_transformers()
        silence_libraries()
        with libraries_silent():
            text_model = TextModel.load(options, guard.check)
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


def _tell(remarks: list[str]) -> int:
    """Say what the model's handle had to remark; returns how much that was."""
    for remark in remarks:
        note(remark)
    return len(remarks)


def silence_libraries() -> None:
    """Keep the libraries' warnings to themselves, and their progress bars where stderr is no terminal."""
    from huggingface_hub.utils import logging as hub_logging
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    python_logging.getLogger("hotset").setLevel(python_logging.ERROR)  # its remarks are printed as notes
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        disable_progress_bars()

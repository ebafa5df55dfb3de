"""A model for the length of a command: signals, quiet libraries, and its notes for the person."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING

import typer

from hotset.ahead import parts_of
from hotset.cli.compiling import compile_first, compile_missing, say_compiling, starts_warm
from hotset.cli.interrupts import interruptible, saving
from hotset.cli.log import is_quiet, log_step
from hotset.cli.output import note
from hotset.cli.streams import libraries_silent
from hotset.compiling import telling
from hotset.generation.errors import RUNNING, translate_errors
from hotset.generation.known_models import remember
from hotset.generation.text_model import TextModel, need_transformers
from hotset.options import RunOptions
from hotset.options.run import AUTO
from hotset.profile import Profile
from hotset.profile.folder import check_writable, locate

if TYPE_CHECKING:
    from hotset.engine.build import KernelFactory


@contextmanager
def loaded_model(options: RunOptions, kernels: KernelFactory | None = None) -> Iterator[TextModel]:
    """A model for the length of a block; given kernels compute all of its experts."""
    with ExitStack() as stack:
        with interruptible() as check:
            _check_profiles(options)
            compile_first(options, need_transformers)  # imports take seconds, too
            stack.enter_context(quiet_libraries())
            began_s = time.perf_counter()
            log_step("loading", model=options.name)
            with libraries_silent(), telling(say_compiling):
                text_model = TextModel.load(options, check, kernels)
            if options.model is not None:
                remember(text_model.place)
            _log_loaded(text_model, time.perf_counter() - began_s)
            if text_model.handle.engine.offload is not None:
                policy = options.policy_on(text_model.handle.engine.device.type)
                compile_missing(parts_of(policy, options.prefetch, warm=starts_warm(options)))
        _tell(text_model.notes)
        notes = text_model.handle.notes
        told = len(notes)
        if text_model.options.memory == AUTO:
            from hotset.analysis.planner.expecting import auto_lines

            _tell(auto_lines(text_model.model, notes, text_model.options.experts))
        else:
            _tell(notes)
        try:
            with translate_errors(text_model.place, "run the model", RUNNING, passing=(typer.Exit, typer.Abort)):
                yield text_model
        finally:
            try:
                with saving():  # what was learnt
                    text_model.close()
                    log_step("closed")
            finally:
                _tell(notes[told:])


def _check_profiles(options: RunOptions) -> None:
    """Refuse a profile that cannot be read, or written later, before anything is compiled for the run."""
    if options.learn is not None:
        check_writable(locate(str(options.learn)))
    if options.profile is not None:
        Profile.load(locate(str(options.profile)))


def _log_loaded(text_model: TextModel, seconds: float) -> None:
    stats = text_model.stats()
    known = ("engine", "slots", "resident_bytes")
    log_step(
        "loaded", seconds=round(seconds, 3), policy=text_model.options.policy, **{key: stats[key] for key in known}
    )


def _tell(notices: Sequence[str]) -> None:
    """Say what a person should know of how the model runs."""
    for line in notices:
        note(line)


def quiet_libraries() -> AbstractContextManager[None]:
    """A context in which libraries warn of nothing, and have progress bars only where stderr is a terminal."""
    from hotset.models.patches import libraries_quiet

    return libraries_quiet(progress=sys.stderr.isatty() and not is_quiet())

"""`hotset run`: one prompt, one answer, and what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hotset.cli import run_options as opt
from hotset.cli.interrupts import Interrupt, exit_code
from hotset.cli.live import with_options
from hotset.cli.output import JsonFlag, aside, emit, finish_text, note, show
from hotset.errors import HotsetError
from hotset.files import check_place
from hotset.generation.sampling import Sampling
from hotset.options import RunOptions

if TYPE_CHECKING:
    from hotset.cli.generate import Answer
    from hotset.cli.loading import Loaded
    from hotset.cli.streaming import Write


@with_options
def run(
    options: RunOptions,
    sampling: Sampling,
    prompt: opt.Prompt = None,
    file: opt.PromptFile = None,
    chat: opt.UseTemplate = None,
    trace: opt.TraceOut = None,
    record_lookahead: opt.RecordLookahead = 0,
    guesses: opt.Guesses = None,
    stats: opt.Stats = False,
    plot: opt.Plot = None,
    as_json: JsonFlag = False,
) -> None:
    """Answer one prompt: the text goes to stdout as it comes, one line on what it cost to stderr.

    Example: hotset run ./Qwen3-30B-A3B --memory 25% -p "Perché il cielo è blu?" --learn italian-chat
    """
    from hotset.cli.loading import loaded_model
    from hotset.cli.prompts import encode_prompt, read_prompt
    from hotset.cli.summary import experts_document, experts_views, run_document, summary_line

    text = read_prompt(prompt, file)
    check_out(trace, options.force)
    lookahead = opt.lookahead_of(record_lookahead, guesses)
    if lookahead and trace is None:
        raise HotsetError("--record-lookahead is kept in a trace: pass --trace OUT, too")
    check_figure(plot)
    with loaded_model(options) as loaded:
        if stats or plot is not None:
            loaded.model.hotset.observe()
        ids = encode_prompt(loaded, text, chat)
        answer = _answer(loaded, ids, sampling, (lambda _: None) if as_json else show, trace, lookahead)
        if plot is not None:
            loaded.model.hotset.plot(plot, title=options.name)
        if as_json:
            emit(run_document(loaded, answer) | (experts_document(loaded) if stats else {}), True)
        else:
            finish_text(answer.text)
            aside(summary_line(len(answer.new_ids), answer.tokens_per_s, loaded.stats()))
            aside(*(experts_views(loaded) if stats else ()))
    if answer.finish == "interrupt":
        raise typer.Exit(exit_code())


def _answer(loaded: Loaded, ids: Any, sampling: Sampling, write: Write, trace: Path | None, guesses: int) -> Answer:
    """Let the model answer, and keep what it routed if that was asked for."""
    from hotset.cli.generate import generate

    if trace is None:
        return generate(loaded, ids, sampling, write)
    with Interrupt(loaded.model) as interrupt:  # until the trace is written
        with loaded.trace(guesses) as recorder:
            answer = generate(loaded, ids, sampling, write, interrupt=interrupt)
        if answer.new_ids:
            recorder.save(trace)
        else:  # some layers of the prompt are no trace
            note("stopped before the first token: no trace was written")
    return answer


def check_figure(path: Path | None) -> None:
    """Refuse a figure that cannot be drawn, before the work and not after it."""
    if path is not None:
        from hotset.report import check_plot

        check_plot(path)


def check_out(path: Path | None, force: bool) -> None:
    """Refuse an output that cannot be written, before the work and not after it."""
    if path is None:
        return
    if path.exists() and not force:
        raise HotsetError(f"{path} exists: choose another name, or pass --force to overwrite it")
    if not path.parent.is_dir():
        raise HotsetError(f"there is no folder {path.parent}: create it, or choose another place")
    check_place(path)

"""`hotset run`: one prompt, one answer, and what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hotset.cli import run_options as opt
from hotset.cli.interrupts import exit_code, stop_on_signals
from hotset.cli.live import with_options
from hotset.cli.output import JsonFlag, aside, emit, finish_text, note, show
from hotset.errors import HotsetError
from hotset.files import check_place
from hotset.generation.sampling import Sampling
from hotset.options import RunOptions

if TYPE_CHECKING:
    from hotset.generation import Answer, TextModel
    from hotset.generation.streaming import OnText


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
    from hotset.cli.prompt_input import read_prompt
    from hotset.cli.summary import experts_document, experts_views, run_document, summary_line
    from hotset.generation import Finish, encode_prompt

    text = read_prompt(prompt, file)
    check_out(trace, options.force)
    lookahead = opt.lookahead_of(record_lookahead, guesses)
    if lookahead and trace is None:
        raise HotsetError("--record-lookahead is kept in a trace: pass --trace OUT, too")
    check_figure(plot)
    with loaded_model(options) as text_model:
        if stats or plot is not None:
            text_model.handle.observe()
        ids = encode_prompt(text_model, text, chat)
        answer = _answer(text_model, ids, sampling, (lambda _: None) if as_json else show, trace, lookahead)
        if plot is not None:
            text_model.handle.plot(plot, title=options.name)
        if as_json:
            emit(run_document(text_model, answer) | (experts_document(text_model) if stats else {}), True)
        else:
            finish_text(answer.text)
            aside(summary_line(len(answer.new_ids), answer.tokens_per_s, text_model.stats()))
            aside(*(experts_views(text_model) if stats else ()))
    if answer.finish is Finish.INTERRUPT:
        raise typer.Exit(exit_code())


def _answer(
    text_model: TextModel, ids: Any, sampling: Sampling, on_text: OnText, trace: Path | None, lookahead: int
) -> Answer:
    """Let the model answer, and keep what it routed if that was asked for."""
    from hotset.generation import generate

    with stop_on_signals() as stop:
        if trace is None:
            return generate(text_model, ids, sampling, on_text, stop=stop)
        with text_model.trace(lookahead) as recorder:
            answer = generate(text_model, ids, sampling, on_text, stop=stop)
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

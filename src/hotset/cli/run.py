"""`hotset run`: one prompt, one answer, and what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hotset.cli import run_options as opt
from hotset.cli.interrupts import exit_code, stop_on_signals
from hotset.cli.live import with_options
from hotset.cli.output import JsonFlag, emit, finish_text, message, note, renamed, show
from hotset.cli.targets import check_figure, check_out
from hotset.errors import HotsetError
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
    from hotset.cli.summary import answer_line, experts_document, experts_views, log_answer, run_document
    from hotset.generation import Finish, encode_prompt

    text = read_prompt(prompt, file)
    check_out(trace, options.force)
    lookahead = renamed(record_lookahead, guesses, "--guesses", "--record-lookahead")
    if lookahead and trace is None:
        raise HotsetError("--record-lookahead is kept in a trace: pass --trace OUT, too")
    check_figure(plot)
    with loaded_model(options) as text_model:
        if stats or plot is not None:
            text_model.handle.observe()
        ids = encode_prompt(text_model, text, chat, sampling.system)
        sampling = sampling.seeded()
        answer = _answer(text_model, ids, sampling, (lambda _: None) if as_json else show, trace, lookahead)
        if not as_json:
            finish_text(answer.text)  # what is said next has a line of its own
        log_answer(answer)
        if plot is not None:
            text_model.handle.plot(plot, title=options.name)
        if as_json:
            emit(run_document(text_model, answer) | (experts_document(text_model) if stats else {}), True)
        else:
            message(answer_line(answer, text_model.stats()))
            message(*(experts_views(text_model) if stats else ()))
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

"""`hotset trace record`: let a model answer prompts, and keep what it routed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotset.cli import run_options as opt
from hotset.cli.interrupts import exit_code, stop_on_signals
from hotset.cli.live import with_options
from hotset.cli.output import JsonFlag, emit, note, progress_bar, renamed
from hotset.cli.targets import check_out
from hotset.cli.traces import written, written_line
from hotset.errors import HotsetError
from hotset.generation.sampling import Sampling, SamplingUsed
from hotset.options import RunOptions

if TYPE_CHECKING:
    from hotset.generation import TextModel
    from hotset.trace import Trace

Prompts = Annotated[
    Path,
    typer.Option(
        metavar="FILE",
        help='One prompt per line, or .json / .jsonl with "prompt" and labels; reference:NAME ships with hotset.',
        show_default=False,
    ),
]


Out = Annotated[
    Path,  # run calls it --trace
    typer.Option("-o", "--out", "--trace", metavar="OUT", help="Where to write the trace.", show_default=False),
]


@with_options
def record(
    options: RunOptions,
    prompts: Prompts,
    out: Out,
    batch: Annotated[int, typer.Option(help="Prompts that share forward passes.", min=1)] = 1,
    record_lookahead: opt.RecordLookahead = 0,
    guesses: opt.Guesses = None,
    limit: Annotated[int | None, typer.Option(help="Only the first N prompts.", min=1)] = None,
    sampling: Sampling = Sampling(max_new_tokens=64, seed=0),
    chat: opt.UseTemplate = None,
    as_json: JsonFlag = False,
) -> None:
    """Run a model on prompts and record its routing; Ctrl-C and SIGTERM keep what there is.

    While it runs, all that was recorded is kept beside OUT every few seconds, as
    NAME.part.safetensors: a trace like any other, which a kill leaves behind.

    Example: hotset trace record ./Qwen3-30B-A3B --prompts chat.jsonl -o chat.safetensors
    """
    from hotset.cli.loading import loaded_model
    from hotset.cli.prompt_input import read_labelled
    from hotset.generation import record_prompts
    from hotset.generation.checkpoints import Checkpoints

    check_out(out, options.force)
    _check_part(out, options.force)
    lookahead = renamed(record_lookahead, guesses, "--guesses", "--record-lookahead")
    found = read_labelled(prompts, limit)
    with loaded_model(options) as text_model:
        checkpoints = Checkpoints(out)
        with stop_on_signals() as stop:  # until the trace is written
            with progress_bar("recording", len(found)) as advance:
                trace = record_prompts(
                    text_model,
                    found,
                    sampling,
                    batch=batch,
                    lookahead=lookahead,
                    use_template=chat,
                    stop=stop,
                    checkpoints=checkpoints,
                    on_prompt=advance,
                )
            if trace is not None:
                trace.save(out)
            checkpoints.end()
        used = sampling.within(text_model.model.generation_config)
        _finish(text_model, trace, used, stop.asked, len(found), out, as_json)


def _check_part(out: Path, force: bool) -> None:
    """Refuse to write over what a recording had when it was killed."""
    from hotset.generation.checkpoints import part_of

    part = part_of(out)
    if part.exists() and not force:
        raise HotsetError(
            f"{part} is a trace of all that an earlier recording had when it was killed, or of one that still runs: "
            "rename it to keep it, or pass --force to write over it"
        )


def _finish(
    text_model: TextModel,
    trace: Trace | None,
    used: SamplingUsed,
    interrupted: bool,
    asked: int,
    out: Path,
    as_json: bool,
) -> None:
    """Say what was written."""
    from hotset.cli.summary import cost_document
    from hotset.trace import Phase

    if trace is None:
        note("stopped before the first token: nothing was written")
        raise typer.Exit(exit_code())
    document = written(trace, out) | {
        "prefill_tokens": trace.count(Phase.PREFILL),
        "decode_tokens": trace.count(Phase.DECODE),
        "complete": not interrupted,
        "sampling": used.as_dict(),
        **cost_document(text_model),
    }
    hits = f"hit rate while recording {100 * document['hit_rate']:.1f} %"
    emit(document, as_json, f"{written_line(document)}; {hits}; {used.words()}")
    if interrupted:
        note(f"stopped: {trace.requests:,} of {asked:,} prompts are in the trace; the last answer may be cut short")
        raise typer.Exit(exit_code())

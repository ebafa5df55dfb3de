"""`hotset run`: one prompt, one answer, and what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hotset.cli import run_options as opt
from hotset.cli.interrupts import Interrupt, exit_code
from hotset.cli.output import JsonFlag, aside, emit, finish_text, note, show
from hotset.errors import HotsetError
from hotset.files import check_place

if TYPE_CHECKING:
    from hotset.cli.generate import Answer, Sampling
    from hotset.cli.loading import Loaded
    from hotset.cli.streaming import Write


def run(
    model: opt.Model = None,
    prompt: opt.Prompt = None,
    file: opt.PromptFile = None,
    memory: opt.Memory = "auto",
    host_memory: opt.HostMemory = "auto",
    context: opt.Context = 4096,
    policy: opt.PolicyName = "blend",
    scope: opt.ScopeName = "layer",
    staging: opt.Staging = None,
    prefetch: opt.Prefetch = "auto",
    device: opt.Device = "auto",
    engine: opt.Engine = "auto",
    dtype: opt.Dtype = "auto",
    max_new_tokens: opt.MaxNewTokens = 256,
    temperature: opt.Temperature = 0.0,
    top_p: opt.TopP = None,
    seed: opt.Seed = None,
    chat: opt.UseTemplate = None,
    trace: opt.TraceOut = None,
    guesses: opt.Guesses = 0,
    profile: opt.Profile = None,
    learn: opt.Learn = None,
    learn_every: opt.LearnEvery = 5.0,
    prior: opt.Prior = 64,
    allow_foreign: opt.AllowForeign = False,
    pin: opt.Pin = None,
    warm_pin: opt.WarmPin = "off",
    trust_remote_code: opt.TrustRemoteCode = False,
    stats: opt.Stats = False,
    plot: opt.Plot = None,
    force: opt.Force = False,
    as_json: JsonFlag = False,
) -> None:
    """Answer one prompt: the text goes to stdout as it comes, one line on what it cost to stderr.

    Example: hotset run ./Qwen3-30B-A3B --memory 25% -p "Perché il cielo è blu?" --learn italian-chat
    """
    from hotset.cli.generate import Sampling
    from hotset.cli.loading import Wanted, loaded_model
    from hotset.cli.prompts import encode_prompt, read_prompt
    from hotset.cli.summary import experts_document, experts_views, run_document, summary_line

    text = read_prompt(prompt, file)
    check_out(trace, force)
    if guesses and trace is None:
        raise HotsetError("--guesses are kept in a trace: pass --trace OUT, too")
    check_figure(plot)
    wanted = Wanted(
        model=model, memory=memory, host_memory=host_memory, policy=policy, scope=scope, device=device, dtype=dtype,
        profile=profile, learn=learn, learn_every_minutes=learn_every, prior_tokens=prior, allow_foreign=allow_foreign,
        pin=pin, warm_pin=warm_pin, prefetch=prefetch, engine=engine, staging=staging, context=context,
        force=force, trust_remote_code=trust_remote_code, observe=stats or plot is not None,
    )  # fmt: skip
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    with loaded_model(wanted) as loaded:
        ids = encode_prompt(loaded, text, chat)
        answer = _answer(loaded, ids, sampling, (lambda _: None) if as_json else show, trace, guesses)
        if plot is not None:
            loaded.model.hotset.plot(plot, title=wanted.name)
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

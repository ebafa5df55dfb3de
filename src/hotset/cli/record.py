"""`hotset trace record`: let a model answer prompts, and keep what it routed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset.cli import run_options as opt
from hotset.cli.interrupts import exit_code
from hotset.cli.output import JsonFlag, emit, note, progress_bar
from hotset.cli.run import check_out

if TYPE_CHECKING:
    from hotset.cli.recording import Recording
    from hotset.trace import Trace

Prompts = Annotated[
    Path,
    typer.Option(
        metavar="FILE",
        help='One prompt per line, or .json / .jsonl with "prompt" and labels; reference:NAME ships with hotset.',
        show_default=False,
    ),
]
Out = Annotated[Path, typer.Option("-o", "--out", help="Where to write the trace.", show_default=False)]


def record(
    prompts: Prompts,
    out: Out,
    model: opt.Model = None,
    new_tokens: Annotated[
        int, typer.Option(help="The most new tokens of each prompt.", min=1, max=opt.MAX_TOKENS)
    ] = 64,
    batch: Annotated[int, typer.Option(help="Prompts that share forward passes.", min=1)] = 1,
    guesses: opt.Guesses = 0,
    limit: Annotated[int | None, typer.Option(help="Only the first N prompts.", min=1)] = None,
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
    temperature: opt.Temperature = 0.0,
    top_p: opt.TopP = None,
    seed: opt.Seed = 0,
    chat: opt.UseTemplate = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    force: opt.Force = False,
    as_json: JsonFlag = False,
) -> None:
    """Run a model on prompts and record its routing; Ctrl-C and SIGTERM keep what there is.

    While it runs, all that was recorded is kept beside OUT every few seconds, as
    NAME.part.safetensors: a trace like any other, which a kill leaves behind.

    Example: hotset trace record ./Qwen3-30B-A3B --prompts chat.jsonl -o chat.safetensors
    """
    from hotset.cli.checkpoints import Checkpoints, check_part
    from hotset.cli.generate import Sampling
    from hotset.cli.interrupts import Interrupt
    from hotset.cli.loading import Wanted, loaded_model
    from hotset.cli.prompt_files import read_prompts
    from hotset.cli.recording import Recording

    check_out(out, force)
    check_part(out, force)
    found = read_prompts(prompts, limit)
    wanted = Wanted(
        model=model, memory=memory, host_memory=host_memory, policy=policy, scope=scope, device=device, dtype=dtype,
        engine=engine, staging=staging, prefetch=prefetch, trust_remote_code=trust_remote_code,
        context=context, force=force,
    )  # fmt: skip
    sampling = Sampling(max_new_tokens=new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    with loaded_model(wanted) as loaded:
        checkpoints = Checkpoints(out)
        recording = Recording(loaded, sampling, guesses, checkpoints)
        queue = recording.encode(found, chat)
        with Interrupt(loaded.model) as interrupt:  # until the trace is written
            with progress_bar("recording", len(found)) as advance:
                recording.run(queue, batch, interrupt, advance)
            trace = recording.trace() if recording.labels else None
            if trace is not None:
                trace.save(out)
            checkpoints.end()
        _finish(recording, trace, len(found), out, as_json)


def _finish(recording: Recording, trace: Trace | None, asked: int, out: Path, as_json: bool) -> None:
    """Say what was written."""
    from hotset.report.words import plural

    done = len(recording.labels)
    if trace is None:
        note("stopped before the first token: nothing was written")
        raise typer.Exit(exit_code())
    document = _document(recording, trace, out)
    hits = document["hit_rate"]
    emit(
        document,
        as_json,
        f"{out}: {plural(trace.tokens, 'token')} of {plural(trace.requests, 'request')}, {trace.shape.layers} layers x "
        f"{trace.shape.experts} experts, top {trace.shape.top_k}; hit rate while recording {100 * hits:.1f} %",
    )
    if recording.interrupted:
        note(f"stopped: {done:,} of {asked:,} prompts are in the trace; the last answer may be cut short")
        raise typer.Exit(exit_code())


def _document(recording: Recording, trace: Any, out: Path) -> dict[str, Any]:
    from hotset.cli.summary import cost_document
    from hotset.trace import Phase

    return {
        "file": str(out),
        "bytes": out.stat().st_size,
        "tokens": trace.tokens,
        "requests": trace.requests,
        "steps": trace.steps,
        "prefill_tokens": trace.count(Phase.PREFILL),
        "decode_tokens": trace.count(Phase.DECODE),
        "complete": not recording.interrupted,
    } | cost_document(recording.loaded)

"""`hotset trace`: bring recorded workloads in, look at them, and cut, split, merge and interleave them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from hotset.cli import trace_synth
from hotset.cli.help_words import Commands
from hotset.cli.live import with_messages
from hotset.cli.output import JsonFlag, emit, note
from hotset.cli.record import record
from hotset.cli.targets import ForceFlag, refuse_existing
from hotset.cli.traces import OutFile, TraceFile, load_trace, written, written_line
from hotset.errors import HotsetError, TraceError

if TYPE_CHECKING:
    from hotset.trace.trace import Trace

_KINDS = "vllm, sglang, flame, llama_csv, token_csv, route_csv, npz or jsonl"

app = Commands(
    help="Record what was routed: import, inspect and reshape traces.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command("import")
@with_messages
def import_(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A .json, .jsonl, .csv, .npz, .pt or .parquet file.", show_default=False),
    ],
    out: OutFile,
    kind: Annotated[str | None, typer.Option(help=f"Format: {_KINDS}; told by the file if left out.")] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Experts per layer, where the file does not say.")] = None,
    expert_bytes: Annotated[str | None, typer.Option(metavar="SIZE", help="Size of one expert, such as 8MiB.")] = None,
    model: Annotated[str | None, typer.Option(help="Name of the model.")] = None,
    request_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a request, where the file does not say where one begins.")
    ] = None,
    steps: Annotated[
        str | None, typer.Option(help="JSON lines number the steps of each request, or of all: request | shared.")
    ] = None,
    first: Annotated[int | None, typer.Option(min=1, help="Import the first N tokens only.")] = None,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Convert a routing record of another tool.

    Example: hotset trace import run.route.csv -o run.safetensors
    """
    from hotset.shape import parse_size
    from hotset.trace.importers import import_trace

    refuse_existing(force, out)
    size = None if expert_bytes is None else parse_size(expert_bytes)
    if size == 0:
        raise TraceError("the size of an expert must be at least one byte")
    trace = import_trace(
        file,
        kind=kind,
        experts=experts,
        expert_bytes=size,
        model=model,
        request_tokens=request_tokens,
        steps=steps,
        first=first,
    )
    if guess := trace.meta.get("experts_guessed"):
        note(f"the number of experts, {guess}, is inferred from the ids: --experts N settles it")
    if steps is None and (told := _about_steps(trace.meta.get("steps"))):
        note(told)
    _save(trace, out, as_json)


def _about_steps(found: str | None) -> str | None:
    """How the steps of a file that leaves them in doubt were understood, and how to have it otherwise."""
    from hotset.trace.importers.jsonl import OWN_STEPS, SHARED_STEPS

    return {
        OWN_STEPS: "each request numbers its own steps: --steps shared, if those of one number ran in one forward pass",
        SHARED_STEPS: "all requests begin with the same step, and steps of one number are taken for one forward pass, "
        "a batch: --steps request, if each request numbers its own",
    }.get(found or "")


@app.command("info")
def info(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE", help="Trace files.", show_default=False)],
    as_json: JsonFlag = False,
) -> None:
    """Show what a trace holds and how cacheable it is.

    Example: hotset trace info run.safetensors
    """
    from hotset.cli.trace_view import info_views
    from hotset.trace.summary import summarise

    documents = [{"file": str(path), **summarise(load_trace(path))} for path in traces]
    views = [] if as_json else [view for document in documents for view in info_views(document)]
    emit({"traces": documents}, as_json, *views)


@app.command("cut")
def cut(
    trace: TraceFile,
    out: OutFile,
    requests: Annotated[str | None, typer.Option(metavar="LIST", help="Keep these requests, such as 0-9,20.")] = None,
    tokens: Annotated[str | None, typer.Option(metavar="FROM:TO", help="Keep these tokens, TO not included.")] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Keep requests with this label.")] = None,
    phase: Annotated[str | None, typer.Option(metavar="PHASE", help="Keep prefill or decode tokens only.")] = None,
    first: Annotated[int | None, typer.Option(min=1, help="Of what is left, keep the first N tokens.")] = None,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Keep a part of a trace.

    Example: hotset trace cut run.safetensors --requests 0-9 -o small.safetensors
    """
    from hotset.cli.trace_pick import pick_rows

    refuse_existing(force, out)
    loaded = load_trace(trace)
    rows = pick_rows(loaded, requests=requests, tokens=tokens, labels=label or [], phase=phase, first=first)
    _save(loaded.take(rows), out, as_json)


@app.command("split")
def split(
    trace: TraceFile,
    fit: Annotated[Path, typer.Option(help="Where to write the part to fit on.", show_default=False)],
    judge: Annotated[Path, typer.Option(help="Where to write the part to judge on.", show_default=False)],
    fraction: Annotated[float, typer.Option(help="Share of the requests that goes to --fit.")] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draw.")] = 0,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Split by request, at random.

    Example: hotset trace split run.safetensors --fit a.safetensors --judge b.safetensors
    """
    refuse_existing(force, fit, judge)
    if fit.resolve() == judge.resolve():
        raise HotsetError("--fit and --judge must be two different files")
    parts = load_trace(trace).split(fraction, seed)
    for part, path in zip(parts, (fit, judge), strict=True):
        part.save(path)
    fitted, judged = (written(part, path) for part, path in zip(parts, (fit, judge), strict=True))
    emit({"fit": fitted, "judge": judged}, as_json, written_line(fitted), written_line(judged))


@app.command("merge")
def merge(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE", help="Trace files.", show_default=False)],
    out: OutFile,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Lay traces of one model end to end.

    Example: hotset trace merge a.safetensors b.safetensors -o all.safetensors
    """
    from hotset.trace.combine import concat

    refuse_existing(force, out)
    _save(concat([load_trace(path) for path in traces]), out, as_json)


@app.command("interleave")
def interleave(
    trace: TraceFile,
    out: OutFile,
    streams: Annotated[int, typer.Option(min=1, help="Requests that run at the same time.", show_default=False)],
    mode: Annotated[str, typer.Option(help="batch: one forward pass for all streams; turns: one pass each.")] = "batch",
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Run requests at the same time.

    Example: hotset trace interleave run.safetensors --streams 8 -o busy.safetensors
    """
    from hotset.trace.combine import Mode
    from hotset.trace.combine import interleave as run_streams

    refuse_existing(force, out)
    loaded = load_trace(trace)
    if streams > loaded.requests:
        note(f"the trace has only {loaded.requests} requests: the other streams stay idle")
    _save(run_streams(loaded, streams, cast(Mode, mode)), out, as_json)


def _save(trace: Trace, out: Path, as_json: bool) -> None:
    trace.save(out)
    document = written(trace, out)
    emit(document, as_json, written_line(document))


app.command("synth")(trace_synth.synth)
app.command("record")(record)

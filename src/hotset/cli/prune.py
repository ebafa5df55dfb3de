"""`hotset prune`: write a checkpoint without the experts that matter least."""

from __future__ import annotations

import dataclasses
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset.cli import run_options as opt
from hotset.cli.budgets import settled
from hotset.cli.live import with_messages
from hotset.cli.output import JsonFlag, bars, emit, note
from hotset.cli.targets import check_out
from hotset.errors import HotsetError
from hotset.options import RunOptions

if TYPE_CHECKING:
    from hotset.analysis.saliency_runs import Workload

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder with a model, or a hub id.", show_default=False)]
By = Annotated[
    str,
    typer.Option(
        help="Keep those with the most: reap (mean of gate times norm of the output), msan and man (mean square and "
        "mean norm), ean (sum of norms), frequency, gate (sum of gates), largest."
    ),
]
Keep = Annotated[
    str,
    typer.Option(metavar="SHARE", help="Experts of each layer that stay: 75%, or a number.", show_default=False),
]
Text = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE", help="Judge experts by what they do on this text; more than once.", show_default=False
    ),
]
PromptsFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Judge experts by these prompts and the answers to them; reference:NAME.",
        show_default=False,
    ),
]


@with_messages
def prune(
    model: Model,
    keep: Keep,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="The folder to write.", show_default=False)],
    by: By = "reap",
    text: Text = None,
    prompts: PromptsFile = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Judge experts by a profile's counts: --by frequency.", show_default=False),
    ] = None,
    saliency: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Judge experts by what --save-saliency kept.", show_default=False),
    ] = None,
    save_saliency: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep what was recorded, to prune again by it.", show_default=False),
    ] = None,
    drop_super_experts: Annotated[
        bool,
        typer.Option(
            "--drop-super-experts",
            help="With --profile, which does not know super experts: do without the short run that finds them.",
        ),
    ] = False,
    tokens: Annotated[int, typer.Option(help="The most tokens of all texts, spread evenly over them.", min=1)] = 1
    << 16,
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens of each answer to a prompt.", min=1)] = 64,
    memory: opt.Memory = "auto",
    device: opt.Device = "auto",
    trust_remote_code: opt.TrustRemoteCode = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file of --save-saliency.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write a checkpoint without the experts that matter least. Lossy.

    The model runs over text first, and what each expert contributes is added up.
    Every layer keeps the same number of experts, super experts always. The folder
    loads with plain transformers, and hotset_prune.json in it says which experts
    stayed. Given again, an interrupted command goes on where it stopped.

    hotset compare MODEL DIR --text OTHER measures what was lost.

    Example: hotset prune ./Qwen3-30B-A3B --by reap --keep 75% --text chat.txt -o qwen3-pruned
    """
    check_out(save_saliency, force)
    options = RunOptions(memory=settled(memory), device=device, trust_remote_code=trust_remote_code)
    asked = {"by": by, "keep": keep, "profile": profile, "saliency": saliency, "save_saliency": save_saliency,
             "drop_super_experts": drop_super_experts}  # fmt: skip
    _prune(model, out, options, asked, lambda: _workload(text, prompts, tokens, max_new_tokens), as_json)


def _prune(model: str, out: Path, options: RunOptions, asked: dict[str, Any], workload: Any, as_json: bool) -> None:
    from hotset.cli.loading import quiet_libraries
    from hotset.generation.errors import LOADING, translate_errors
    from hotset.generation.text_model import locate, need_transformers
    from hotset.shape import format_size

    need_transformers()
    from hotset.analysis.prune import Pruner

    place = locate(model)
    with ExitStack() as stack:
        stack.enter_context(quiet_libraries())
        bar = stack.enter_context(bars())
        stack.enter_context(translate_errors(place, "prune the model", LOADING))
        report = Pruner(place, out, options=options, workload=workload(), **asked).prune(bar)
    document = dataclasses.asdict(report) | {"folder": str(report.folder)}
    told = "is there already" if report.complete_already else "written and read back"
    sizes = f"{format_size(report.size_bytes)} of {format_size(report.original_bytes)}"
    for line in report.notes:
        note(line)
    emit(
        document,
        as_json,
        f"{out}: {told}, {report.keep} of {report.experts} experts of {len(report.kept)} layers kept by {report.by}, "
        f"super experts among them: {len(report.super_experts)}; {sizes} in {report.seconds:.1f} s",
        report.lossy + ("" if report.keep == report.experts else _what_measures(model, out)),
    )


def _what_measures(model: str, out: Path) -> str:
    """How to find out what was lost."""
    return f"; {shlex.join(['hotset', 'compare', model, str(out), '--text'])} FILE measures what that costs"


def _workload(text: list[Path] | None, prompts: str | None, tokens: int, max_new_tokens: int) -> Workload | None:
    """What the model is run on, if it is run."""
    from hotset.analysis.saliency_runs import Prompts, TextFiles
    from hotset.generation.prompt_files import read_prompts

    if text and prompts is not None:
        raise HotsetError("give --text or --prompts, not both")
    if prompts is not None:
        return Prompts(prompts, tuple(read_prompts(prompts)), max_new_tokens)
    return TextFiles(tuple(text), tokens) if text else None

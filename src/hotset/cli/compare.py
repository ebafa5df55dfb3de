"""`hotset compare`: how far one model is from another, on a text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from hotset.cli import run_options as opt
from hotset.cli.budgets import settled
from hotset.cli.live import with_messages
from hotset.cli.output import JsonFlag, bars, emit, note
from hotset.errors import HotsetError
from hotset.options import RunOptions

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder with a model, or a hub id.", show_default=False)]
Other = Annotated[str, typer.Argument(metavar="OTHER", help="Another with the same tokenizer.", show_default=False)]
Text = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="A text to compare both on; more than once.", show_default=False),
]


@with_messages
def compare(
    model: Model,
    other: Other,
    text: Text = None,
    memory: opt.Memory = "auto",
    device: opt.Device = "auto",
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: JsonFlag = False,
) -> None:
    """Compare two models on a text: perplexity, KL divergence, agreement.

    Perplexity: a model is as unsure of the next token as if it guessed among
    so many; less is better. KL divergence: how far the other's probabilities are
    from the first's; 0 if they are the same. Agreement: how often both find
    the same token the likeliest.

    Both run over the same text (8,192 tokens of each file, spread evenly), one
    after the other, and are compared token by token.

    Example: hotset compare ./Qwen3-30B-A3B qwen3-pruned --text other.txt
    """
    options = RunOptions(memory=settled(memory), device=device, trust_remote_code=trust_remote_code)
    compare_models(model, other, text or (), as_json, options)


def compare_models(
    model: str, other: str, text_files: Sequence[Path], as_json: bool, options: RunOptions | None = None
) -> None:
    """Compare two models and print what was found."""
    from hotset.cli.loading import quiet_libraries
    from hotset.generation.errors import LOADING, translate_errors
    from hotset.generation.text_model import locate, need_transformers

    if not text_files:
        raise HotsetError("say what the models are compared on: --text FILE, a text of some thousand words")
    need_transformers()
    from hotset.analysis import compare as analysis

    places = locate(model), locate(other)
    with ExitStack() as stack:
        stack.enter_context(quiet_libraries())
        bar = stack.enter_context(bars())
        stack.enter_context(translate_errors(places[1], "compare the models", LOADING))
        progress = stack.enter_context(bar("comparing"))
        found = analysis.compare(*places, text_files, options, progress=progress)
    emit(found | {"model": model, "other": other}, as_json, *_lines(found))
    for line in found["notes"]:
        note(line)


def _lines(found: dict[str, Any]) -> list[str]:
    parts = found.get("parts", {})
    whole = [_line("all texts" if parts else found["texts"][0]["name"], found)]
    return [*(_line(name, part) for name, part in parts.items()), *whole]


def _line(name: str, found: dict[str, Any]) -> str:
    return (
        f"{name}: perplexity {_perplexity(found['other_perplexity'])} (first {_perplexity(found['perplexity'])}), KL "
        f"divergence {found['kl_mean']:.3g} in the mean and {found['kl_p99']:.3g} at the 99th percentile, same most "
        f"likely token {100 * found['same_top']:.1f} %; {found['tokens']:,} tokens"
    )


def _perplexity(value: float) -> str:
    """Six digits are known, no more."""
    return f"{value:.3f}" if value < 1000 else f"{value:,.0f}"

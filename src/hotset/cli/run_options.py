"""The options of commands with a live model that are not those of the model or of sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotset.cli.live import flag_of
from hotset.options import RunOptions

_LEARNING = "Learning from use"
_TEXT = "Text"

Model = Annotated[str | None, flag_of(RunOptions, "model")]
Memory = Annotated[str, flag_of(RunOptions, "memory", grouped=False)]
Device = Annotated[str, flag_of(RunOptions, "device", grouped=False)]
TrustRemoteCode = Annotated[bool, flag_of(RunOptions, "trust_remote_code", grouped=False)]
UseTemplate = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Put the prompt into the model's chat template; by default if it has one.",
        rich_help_panel=_TEXT,
        show_default=False,
    ),
]
Prompt = Annotated[str | None, typer.Option("-p", "--prompt", help="The prompt.", show_default=False)]
PromptFile = Annotated[
    Path | None, typer.Option("--file", help="Read the prompt from a file; - is stdin.", show_default=False)
]
TraceOut = Annotated[
    Path | None, typer.Option("--trace", metavar="OUT", help="Record the routing to this file.", show_default=False)
]
Stats = Annotated[
    bool,
    typer.Option(
        "--stats", help="Show more of what it cost, and which experts were used, by layer.", rich_help_panel=_LEARNING
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Draw use, residency, pins and hits over time: .png, .svg or .pdf.",
        show_default=False,
        rich_help_panel=_LEARNING,
    ),
]
RecordLookahead = Annotated[
    int,
    typer.Option(
        "--record-lookahead",
        metavar="LAYERS",
        help="Record also what the routers of the next so many layers predict from each layer's input.",
        min=0,
        max=3,
    ),
]
Guesses = Annotated[int | None, typer.Option("--guesses", hidden=True, min=0, max=3)]

"""The options of `hotset analyze`, each with its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotset.cli.live import flag_of
from hotset.generation.sampling import Sampling
from hotset.options import RunOptions

_RUN = "Run a model"
_CACHE = "What a cache would do"

Targets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TRACE|MODEL",
        help="Traces of one model (files, or reference:NAME); with --prompts a model to run.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("-o", "--out", metavar="FILE", help="Where to write the report, as report.html.", show_default=False),
]
Data = Annotated[
    bool,
    typer.Option("--data/--no-data", help="Beside it, write a folder with JSON, CSV tables and figures as SVG."),
]
LabelKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--label", metavar="KEY", help="Tell requests apart by this label. Repeat it. None: those with few values."
    ),
]
TokenizerPlace = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        metavar="FILE",
        help="A tokenizer.json, or the folder with it: gives the tokens of a trace their text.",
        show_default=False,
    ),
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        "-p",
        help="A policy to replay. Repeat it. None: lru, lfu, blend, nextuse, and as recorded.",
        rich_help_panel=_CACHE,
    ),
]
Budgets = Annotated[
    list[str] | None,
    typer.Option(
        "--budget",
        "-b",
        help='Memory for experts: "8GiB", "25%" of them, "1536 slots". Repeat it. None: 25 %, and as recorded.',
        rich_help_panel=_CACHE,
    ),
]
ExpertBytes = Annotated[
    str | None,
    typer.Option(help="Size of one expert, where the trace does not state it.", rich_help_panel=_CACHE),
]
Layer = Annotated[
    int | None,
    typer.Option(metavar="L", min=0, help="The layer to draw over time. None: the middle one.", rich_help_panel=_CACHE),
]
Request = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=0, help="The request to draw. None: one with the longest answer.", rich_help_panel=_CACHE
    ),
]
Prompts = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE...",
        help='Run MODEL on these prompts: one per line, or .json / .jsonl with "prompt" and labels; or reference:NAME.',
        show_default=False,
        rich_help_panel=_RUN,
    ),
]
Limit = Annotated[int | None, typer.Option(help="Only the first N prompts of each file.", min=1, rich_help_panel=_RUN)]
TraceOut = Annotated[
    Path | None,
    typer.Option("--trace", metavar="OUT", help="Keep what was recorded.", show_default=False, rich_help_panel=_RUN),
]
SaliencyFlag = Annotated[
    bool,
    typer.Option(
        "--saliency/--no-saliency",
        help="Add up what each expert contributes as the model runs; not with --batch.",
        rich_help_panel=_RUN,
    ),
]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare", help="Compare two models, MODEL OTHER, on --text: as hotset compare.", rich_help_panel=_RUN
    ),
]
Text = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="With --compare: a text. Repeat it.", show_default=False, rich_help_panel=_RUN),
]
Batch = Annotated[int, typer.Option(help="Prompts that share forward passes.", min=1, rich_help_panel=_RUN)]
Lookahead = Annotated[
    int,
    typer.Option(
        "--record-lookahead",
        metavar="LAYERS",
        help="Record also what the routers of the next so many layers predict.",
        min=0,
        max=3,
        rich_help_panel=_RUN,
    ),
]
UseTemplate = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Put prompts into the model's chat template; by default if it has one.",
        show_default=False,
        rich_help_panel=_RUN,
    ),
]
MaxNewTokens = Annotated[int, flag_of(Sampling, "max_new_tokens")]
Memory = Annotated[str, flag_of(RunOptions, "memory")]
Device = Annotated[str, flag_of(RunOptions, "device")]
Dtype = Annotated[str, flag_of(RunOptions, "dtype")]
Experts = Annotated[str, flag_of(RunOptions, "experts")]
TrustRemoteCode = Annotated[bool, flag_of(RunOptions, "trust_remote_code")]

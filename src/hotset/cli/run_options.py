"""The options that every command with a live model shares, each with its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_MEMORY = "Memory and cache"
_LEARNING = "Learning from use"
_TEXT = "Text"
MAX_TOKENS = 2**31 - 1

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A folder or a hub id; none: the small model that ships with hotset.",
        show_default=False,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code that a model brings along; never without this option."),
]
Memory = Annotated[
    str,
    typer.Option(help='Memory for experts: "8GiB", "25%" of them, "1536 slots", or auto.', rich_help_panel=_MEMORY),
]
HostMemory = Annotated[
    str,
    typer.Option(help="Memory of the host for experts, behind that of a GPU.", rich_help_panel=_MEMORY),
]
Context = Annotated[
    int,
    typer.Option(
        metavar="TOKENS",
        help="Leave room for so many tokens of prompt and answer, over all prompts that are computed together.",
        min=1,
        max=1 << 28,
        rich_help_panel=_MEMORY,
    ),
]
PolicyName = Annotated[
    str,
    typer.Option(
        "--policy",
        help='Who leaves, with options as in "decay:half_life=8"; auto: blend, or lru where that does better.',
        rich_help_panel=_MEMORY,
    ),
]
ScopeName = Annotated[
    str,
    typer.Option("--scope", help="Slots belong to each layer, or to one pool: layer | pool.", rich_help_panel=_MEMORY),
]
Staging = Annotated[
    int | None,
    typer.Option(
        "--staging",
        metavar="SLOTS",
        help="Slots that experts without a place in the cache pass through; for batches on a GPU, batch x top_k.",
        min=1,
        max=65_536,
        show_default=False,
        rich_help_panel=_MEMORY,
    ),
]
Prefetch = Annotated[
    str,
    typer.Option(
        "--prefetch",
        help="Fetch ahead: auto (by the next layer's router, where it pays), off, gate, best, transition, ...",
        rich_help_panel=_MEMORY,
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        "--engine",
        help="Who drives a GPU: auto (the device where it can), host or device.",
        rich_help_panel=_MEMORY,
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=_MEMORY)]
Dtype = Annotated[
    str,
    typer.Option(help="auto (as stored), bfloat16, float16 or float32.", rich_help_panel=_MEMORY),
]
MaxNewTokens = Annotated[
    int, typer.Option(help="The most tokens of an answer.", min=1, max=MAX_TOKENS, rich_help_panel=_TEXT)
]
Temperature = Annotated[
    float, typer.Option(help="0 takes the likeliest token; more is more varied.", min=0, rich_help_panel=_TEXT)
]
TopP = Annotated[
    float | None,
    typer.Option(help="Draw from the likeliest tokens that make up this share.", min=0, max=1, rich_help_panel=_TEXT),
]
Seed = Annotated[int | None, typer.Option(help="Seed of the draw.", min=0, max=2**64 - 1, rich_help_panel=_TEXT)]
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
Guesses = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Record also what the routers of the next N layers make of each layer's input, for hotset forecast.",
        min=0,
        max=3,
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Overwrite the output if it exists; try a budget that memory does not seem to hold."),
]
ForceMemory = Annotated[
    bool,
    typer.Option("--force", help="Try a budget that memory does not seem to hold.", rich_help_panel=_MEMORY),
]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME",
        help="Start warm from this profile: a name or a path.",
        show_default=False,
        rich_help_panel=_LEARNING,
    ),
]
Learn = Annotated[
    str | None,
    typer.Option(
        "--learn",
        metavar="NAME",
        help="Keep what is learnt in this profile, and start from it if it is there.",
        show_default=False,
        rich_help_panel=_LEARNING,
    ),
]
LearnEvery = Annotated[
    float,
    typer.Option(
        "--learn-every", metavar="MINUTES", help="How often to save it.", min=0.01, max=1e6, rich_help_panel=_LEARNING
    ),
]
Prior = Annotated[
    int,
    typer.Option(
        "--prior",
        metavar="TOKENS",
        help="How many tokens of evidence a profile is worth.",
        min=0,
        max=10**9,
        rich_help_panel=_LEARNING,
    ),
]
AllowForeign = Annotated[
    bool,
    typer.Option(
        "--allow-foreign",
        help="Use a profile of other weights, as of a fine-tune of this model.",
        rich_help_panel=_LEARNING,
    ),
]
Pin = Annotated[
    str | None,
    typer.Option(
        "--pin",
        metavar="SHARE",
        help='Keep the hottest experts of the profile for good: "20%" of the slots, or "64 slots".',
        show_default=False,
        rich_help_panel=_LEARNING,
    ),
]
WarmPin = Annotated[
    str,
    typer.Option(
        "--warm-pin",
        metavar="TOKENS",
        help="Observe so many tokens, then protect what they used most if a trial says it pays: a number, auto or off.",
        rich_help_panel=_LEARNING,
    ),
]
Stats = Annotated[
    bool,
    typer.Option("--stats", help="Show which experts were used and hit, layer by layer.", rich_help_panel=_LEARNING),
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

"""The options of `hotset simulate`, each with its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_LINK = "Modelled link"
_FILES = "Output"

Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        "-p",
        help='A policy, with options as in "decay:half_life=8", or a file of one. Repeat it. None: all of them.',
    ),
]
Budgets = Annotated[
    list[str] | None,
    typer.Option(
        "--budget",
        "-b",
        help='Memory for experts: "8GiB", "25%" of them, "1536 slots". Repeat it. None: 5 to 50 %, and as recorded.',
    ),
]
ScopeName = Annotated[
    str | None,
    typer.Option("--scope", help="Slots belong to each layer, or to one pool: layer | pool. None: as it was recorded."),
]
Streams = Annotated[int, typer.Option(help="Interleave the requests into so many concurrent streams.", min=1)]
Mode = Annotated[str, typer.Option(help="Streams share a forward pass, or take turns: batch | turns.")]
Fit = Annotated[float, typer.Option(help="Share of requests a warm start has seen; 0: cold only.", min=0, max=0.95)]
Seed = Annotated[int, typer.Option(help="Which requests a warm start has seen.", min=0)]
Staging = Annotated[
    int | None,
    typer.Option(help="Slots that experts only pass through, paid by bytes. None: as it was recorded, or 0.", min=0),
]
Prefill = Annotated[str, typer.Option(help="What a prompt may put into the cache: free | always | score.")]
ExpertBytes = Annotated[str | None, typer.Option(help="Size of one expert, where the trace does not state it.")]
LinkSpeed = Annotated[
    str | None,
    typer.Option("--link", help="Speed of the link that brings experts, as 25GB/s.", rich_help_panel=_LINK),
]
Compute = Annotated[
    str | None,
    typer.Option(help="Time of one forward pass with all experts resident, as 4ms.", rich_help_panel=_LINK),
]
Latency = Annotated[str, typer.Option(help="Fixed time of an event's transfers.", rich_help_panel=_LINK)]
ExpertShare = Annotated[
    float, typer.Option(help="Share of the compute time that is experts.", min=0, max=1, rich_help_panel=_LINK)
]
Prefetch = Annotated[
    str,
    typer.Option(
        help="Prefetch over the link: off, auto, oracle, or a forecast such as gate or best.", rich_help_panel=_LINK
    ),
]
Driver = Annotated[
    str | None,
    typer.Option(
        help="Whose rules prefetch follows: cpu | host (it drives a GPU) | device (the GPU drives itself). "
        "None: device, where the trace has the routers' predictions of two layers and they predict; else cpu.",
        rich_help_panel=_LINK,
    ),
]
PrefetchSlots = Annotated[
    int | None,
    typer.Option(
        help="Slots for prefetched experts, beside the cache. None: as the driver.", min=1, rich_help_panel=_LINK
    ),
]
Ahead = Annotated[int | None, typer.Option("--ahead", hidden=True, min=1)]
Plot = Annotated[
    Path | None, typer.Option(help="Draw hit rate against memory: .png, .svg or .pdf.", rich_help_panel=_FILES)
]
Csv = Annotated[Path | None, typer.Option(help="Write the rows as CSV, too.", rich_help_panel=_FILES)]

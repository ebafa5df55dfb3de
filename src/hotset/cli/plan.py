"""`hotset plan`: which precision, how much memory on which tier, and how many tokens per second."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset.cli import run_options as opt
from hotset.cli.budgets import settled_size
from hotset.cli.live import with_messages
from hotset.cli.output import JsonFlag, emit, note
from hotset.cli.targets import check_figure, check_table
from hotset.errors import HotsetError
from hotset.files import write_beside
from hotset.options.run import CONTEXT_TOKENS, MAX_CONTEXT

if TYPE_CHECKING:
    from hotset.analysis.planner.planning import Planner
    from hotset.analysis.planner.workload import Workload

_MACHINE, _WORKLOAD, _FILES = "The machine", "The workload", "Output"

Shape = Annotated[
    str | None,
    typer.Option(help='A model by its numbers, "layers=48,experts=128,top_k=8,hidden=2048,intermediate=768", '
                 "or a published one: qwen3-30b-a3b, gpt-oss-20b, ..."),
]  # fmt: skip
Gpu = Annotated[
    str | None, typer.Option(help="Memory of the GPU, as 12GiB; 0: none. None: as here.", rich_help_panel=_MACHINE)
]
Ram = Annotated[str | None, typer.Option(help="RAM, as 32GiB. None: what is free here.", rich_help_panel=_MACHINE)]
Link = Annotated[
    str | None, typer.Option(help="Speed between RAM and GPU. None: measured, or 25GB/s.", rich_help_panel=_MACHINE)
]
Disk = Annotated[str | None, typer.Option(help="Speed of the disk. None: measured.", rich_help_panel=_MACHINE)]
Bandwidth = Annotated[
    str | None,
    typer.Option(
        "--memory-bandwidth",
        help="Of a machine that is not this one: what the memory that computes reads, as 1TB/s. None: measured; of a "
        "GPU that is not here 500GB/s.",
        rich_help_panel=_MACHINE,
    ),
]
TracePath = Annotated[
    Path | None, typer.Option("--trace", help="A trace of this model, or reference:NAME.", rich_help_panel=_WORKLOAD)
]
ProfileName = Annotated[
    str | None, typer.Option("--profile", help="A profile of this model.", rich_help_panel=_WORKLOAD)
]
Like = Annotated[
    str | None, typer.Option(help="Routing as local as a workload of the reference model: it, c, ...",
                             rich_help_panel=_WORKLOAD),
]  # fmt: skip
Context = Annotated[int, typer.Option(help="Leave room for so many tokens.", min=1, max=MAX_CONTEXT, metavar="TOKENS")]
PromptTokens = Annotated[
    int, typer.Option("--prompt-tokens", help="The long prompt whose first token is timed.", min=1, max=1 << 24)
]
More = Annotated[str, typer.Option(help="What would so much more of the memory that computes bring?")]
Target = Annotated[str | None, typer.Option(help="The least memory that reaches so much, as 20tok/s.")]
Plot = Annotated[
    Path | None, typer.Option(help="Draw tokens per second against memory: .png, .svg or .pdf.", rich_help_panel=_FILES)
]
Csv = Annotated[Path | None, typer.Option(help="Write the rows as CSV, too.", rich_help_panel=_FILES)]


@with_messages
def plan(
    model: opt.Model = None,
    shape: Shape = None,
    gpu: Gpu = None,
    ram: Ram = None,
    link: Link = None,
    disk: Disk = None,
    memory_bandwidth: Bandwidth = None,
    trace: TracePath = None,
    profile: ProfileName = None,
    like: Like = None,
    context: Context = CONTEXT_TOKENS,
    prompt_tokens: PromptTokens = 2048,
    more: More = "8GiB",
    target: Target = None,
    plot: Plot = None,
    csv: Csv = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: JsonFlag = False,
) -> None:
    """Say what to expect of a model on a machine: for every precision the split of memory, speed, bound and command.

    Examples: hotset plan ./Qwen3-30B-A3B --ram 32GiB --like it --target 20tok/s

    hotset plan --shape qwen3-30b-a3b --gpu 12GiB --ram 32GiB --like it --link 25GB/s --disk 3GB/s
    """
    from hotset.analysis.planner.machines import Told, memory_of, parse_target
    from hotset.analysis.planner.planning import Planner, check_fits
    from hotset.cli.plan_sources import gpu_here, machine_rates, plan_model, plan_workload, ram_here, replayed
    from hotset.shape import parse_memory

    wanted = None if target is None else parse_target(target)
    gpu, ram = (None if size is None else settled_size(size) for size in (gpu, ram))
    more_bytes = parse_memory(settled_size(more))
    told = Told(gpu, ram, link, disk, memory_bandwidth)
    told.check()
    check_figure(plot)
    check_table(csv)
    if model is not None and shape is not None:
        raise HotsetError("a MODEL and --shape exclude each other: give one of them")
    planned = plan_model(model, shape, context, trust_remote_code)
    workload = plan_workload(planned, trace, profile, like)
    memory = memory_of(told, ram_here, gpu_here)
    if wanted is None:
        check_fits(planned, memory)
    rates_of, assumed = machine_rates(told, planned, memory)
    planner = Planner(
        planned, memory, replayed(workload, memory), rates_of, workload.misses_spread, prompt_tokens, more_bytes,
        None if context == CONTEXT_TOKENS else context,
    )  # fmt: skip
    document, views = _result(planner, workload, wanted, assumed, as_json)
    _write_files(planner, document["rows"] or document["targets"], plot, csv)
    emit(document, as_json, *views)
    if not as_json:
        for line in document["notes"]:
            note(line)


def _result(
    planner: Planner, workload: Workload, wanted: float | None, assumed: list[str], as_json: bool
) -> tuple[dict[str, Any], list[Any]]:
    """The document of a plan, and what people are shown of it."""
    from hotset.analysis.planner.rates import Engine
    from hotset.cli.plan_view import commands_view, facts_line, plan_table, target_table

    model, memory = planner.model, planner.memory
    targets = [] if wanted is None else [planner.target(each, wanted) for each in model.precisions()]
    rows = planner.rows() if wanted is None else []
    notes = [*(planner.left_out() if wanted is None else []), *assumed, *([workload.note] if workload.note else [])]
    if wanted is not None and not any(row.reached for row in targets):
        best = max(targets, key=lambda row: row.tokens_per_s)
        notes.insert(0, (
            f"no precision reaches {wanted:g} tokens per second, whatever the memory: {best.precision} comes to "
            f"{best.tokens_per_s:.1f} with everything resident, and the bound is {best.bound_tokens_per_s:.1f}"
        ))  # fmt: skip
    document: dict[str, Any] = {
        "model": model.name, "layers": model.layers, "experts": model.experts, "top_k": model.top_k,
        "workload": workload.name, "ram_bytes": memory.ram_bytes, "gpu_bytes": memory.gpu_bytes,
        "more_bytes": planner.more_bytes, "prompt_tokens": planner.prompt_tokens, "target_tokens_per_s": wanted,
        "rates": planner.rates_of(Engine.CPU if memory.gpu_bytes is None else Engine.DEVICE).source,
        "rows": [row.as_dict() for row in rows], "targets": [row.as_dict() for row in targets], "notes": notes,
    }  # fmt: skip
    if as_json:
        return document, []
    where = f"{model.title}, {workload.name} workload, {_words(planner)}"
    if wanted is not None:
        kind = "RAM" if memory.gpu_bytes is None else "GPU"
        title = f"{where}: {wanted:g} tokens per second"
        return document, [title, target_table(targets, kind), *commands_view(targets)]
    table = plan_table(rows, where, planner.more_bytes, planner.prompt_tokens, gpu=memory.gpu_bytes is not None)
    return document, [table, facts_line(rows, document["rates"]), *commands_view(rows)]


def _words(planner: Planner) -> str:
    from hotset.shape import format_size

    memory = planner.memory
    gpu = "" if memory.gpu_bytes is None else f"GPU {format_size(memory.gpu_bytes)}, "
    return f"{gpu}RAM {format_size(memory.ram_bytes)}"


def _write_files(planner: Planner, rows: list[dict[str, Any]], plot: Path | None, csv: Path | None) -> None:
    if csv is not None:
        with write_beside(csv) as scratch:
            scratch.write_text(_csv(rows), encoding="utf-8")
    if plot is not None:
        _draw(planner, plot)


def _csv(rows: list[dict[str, Any]]) -> str:
    import csv
    from io import StringIO

    text = StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(row | {"commands": " && ".join(row["commands"])} for row in rows)
    return text.getvalue()


def _draw(planner: Planner, path: Path) -> None:
    import numpy as np

    from hotset.analysis.planner.rates import Engine
    from hotset.analysis.planner.tiers import bytes_for
    from hotset.report.plan_plot import plot_plan

    model, memory = planner.model, planner.memory
    engine = Engine.CPU if memory.gpu_bytes is None else Engine.DEVICE
    whole = max(bytes_for(model, each, model.shape.total_experts, engine) for each in model.precisions())
    most = min(max(1.3 * memory.fast_bytes + planner.more_bytes, model.rest_bytes * 1.5), 1.1 * whole)
    sizes = np.linspace(model.rest_bytes, max(most, 1.05 * memory.fast_bytes), 160)
    lines = {each.name: (sizes / 2**30, planner.speeds(each, sizes)) for each in model.precisions()}
    kind = "RAM" if memory.gpu_bytes is None else "GPU memory"
    caption = f"{model.layers} x {model.experts} experts, top {model.top_k}; {_words(planner)}; batch 1, decode."
    plot_plan(lines, path, title=model.title, memory=kind, caption=caption, now_gib=memory.fast_bytes / 2**30)

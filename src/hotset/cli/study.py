"""`hotset study`: questions about caching and prefetch, answered by replays in one go."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset.cli.compiling import compile_missing
from hotset.cli.live import with_messages
from hotset.cli.output import JsonFlag, emit_result, progress_bar
from hotset.cli.targets import check_figure, check_table
from hotset.cli.traces import load_traces
from hotset.files import write_beside

if TYPE_CHECKING:
    from hotset.sim.studies import StudyResult
    from hotset.trace import Trace

Name = Annotated[str, typer.Argument(metavar="NAME", help="bytes, capacity, policies, sensitivity, shift or users.")]
Traces = Annotated[
    list[Path] | None,
    typer.Option(
        "--trace",
        help="A trace file, or reference:NAME. Repeat it. None: all reference domains, and in a checkout the public "
        "trace where it lies beside it.",
    ),
]
Plot = Annotated[Path | None, typer.Option(help="Draw the result: .png, .svg or .pdf.")]
Csv = Annotated[Path | None, typer.Option(help="Write the rows as CSV, too.")]
Out = Annotated[Path | None, typer.Option(help="Write the result as JSON, with the machine it ran on.")]

_PUBLIC = Path(__file__).parents[4] / "shared" / "traces" / "gpt-oss-20b.npz"  # beside a checkout, if anywhere


@with_messages
def study(
    name: Name,
    trace: Traces = None,
    plot: Plot = None,
    csv: Csv = None,
    out: Out = None,
    as_json: JsonFlag = False,
) -> None:
    """Answer a question by replays: requests of all traces, mixed; half to learn from and half to judge.

    Example: hotset study bytes --trace reference:it --trace reference:python --plot bytes.png
    """
    from hotset.ahead import parts_of_replays
    from hotset.report.study_table import study_table
    from hotset.sim.studies import carry_out, find

    chosen = find(name)
    check_figure(plot)
    check_table(csv)
    traces = load_traces(trace) if trace else _usual()
    plan = chosen.plan(traces)
    compile_missing(parts_of_replays(chosen.replays_on(traces)))
    with progress_bar("studying", len(plan.jobs)) as advance:
        result = carry_out(chosen, plan, advance)
    _write_files(name, result, plot, csv, out)
    emit_result(result, as_json, lambda: [study_table(result)], study=name)


def _usual() -> dict[str, Trace]:
    """All domains of the reference model, and a public trace where it lies beside the checkout."""
    from hotset.reference import DOMAINS, trace
    from hotset.trace.importers import import_trace

    traces = {name: trace(name) for name in DOMAINS}
    if _PUBLIC.exists():
        traces["gpt-oss-20b"] = import_trace(_PUBLIC, experts=32)
    return traces


def _write_files(name: str, result: StudyResult, plot: Path | None, csv: Path | None, out: Path | None) -> None:
    if plot:
        from hotset.report.study_plot import plot_study

        plot_study(result, plot)
    if csv:
        from hotset.report.csv import study_to_csv, write_csv

        write_csv(csv, study_to_csv(result))
    if out:
        with write_beside(out) as scratch:
            scratch.write_text(
                json.dumps({"study": name, **result.as_dict()} | _origin(), indent=1, allow_nan=False) + "\n"
            )


def _origin() -> dict[str, Any]:
    from hotset.cli.doctor_machine import processor

    machine = {key: value for key, value in processor().items() if key != "flags"}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine | {"numba": version("numba"), "numpy": version("numpy")},
    }

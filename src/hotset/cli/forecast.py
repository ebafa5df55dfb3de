"""`hotset forecast`: how well the experts of the layers ahead can be predicted, and at what cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotset.cli.compiling import compile_missing
from hotset.cli.live import with_messages
from hotset.cli.output import JsonFlag, emit, note, progress_bar
from hotset.cli.targets import check_figure, check_table
from hotset.cli.traces import TraceFiles, load_traces
from hotset.errors import HotsetError

if TYPE_CHECKING:
    from hotset.sim.forecasting import Evaluation
    from hotset.trace import Trace

Forecasts = Annotated[
    list[str] | None,
    typer.Option(
        "--forecast", "-f", help='A forecast, as gate, "token:slots=1024", or a file of one. Repeat it. None: all.'
    ),
]
Distances = Annotated[str, typer.Option("--distance", "-d", help="How many layers ahead, with commas between them.")]
Fit = Annotated[float, typer.Option(help="Share of requests to learn from before any is judged.", min=0, max=0.95)]
ByLayer = Annotated[bool, typer.Option("--by-layer", help="Show recall by layer, too.")]
Csv = Annotated[Path | None, typer.Option(help="Write a row for each forecast and distance as CSV, too.")]
Plot = Annotated[Path | None, typer.Option(help="Draw recall and reliability: .png, .svg or .pdf.")]


@with_messages
def forecast(
    traces: TraceFiles,
    forecast: Forecasts = None,
    distance: Distances = "1,2,3",
    fit: Fit = 0.5,
    by_layer: ByLayer = False,
    plot: Plot = None,
    csv: Csv = None,
    as_json: JsonFlag = False,
) -> None:
    """Judge forecasts of the experts that the next layers will use.

    Example: hotset forecast chat.safetensors -f gate -f best --distance 1,2 --plot recall.png
    """
    from hotset.forecasts import names, parse
    from hotset.plugins import install, resolve

    distances = _distances(distance)
    check_figure(plot)
    check_table(csv)
    install()
    asked = [resolve(spec, "forecast") for spec in forecast or names()]
    specs = list(dict.fromkeys(parse(spec).spec for spec in asked))  # a wrong name before any work
    results = _run(load_traces(traces), specs, distances, fit)
    if plot:
        from hotset.report.forecast_plot import plot_forecasts

        plot_forecasts(results, plot)
    if csv:
        from hotset.report.csv import forecasts_to_csv, write_csv

        write_csv(csv, forecasts_to_csv(results))
    _show(results, by_layer, as_json)


def _distances(text: str) -> list[int]:
    try:
        return sorted({int(word) for word in text.split(",")})
    except ValueError:
        raise HotsetError(f'cannot read the distances "{text}": write them as 1,2,3') from None


def _run(traces: dict[str, Trace], specs: list[str], distances: list[int], fit: float) -> dict[str, Evaluation]:
    from hotset.ahead import parts_of_replays
    from hotset.sim.forecasting import evaluate, lacking
    from hotset.sim.sweep import Replays

    why = {spec: [lacking(spec, trace) for trace in traces.values()] for spec in specs}
    usable = tuple(spec for spec, reasons in why.items() if None in reasons)
    if not usable:
        raise HotsetError(f"no forecast is left: {specs[0]} cannot be judged, {why[specs[0]][0]}")
    compile_missing(parts_of_replays(Replays(judged=usable)))
    with progress_bar("forecasting", len(traces) * len(specs)) as advance:
        return {name: evaluate(trace, specs, distances, fit, advance=advance) for name, trace in traces.items()}


def _show(results: dict[str, Evaluation], by_layer: bool, as_json: bool) -> None:
    if as_json:
        emit({"traces": {name: result.as_dict() for name, result in results.items()}}, True)
        return
    from hotset.report.forecast_table import forecast_tables

    emit({}, False, *forecast_tables(results, by_layer))
    for name, result in results.items():
        for text in result.notes:
            note(f"{name}: {text}")

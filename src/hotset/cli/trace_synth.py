"""`hotset trace synth`: write a synthetic trace, from parameters or fitted to a recorded trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset.cli.output import JsonFlag, emit, progress_bar
from hotset.cli.targets import refuse_existing
from hotset.cli.traces import OutFile, load_trace, written, written_line
from hotset.errors import HotsetError
from hotset.files import write_beside
from hotset.reading import read_bounded

if TYPE_CHECKING:
    from rich.table import Table

    from hotset.trace.synth import SynthConfig
    from hotset.trace.synth_fit import FitReport


_MAX_CONFIG_BYTES = 1 << 20


def _option(panel: str, text: str, default: float, low: float = 0, high: float | None = None) -> Any:
    """State the default in the help only: an option left out must differ from one given the default."""
    return typer.Option(help=f"{text} Default: {default:g}.", rich_help_panel=panel, min=low, max=high)


def synth(
    out: OutFile,
    fit: Annotated[Path | None, typer.Option(help="First fit the parameters to this recorded trace.")] = None,
    config: Annotated[Path | None, typer.Option(help="Read the parameters from this JSON file.")] = None,
    save_config: Annotated[Path | None, typer.Option(help="Write the parameters to this JSON file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")] = False,
    as_json: JsonFlag = False,
    layers: Annotated[int | None, _option("Model", "MoE layers.", 16, 1)] = None,
    experts: Annotated[int | None, _option("Model", "Experts per layer.", 64, 1)] = None,
    top_k: Annotated[int | None, _option("Model", "Experts that a token uses per layer.", 8, 1)] = None,
    expert_bytes: Annotated[
        str | None, typer.Option(help="Size of one expert, such as 8MiB.", rich_help_panel="Model")
    ] = None,
    requests: Annotated[int | None, _option("Workload", "Requests, one after another.", 64, 1)] = None,
    prompt_tokens: Annotated[
        int | None, _option("Workload", "Mean length of a prompt; 0 records no prefill.", 32)
    ] = None,
    new_tokens: Annotated[int | None, _option("Workload", "Mean new tokens per request.", 96, 1)] = None,
    topics: Annotated[int | None, _option("Workload", "Number of topics.", 6, 1)] = None,
    topic_stay: Annotated[
        float | None, _option("Workload", "Probability that a request keeps the topic before it.", 0.7, 0, 1)
    ] = None,
    switch: Annotated[
        float | None, _option("Workload", "Probability per token that the topic changes within a request.", 0, 0, 1)
    ] = None,
    seed: Annotated[int | None, _option("Workload", "Seed of all random numbers.", 0)] = None,
    skew: Annotated[float | None, _option("Router", "Spread of the shared popularity.", 0.45)] = None,
    topic_strength: Annotated[float | None, _option("Router", "Spread of what a topic adds.", 0.7)] = None,
    noise: Annotated[float | None, _option("Router", "Spread of the noise from token to token.", 1)] = None,
    locality: Annotated[
        float | None, _option("Router", "Correlation of that noise between neighbouring tokens.", 0.3, 0, 1)
    ] = None,
    slow: Annotated[float | None, _option("Router", "Spread of the noise between passages.", 0.4)] = None,
    slow_tokens: Annotated[float | None, _option("Router", "Length of a passage in tokens.", 16, 1)] = None,
    drift: Annotated[
        float | None, _option("Router", "Share of the popularity that each request renews.", 0.03, 0, 1)
    ] = None,
) -> None:
    """Write a synthetic trace that behaves like real routing; equal parameters give equal bytes."""
    from hotset.trace.synth import SynthConfig

    given = _given(locals())
    if fit and config:
        raise HotsetError("--fit and --config both set the parameters: give one of them")
    refuse_existing(force, out, save_config)
    report = _fit(fit, given) if fit else None
    values = report.config.to_dict() if report else _read_config(config)
    _write(SynthConfig.from_dict(values | given), out, save_config, report, as_json)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The parameters named on the command line."""
    from dataclasses import fields

    from hotset.shape import parse_size
    from hotset.trace.synth import SynthConfig

    names = {item.name for item in fields(SynthConfig)}
    given = {name: value for name, value in options.items() if name in names and value is not None}
    if "expert_bytes" in given:
        given["expert_bytes"] = parse_size(given["expert_bytes"])
    return given


def _read_config(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        values = json.loads(read_bounded(path, _MAX_CONFIG_BYTES))
    except OSError as error:
        raise HotsetError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise HotsetError(f"{path} is not a JSON file: {error}") from None
    if not isinstance(values, dict):
        raise HotsetError(f"{path} must hold one JSON object of parameters, as --save-config writes it")
    return values


def _fit(path: Path, given: dict[str, Any]) -> FitReport:
    from hotset.trace.synth_fit import FIT_EVALUATIONS
    from hotset.trace.synth_fit import fit as fit_trace

    trace = load_trace(path)
    wanted = {name: given[name] for name in ("seed", "topics") if name in given}
    with progress_bar("fitting", FIT_EVALUATIONS) as advance:
        return fit_trace(trace, advance=advance, **wanted)


def _write(config: SynthConfig, out: Path, save_config: Path | None, report: FitReport | None, as_json: bool) -> None:
    from dataclasses import asdict

    from hotset.trace.synth import synthesise

    trace = synthesise(config)
    trace.save(out)
    if save_config:
        with write_beside(save_config) as scratch:
            scratch.write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
    document = written(trace, out)
    rows = [asdict(row) for row in report.rows] if report else None
    views = [_fit_table(report)] if report else []
    more = {"out": str(out), "config": config.to_dict(), "fit": rows}
    emit(document | more, as_json, *views, written_line(document))


def _fit_table(report: FitReport) -> Table:
    from rich.table import Table

    table = Table("statistic", title="The fit, in %")
    for name in ("target", "reached", "gap"):
        table.add_column(name, justify="right")
    for row in report.rows:
        gap = 100 * (row.reached - row.target)
        table.add_row(row.statistic, f"{100 * row.target:.1f}", f"{100 * row.reached:.1f}", f"{gap:+.1f}")
    return table

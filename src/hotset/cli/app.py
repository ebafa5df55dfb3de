"""The `hotset` command: a table of contents, one module per chapter."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hotset._version import __version__
from hotset.cli.analyze import analyze
from hotset.cli.busy import wait_without_spinning_if_busy
from hotset.cli.chat import chat
from hotset.cli.compare import compare
from hotset.cli.compiling import compile_cli
from hotset.cli.doctor import doctor
from hotset.cli.ending import run_and_report
from hotset.cli.forecast import forecast
from hotset.cli.help_words import Commands
from hotset.cli.interrupts import terminable
from hotset.cli.models import models
from hotset.cli.output import JsonFlag, emit
from hotset.cli.pack import pack
from hotset.cli.plan import plan
from hotset.cli.profile import app as profile_app
from hotset.cli.prune import prune
from hotset.cli.run import run
from hotset.cli.simulate import simulate
from hotset.cli.stats import stats
from hotset.cli.study import study
from hotset.cli.trace import app as trace_app

app = Commands(
    name="hotset",
    help="Run Mixture-of-Experts models larger than memory, and prove by replay what a cache would save.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="run", rich_help_panel="Run a model")(run)
app.command(name="chat", rich_help_panel="Run a model")(chat)
app.command(name="pack", rich_help_panel="Run a model")(pack)
app.command(name="prune", rich_help_panel="Run a model")(prune)
app.command(name="compare", rich_help_panel="Run a model")(compare)
app.command(name="models", rich_help_panel="Run a model")(models)
app.command(name="doctor", rich_help_panel="Run a model")(doctor)
app.command(name="compile", rich_help_panel="Run a model")(compile_cli)
app.command(name="plan", rich_help_panel="Decide")(plan)
app.command(name="simulate", rich_help_panel="Decide")(simulate)
app.command(name="forecast", rich_help_panel="Decide")(forecast)
app.command(name="study", rich_help_panel="Decide")(study)
app.command(name="analyze", rich_help_panel="Understand a workload")(analyze)
app.add_typer(trace_app, name="trace", rich_help_panel="Understand a workload")
app.add_typer(profile_app, name="profile", rich_help_panel="Understand a workload")
app.command(name="stats", rich_help_panel="Understand a workload")(stats)


@app.command(name="version", rich_help_panel="About")
def version(as_json: JsonFlag = False) -> None:
    """Print the version."""
    emit({"version": __version__}, as_json, f"hotset {__version__}")


def _print_version(wanted: bool) -> None:
    if wanted:
        emit({}, False, f"hotset {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; the input's faults end in one line and exit code 2, its own in exit code 1."""
    wait_without_spinning_if_busy()
    with terminable():
        code = run_and_report(lambda: app(standalone_mode=False, prog_name="hotset"))
    # An interrupt within an exec() of text, as imports do it, is remembered by CPython, which then ends `python -m` by
    # SIGINT whatever the exit code is; the next text that is evaluated makes it forget.
    eval("0")  # noqa: S307
    sys.exit(code)

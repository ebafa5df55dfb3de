"""The scores of forecasts as tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from hotset.report.words import percent
from hotset.text import printable

if TYPE_CHECKING:
    from hotset.sim.forecasting import Evaluation, Score

LEGEND = (
    "recall @k: of the experts used, those among the k most likely, k: top_k per token; next pass: recall @k of first "
    "layers, foreseen before their token is known; off by: mean error of a stated probability (ECE), over ten bins"
)


def forecast_tables(results: dict[str, Evaluation], by_layer: bool = False) -> list[Table]:
    """One table per trace with a section per distance, and on request one more by layer."""
    tables = [_table(name, result) for name, result in results.items() if result.scores]
    if tables:
        tables[-1].caption = Text(f"\n{LEGEND}\n", style="dim")
    if by_layer:
        tables += [_layer_table(name, result) for name, result in results.items() if result.scores]
    return tables


def _frame(title: str) -> Table:
    return Table(
        title=Text(title, style="bold"), title_justify="left", caption_justify="left",
        box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False, show_edge=False,
    )  # fmt: skip


def _table(name: str, result: Evaluation) -> Table:
    table = _frame(f"{printable(name)}: forecasts of the layers ahead\n{result.judged}")
    table.add_column("\nahead", style="dim", no_wrap=True)
    table.add_column("\nforecast", overflow="fold")
    for header in ("recall\n@k", "precision\n@k", "recall\n@2k", "next\npass", "off\nby", "log\nloss", "us\n/event"):
        table.add_column(header, justify="right", no_wrap=True)
    for distance in _distances(result):
        scores = [score for score in result.scores if score.distance == distance]
        best = max(scores, key=lambda score: score.recall or 0.0)
        for i, score in enumerate(scores):
            ahead = _ahead(distance) if i == 0 else ""
            table.add_row(ahead, *_cells(score), style="bold" if score is best and len(scores) > 1 else "")
        table.add_section()
    return table


def _cells(score: Score) -> list[str]:
    shares = [score.recall, score.precision, score.recall_2k, score.next_pass_recall, score.calibration_error]
    loss = "-" if score.log_loss is None else f"{score.log_loss:.4f}"
    return [printable(score.forecast), *map(_share, shares), loss, f"{score.us_per_event:.1f}"]


def _layer_table(name: str, result: Evaluation) -> Table:
    table = _frame(f"\n{printable(name)}: recall @k by layer; layers before the distance are of the next pass")
    table.add_column("ahead", style="dim", no_wrap=True)
    table.add_column("forecast", overflow="fold")
    for layer in range(len(result.scores[0].recall_by_layer)):
        table.add_column(str(layer), justify="right", no_wrap=True)
    for distance in _distances(result):
        scores = [score for score in result.scores if score.distance == distance]
        for i, score in enumerate(scores):
            shares = ["-" if share is None else f"{100 * share:.0f}" for share in score.recall_by_layer]
            table.add_row(_ahead(distance) if i == 0 else "", printable(score.forecast), *shares)
        table.add_section()
    return table


def _distances(result: Evaluation) -> list[int]:
    return sorted({score.distance for score in result.scores})


def _ahead(distance: int) -> str:
    return "1 layer" if distance == 1 else f"{distance} layers"


def _share(share: float | None) -> str:
    return "-" if share is None else percent(share)

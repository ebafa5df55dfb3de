"""The scores of forecasts as tables for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from hotset.report.tables import dash, frame
from hotset.report.words import percent, plural
from hotset.text import printable

if TYPE_CHECKING:
    from hotset.sim.forecasting import Evaluation, Score

LEGEND = (
    "recall @k: of the experts used, those among the k most likely, k: top_k per token; next pass: recall @k of first "
    "layers, predicted before their token is known; off by: mean error of a stated probability (ECE), over ten bins"
)


def forecast_tables(results: dict[str, Evaluation], by_layer: bool = False) -> list[Table]:
    """One table per trace with a section per distance, and on request one more by layer."""
    tables = [_table(name, result) for name, result in results.items() if result.scores]
    if tables:
        tables[-1].caption = Text(f"\n{LEGEND}\n", style="dim")
    if by_layer:
        tables += [_layer_table(name, result) for name, result in results.items() if result.scores]
    return tables


def _table(name: str, result: Evaluation) -> Table:
    table = frame(f"{printable(name)}: forecasts of the layers ahead\n{result.judged}")
    headers = ["recall\n@k", "precision\n@k", "recall\n@2k", "next\npass", "off\nby", "log\nloss", "us\n/event"]
    _fill(table, ["\nahead", "\nforecast", *headers], result, _cells, mark_best=True)
    return table


def _layer_table(name: str, result: Evaluation) -> Table:
    table = frame(f"\n{printable(name)}: recall @k by layer; layers before the distance are of the next pass")
    headers = ["ahead", "forecast", *map(str, range(len(result.scores[0].recall_by_layer)))]
    _fill(table, headers, result, lambda score: [dash(s, lambda s: f"{100 * s:.0f}") for s in score.recall_by_layer])
    return table


def _fill(
    table: Table,
    headers: list[str],
    result: Evaluation,
    cells: Callable[[Score], list[str]],
    mark_best: bool = False,
) -> None:
    """A section for each distance, which its first row names."""
    table.add_column(headers[0], style="dim", no_wrap=True)
    table.add_column(headers[1], overflow="fold")
    for header in headers[2:]:
        table.add_column(header, justify="right", no_wrap=True)
    for distance in sorted({score.distance for score in result.scores}):
        scores = [score for score in result.scores if score.distance == distance]
        best = max(scores, key=lambda score: score.recall or 0.0) if mark_best and len(scores) > 1 else None
        for i, score in enumerate(scores):
            ahead = "" if i else plural(distance, "layer")
            table.add_row(ahead, printable(score.forecast), *cells(score), style="bold" if score is best else "")
        table.add_section()


def _cells(score: Score) -> list[str]:
    shares = [score.recall, score.precision, score.recall_2k, score.next_pass_recall, score.calibration_error]
    return [
        *(dash(share, percent) for share in shares),
        dash(score.log_loss, "{:.4f}".format),
        f"{score.us_per_event:.1f}",
    ]

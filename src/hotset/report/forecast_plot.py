"""Recall against distance, and what stated probabilities were worth, as a figure with one row per trace."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from hotset.errors import HotsetError
from hotset.report.plot_file import drawing, save_figure
from hotset.report.plot_style import GREY, INK, Look, looks
from hotset.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hotset.sim.forecasting import Evaluation, Score


def plot_forecasts(results: dict[str, Evaluation], path: str | Path) -> None:
    """Draw recall by distance per forecast beside the reliability of `best`, or else of the first one."""
    drawn = {name: result for name, result in results.items() if result.scores}
    if not drawn:
        raise HotsetError("there is nothing to plot: no forecast could be judged")
    with drawing():
        save_figure(_figure(drawn), Path(path))


def _figure(results: dict[str, Evaluation]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, 0.4 + 3.3 * len(results)), layout="constrained")
    grid = figure.subplots(len(results), 2, squeeze=False)
    style = looks(score.forecast for result in results.values() for score in result.scores)
    for (left, right), (name, result) in zip(grid, results.items(), strict=True):
        _draw_recall(left, result, style)
        left.set_title(printable(name))
        _draw_reliability(right, result)
    first = next(iter(results.values()))
    caption = f"Judged on {first.judged}." if len(results) == 1 else "Judged on new tokens of later requests."
    figure.supxlabel(fill(caption, 150), x=0.01, ha="left", fontsize=7, color=GREY)
    return figure


def _draw_recall(axes: Axes, result: Evaluation, style: dict[str, Look]) -> None:
    """Recall among the k most likely, within a pass."""
    own = [score for score in result.scores if score.recall is not None]
    for spec in dict.fromkeys(score.forecast for score in own):
        line = sorted((score.distance, 100 * (score.recall or 0.0)) for score in own if score.forecast == spec)
        color, marker, dash = style[spec]
        axes.plot(*zip(*line, strict=True), color=color, marker=marker, linestyle=dash, label=printable(spec),
                  linewidth=1.9 if spec == "best" else 1.1, markersize=4.6, clip_on=False)  # fmt: skip
    axes.set_xticks(sorted({score.distance for score in result.scores}))
    axes.set(ylim=(0, 100), xlabel="layers ahead", ylabel="recall among the k most likely (%)")
    axes.grid(axis="y")
    if own:
        axes.legend(loc="lower left", ncols=2)


def _draw_reliability(axes: Axes, result: Evaluation) -> None:
    """What was stated against what came true; a marker's size is the number of probabilities, by their logarithm."""
    names = [score.forecast for score in result.scores]
    shown = next((name for name in names if name.partition(":")[0] == "best"), names[0])
    axes.plot([0, 100], [0, 100], color=GREY, linewidth=0.8, linestyle=":")
    for score in result.scores:
        if score.forecast == shown:
            _draw_bins(axes, score)
    axes.set(xlim=(0, 100), ylim=(0, 100), xlabel="probability stated (%)", ylabel="came true (%)")
    axes.set_title(f"reliability of {printable(shown)}")
    axes.grid()
    axes.legend(loc="upper left")


def _draw_bins(axes: Axes, score: Score) -> None:
    from numpy import log10

    full = [entry for entry in score.bins if entry[2]]
    x, y = [100 * entry[0] for entry in full], [100 * entry[1] for entry in full]
    shade: Any = (INK, "#D55E00", "#0072B2")[(score.distance - 1) % 3]
    off = "" if score.calibration_error is None else f", off by {100 * score.calibration_error:.1f} %"
    axes.plot(x, y, color=shade, linewidth=1.0, label=f"{score.distance} ahead{off}")
    axes.scatter(x, y, s=[6 + 6 * float(log10(entry[2])) for entry in full], color=shade, clip_on=False, zorder=3)

"""How every expert was used, as one figure: heat, memory, hit rates by layer and over time, concentration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hotset.report.heat_grids import draw_memory, draw_use, mark_pins, number_layers
from hotset.report.heat_history import draw_history, label_marks
from hotset.report.heat_layers import draw_concentration, draw_layers
from hotset.report.heat_words import caption, knows_residency, short
from hotset.report.plot_file import check_format, drawing, save_figure
from hotset.report.plot_style import GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec

    from hotset.profile.statistics import Statistics

_SIZE = (12.0, 7.5)  # inches: a laptop's screen at 100 dpi
_LONGEST_TITLE = 100
_WITH_MEMORY = 3  # panels with a row per layer


def plot_statistics(statistics: Statistics, path: str | Path, *, title: str = "") -> None:
    """Draw how the experts were used; the suffix (.png, .svg, .pdf) decides the format."""
    target = Path(path)
    check_format(target)
    with drawing():
        save_figure(_draw(statistics, title), target)


def figure_of(statistics: Statistics, title: str = "") -> Figure:
    """The same figure for a notebook, which shows it as it stands."""
    with drawing():
        return _draw(statistics, title)


def _draw(statistics: Statistics, title: str) -> Figure:
    from hotset.report.heat_figure import HeatFigure

    figure = HeatFigure(figsize=_SIZE, layout="constrained")
    rows = figure.add_gridspec(2, 1, height_ratios=(1.45, 1))
    grids = _axes_of_layers(figure, rows[0], statistics)
    lower = rows[1].subgridspec(1, 2, width_ratios=(2.1, 1))
    history, concentration = figure.add_subplot(lower[0]), figure.add_subplot(lower[1])
    draw_history(history, statistics.history)
    draw_concentration(concentration, statistics)
    if title:
        figure.suptitle(short(title, _LONGEST_TITLE), x=0.008, ha="left", fontsize=11.5, fontweight="bold")
    figure.supxlabel(caption(statistics), x=0.008, ha="left", fontsize=7.5, color=GREY)
    figure.draw_without_rendering()  # the room for marks is known once the panels have their places
    label_marks(history, statistics.history)
    if len(grids) == _WITH_MEMORY:
        mark_pins(grids[1], statistics)
    return figure


def _axes_of_layers(figure: Figure, place: SubplotSpec, statistics: Statistics) -> list[Axes]:
    """The panels with a row per layer, side by side: use, memory where it is known, and hit rates."""
    draw = [draw_use, *([draw_memory] if knows_residency(statistics) else []), draw_layers]
    columns = place.subgridspec(1, len(draw), width_ratios=(1.0,) * (len(draw) - 1) + (0.5,))
    axes = [figure.add_subplot(columns[0])]
    axes += [figure.add_subplot(columns[index], sharey=axes[0]) for index in range(1, len(draw))]
    drawn = [panel for panel, fill in zip(axes, draw, strict=True) if fill(panel, statistics)]
    for panel in drawn:
        number_layers(panel, statistics.shape.layers, named=panel is drawn[0])
    return axes

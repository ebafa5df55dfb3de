"""Hit rate against memory as a figure, one panel per trace."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from hotset.errors import HotsetError
from hotset.report.plot_file import check_format, drawing, save_figure
from hotset.report.plot_lines import Panel, panel_of
from hotset.report.plot_panel import draw_panel
from hotset.report.plot_style import GREY, looks
from hotset.report.words import plural, setting
from hotset.text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hotset.shape import ModelShape
    from hotset.sim import LruCurve, Result

_MAX_COLUMNS = 3
_LETTERS_PER_INCH = 19  # of the caption


def plot_hit_rates(
    result: Result,
    path: str | Path,
    curves: Mapping[str, LruCurve] | None = None,
    shapes: Mapping[str, ModelShape] | None = None,
) -> None:
    """Draw decode hit rates from a cold start against memory; the suffix (.png, .svg, .pdf) decides the format."""
    target = Path(path)
    check_format(target)
    panels = _panels(result, curves or {}, shapes or {})
    with drawing():
        save_figure(_figure(panels), target)


def check_plot(path: str | Path) -> None:
    """Raise what `plot_hit_rates` would raise for this path, before a long replay instead of after it."""
    check_format(Path(path))
    if not Path(path).parent.is_dir():
        raise HotsetError(f"cannot write {path}: there is no folder {Path(path).parent}")


def _panels(result: Result, curves: Mapping[str, LruCurve], shapes: Mapping[str, ModelShape]) -> list[Panel]:
    rows = [row for row in result.rows if row.phase == "decode" and row.start == "cold"]
    if not rows:
        raise HotsetError("there is nothing to plot: the result has no decode rows from a cold start")
    traces = dict.fromkeys(row.trace for row in rows)
    return [panel_of([row for row in rows if row.trace == name], curves.get(name), shapes.get(name)) for name in traces]


def _figure(panels: list[Panel]) -> Figure:
    from matplotlib.figure import Figure

    columns = min(len(panels), _MAX_COLUMNS)
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(1.9 + 3.1 * columns if columns > 1 else 6.0, 0.3 + 3.6 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, sharey=True, squeeze=False).ravel()
    style = looks(line.policy for panel in panels for line in panel.lines)
    grid[0].set_ylim(_floor(panels), 100)
    title_pad = 29 if any(panel.gib for panel in panels) else 8
    for axes, panel in zip(grid, panels, strict=False):
        draw_panel(axes, panel, style, title_pad)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[::columns]:
        axes.set_ylabel("decode hit rate (%)")
    caption = fill(_caption(panels), round(_LETTERS_PER_INCH * figure.get_figwidth()))
    figure.supxlabel(caption, x=0.01, ha="left", fontsize=7, color=GREY)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", handlelength=2.4)
    return figure


def _floor(panels: list[Panel]) -> float:
    """The foot of the shared axis: a round number below every line."""
    least = min(float(line.y.min()) for panel in panels for line in panel.lines)
    return max(0.0, 10 * math.floor((least - 2) / 10))


def _caption(panels: list[Panel]) -> str:
    """The conditions, and what lies between the markers."""
    sizes = ", ".join(f"{printable(panel.trace)} {plural(panel.rows[0].tokens, 'token')}" for panel in panels)
    exact = [printable(panel.trace) for panel in panels if any(line.exact for line in panel.lines)]
    conditions = f"Decode from a cold start, {setting(panels[0].rows[0])}; {sizes}."
    joined = "Markers are replayed budgets, joined by straight lines"
    if not exact:
        return f"{conditions} {joined}."
    where = "" if len(exact) == len(panels) else f" ({', '.join(exact)})"
    return f"{conditions} {joined}; LRU's line is exact wherever every event fits{where}."

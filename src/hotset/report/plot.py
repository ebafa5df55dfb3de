"""Hit rate against memory as a figure, one panel per trace."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.errors import HotsetError
from hotset.report.plot_file import check_format, drawing, save_figure
from hotset.report.plot_lines import Line, Panel, panel_of
from hotset.report.plot_style import GREY, PALE, Look, looks
from hotset.report.words import BOUND, label_of, plural, setting
from hotset.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hotset.shape import ModelShape
    from hotset.sim import LruCurve, Result

_MAX_COLUMNS = 3
_LETTERS_PER_INCH = 19  # of the caption
_LONGEST_NAME = 32


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
    least = min(float(line.y.min()) for panel in panels for line in panel.lines)
    grid[0].set_ylim(max(0.0, 10 * math.floor((least - 2) / 10)), 100)  # a round number below every line
    title_pad = 29 if any(panel.gib for panel in panels) else 8
    for axes, panel in zip(grid, panels, strict=False):
        _draw_panel(axes, panel, style, title_pad)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[::columns]:
        axes.set_ylabel("decode hit rate (%)")
    caption = fill(_caption(panels), round(_LETTERS_PER_INCH * figure.get_figwidth()))
    figure.supxlabel(caption, x=0.01, ha="left", fontsize=7, color=GREY)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", handlelength=2.4)
    return figure


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


def _draw_panel(axes: Axes, panel: Panel, looks: dict[str, Look], title_pad: float) -> None:
    """Draw everything of a panel but the names of its lines."""
    name, most = printable(panel.trace), _LONGEST_NAME // 2
    if len(name) > _LONGEST_NAME:  # it would run into the next panel
        name = f"{name[:most]}...{name[3 - most :]}"
    axes.set_title(name, y=1.0, pad=title_pad)  # titles of a row stand level
    axes.set_xlim(0, panel.reach * 1.02)
    axes.set_xlabel("experts resident (%)")
    axes.grid(axis="y")
    if panel.gib:
        to, back = partial(np.multiply, panel.gib / 100), partial(np.multiply, 100 / panel.gib)
        top = axes.secondary_xaxis("top", functions=(to, back))
        top.set_xlabel("GiB of experts", fontsize=7.5, color=GREY, labelpad=3)
        top.tick_params(length=2.5, width=0.6, labelsize=7.5, colors=GREY)
        top.spines["top"].set(visible=True, color=PALE, linewidth=0.6)
    for line in reversed(panel.lines):  # the best on top
        _draw_line(axes, line, looks[line.policy], line.policy == panel.best)
    _mark_cycle(axes, panel, 1, "token cycle", GREY)
    _mark_cycle(axes, panel, 2, "2 cycles", "#b5b5b5")


def _draw_line(axes: Axes, line: Line, look: Look, best: bool) -> None:
    """The path is cut at the frame and the markers are not; an empty plot of both stands in a legend."""
    path: dict[str, Any] = {"linewidth": 1.9 if best or line.policy == BOUND else 1.1, "linestyle": look.dash}
    mark: dict[str, Any] = {
        "marker": look.marker, "markersize": 5.2 if best else 4.4, "markeredgecolor": "white", "markeredgewidth": 0.5,
    }  # fmt: skip
    axes.plot(line.x, line.y, color=look.color, solid_capstyle="round", **path)
    axes.plot(*line.points, color=look.color, **mark, linestyle="", clip_on=False)
    axes.plot([], [], color=look.color, **path, **mark, label=label_of(line.policy))


def _mark_cycle(axes: Axes, panel: Panel, cycles: int, text: str, color: str) -> None:
    at = cycles * panel.cycle
    if at > panel.reach:
        return
    axes.axvline(at, color=color, linewidth=0.7, linestyle=(0, (4, 3)), zorder=0.5)
    low, high = axes.get_ylim()
    heights = [float(np.interp(at, line.x, line.y)) for line in panel.lines if line.x[0] <= at]
    above = not heights or high - max(heights) > min(heights) - low  # where the lines leave more room
    axes.annotate(
        text, (at, 1 if above else 0), (-2, -3 if above else 4), xycoords=axes.get_xaxis_transform(),
        textcoords="offset points", rotation=90, ha="right", va="top" if above else "bottom", fontsize=6.5, color=GREY,
    )  # fmt: skip

"""What a study found, as a figure: a row of panels for each trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from hotset.errors import HotsetError
from hotset.report.plot_file import drawing, save_figure
from hotset.report.plot_style import GREY, INK, looks
from hotset.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hotset.sim.studies import Chart, Column, StudyResult

Rows = Sequence[dict[str, Any]]

_MAX_WIDE = 4


def plot_study(result: StudyResult, path: str | Path) -> None:
    """Draw the charts of a study; the suffix (.png, .svg, .pdf) decides the format."""
    if not result.rows or not result.study.charts:
        raise HotsetError("there is nothing to plot: the study has no rows")
    with drawing():
        save_figure(_figure(result), Path(path))


def _figure(result: StudyResult) -> Figure:
    from matplotlib.figure import Figure

    panels, wide = _panels(result)
    lines = math.ceil(len(panels) / wide)
    width = 0.8 + (3.4 if wide < 3 else 2.9) * max(wide, 2)
    figure = Figure(figsize=(width, 1.0 + 2.7 * lines), layout="constrained")
    grid = figure.subplots(lines, wide, squeeze=False).ravel()
    columns = {column.key: column for column in result.study.columns}
    for axes, (trace, chart, rows) in zip(grid, panels, strict=False):
        _draw(axes, chart, rows, columns)
        axes.set_title(", ".join(text for text in (printable(trace), chart.title) if text))
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    caption = f"{'; '.join(printable(text) for text in result.ran_on)}. Split: {result.study.split}."
    figure.suptitle(result.study.title, x=0.01, ha="left", fontweight="bold")
    _name_lines(figure, list(grid[: len(panels)]))
    figure.supxlabel(fill(caption, round(19 * width)), x=0.01, ha="left", fontsize=7, color=GREY)
    return figure


def _panels(result: StudyResult) -> tuple[list[tuple[str, Chart, Rows]], int]:
    """Every chart on every trace, unless a chart compares the traces itself, and how many go side by side."""
    traces = list(dict.fromkeys(row.get("trace", "") for row in result.rows))
    if all(chart.by == "trace" for chart in result.study.charts):
        traces = [""]
    pairs = [(trace, chart) for trace in traces for chart in result.study.charts]
    wide = 2 if len(pairs) == _MAX_WIDE else min(len(result.study.charts), _MAX_WIDE)
    if len(traces) > len(result.study.charts):
        pairs, wide = [(trace, chart) for chart in result.study.charts for trace in traces], min(len(traces), _MAX_WIDE)
    return [(trace, chart, _shown(result.rows, trace, chart)) for trace, chart in pairs], wide


def _shown(rows: Rows, trace: str, chart: Chart) -> Rows:
    return [
        row
        for row in rows
        if row[chart.x] is not None
        and (not trace or row["trace"] == trace)
        and (not chart.only or row[chart.by] in chart.only)
        and all(row[key] == value for key, value in chart.where.items())
    ]


def _draw(axes: Axes, chart: Chart, rows: Rows, columns: dict[str, Column]) -> None:
    column, over = columns[chart.y], columns[chart.x]
    names = list(dict.fromkeys(row[chart.by] for row in rows))
    scale = 100.0 if column.kind == "share" else 1.0
    draw = {"line": _draw_lines, "bars": _draw_bars, "spans": _draw_spans}[chart.kind]
    draw(axes, chart, rows, names, scale)
    label = column.header + (" (%)" if column.kind == "share" else "")
    if chart.kind == "spans":
        axes.set_xlabel(label)
    else:
        axes.set_ylabel(label)
        axes.set_xlabel("" if over.kind == "text" else over.header + (" (%)" if over.kind == "share" else ""))
        axes.grid(axis="y")


def _draw_lines(axes: Axes, chart: Chart, rows: Rows, names: list[str], scale: float) -> None:
    across = 100.0 if chart.x == "share" else 1.0
    for name in names:
        own = [row for row in rows if row[chart.by] == name and row[chart.y] is not None]
        color, marker = looks(names)[name][:2]
        axes.plot([across * row[chart.x] for row in own], [scale * row[chart.y] for row in own], color=color,
                  marker=marker, label=printable(name), linewidth=1.2, markersize=4.2, clip_on=False)  # fmt: skip
    if chart.log_x:
        axes.set_xscale("log")
    ticks = sorted({across * row[chart.x] for row in rows})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    if scale == 1.0:
        axes.set_ylim(bottom=0)


def _draw_bars(axes: Axes, chart: Chart, rows: Rows, names: list[str], scale: float) -> None:  # noqa: ARG001 - as others
    places = list(dict.fromkeys(row[chart.x] for row in rows))
    for row in rows:
        own = [other for other in rows if other[chart.x] == row[chart.x]]
        width = 0.8 / len(own)
        at = places.index(row[chart.x]) + (own.index(row) - (len(own) - 1) / 2) * width
        name = row[chart.by]
        color = {"on": "#D55E00", "off": "#0072B2"}.get(name, GREY)
        label = f"{chart.by} {printable(name)}" if name != "-" else "no prefetch"
        axes.bar(at, scale * row[chart.y], 0.92 * width, color=color, label=label)
    axes.set_xticks(range(len(places)), [printable(place) for place in places], rotation=40, ha="right")
    axes.axhline(scale * rows[0][chart.y], color=INK, linewidth=0.7, linestyle=":")


def _draw_spans(axes: Axes, chart: Chart, rows: Rows, names: list[str], scale: float) -> None:
    """A bar from end to end, and a mark where the figure itself lies."""
    low, high = chart.ends or (chart.y, chart.y)
    places, style = list(dict.fromkeys(row[chart.x] for row in rows)), looks(names)
    for row in rows:
        color, marker = style[row[chart.by]][:2]
        shift = (names.index(row[chart.by]) - (len(names) - 1) / 2) * 0.28
        at = places.index(row[chart.x]) + shift
        axes.plot([scale * row[low], scale * row[high]], [at, at], color=color, linewidth=4, alpha=0.45,
                  solid_capstyle="round")  # fmt: skip
        axes.plot([scale * row[chart.y]], [at], color=color, marker=marker, markersize=5, linestyle="",
                  label=printable(row[chart.by]), clip_on=False)  # fmt: skip
    axes.set_yticks(range(len(places)), [printable(place) for place in places])
    axes.set_ylim(len(places) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.grid(axis="x")


def _name_lines(figure: Figure, panels: Sequence[Axes]) -> None:
    """One legend for panels that name the same, else one in each."""
    found = [dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True)) for axes in panels]
    every: dict[str, Any] = {}
    for names in found:
        every.update({name: handle for name, handle in names.items() if name not in every})
    if all(set(names) == set(every) for names in found):
        figure.legend(every.values(), every.keys(), loc="outside right center")
        return
    for axes, names in zip(panels, found, strict=True):
        axes.legend(names.values(), names.keys(), fontsize=7)

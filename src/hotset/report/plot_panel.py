"""Drawing one panel: the lines, the axes, and the marks of the token cycle."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.report.plot_style import GREY, PALE, label_of
from hotset.report.words import BOUND
from hotset.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hotset.report.plot_lines import Line, Panel
    from hotset.report.plot_style import Look

_LONGEST_NAME = 32


def draw_panel(axes: Axes, panel: Panel, looks: dict[str, Look], title_pad: float) -> None:
    """Draw everything of a panel but the names of its lines."""
    axes.set_title(_short(printable(panel.trace)), y=1.0, pad=title_pad)  # titles of a row stand level
    axes.set_xlim(0, panel.reach * 1.02)
    axes.set_xlabel("experts resident (%)")
    axes.grid(axis="y")
    if panel.gib:
        _add_gib(axes, panel.gib)
    for line in reversed(panel.lines):  # the best on top
        _draw_line(axes, line, looks[line.policy], line.policy == panel.best)
    _mark_cycle(axes, panel, 1, "token cycle", GREY)
    _mark_cycle(axes, panel, 2, "2 cycles", "#b5b5b5")


def _short(name: str) -> str:
    """The name with its middle left out where it would run into the next panel."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME // 2]}...{name[-_LONGEST_NAME // 2 + 3 :]}"


def _draw_line(axes: Axes, line: Line, look: Look, best: bool) -> None:
    """The path is cut at the frame and the markers are not; an empty plot of both stands in a legend."""
    path: dict[str, Any] = {"linewidth": 1.9 if best or line.policy == BOUND else 1.1, "linestyle": look.dash}
    mark: dict[str, Any] = {
        "marker": look.marker, "markersize": 5.2 if best else 4.4, "markeredgecolor": "white", "markeredgewidth": 0.5,
    }  # fmt: skip
    axes.plot(line.x, line.y, color=look.color, solid_capstyle="round", **path)
    axes.plot(*line.points, color=look.color, **mark, linestyle="", clip_on=False)
    axes.plot([], [], color=look.color, **path, **mark, label=label_of(line.policy))


def _add_gib(axes: Axes, gib: float) -> None:
    top = axes.secondary_xaxis("top", functions=(partial(np.multiply, gib / 100), partial(np.multiply, 100 / gib)))
    top.set_xlabel("GiB of experts", fontsize=7.5, color=GREY, labelpad=3)
    top.tick_params(length=2.5, width=0.6, labelsize=7.5, colors=GREY)
    top.spines["top"].set(visible=True, color=PALE, linewidth=0.6)


def _mark_cycle(axes: Axes, panel: Panel, cycles: int, text: str, color: str) -> None:
    at = cycles * panel.cycle
    if at > panel.reach:
        return
    axes.axvline(at, color=color, linewidth=0.7, linestyle=(0, (4, 3)), zorder=0.5)
    above = _room_above(axes, panel, at)
    axes.annotate(
        text, (at, 1 if above else 0), (-2, -3 if above else 4), xycoords=axes.get_xaxis_transform(),
        textcoords="offset points", rotation=90, ha="right", va="top" if above else "bottom", fontsize=6.5, color=GREY,
    )  # fmt: skip


def _room_above(axes: Axes, panel: Panel, at: float) -> bool:
    """Whether the lines leave more room over them than under them at this size."""
    low, high = axes.get_ylim()
    heights = [float(np.interp(at, line.x, line.y)) for line in panel.lines if line.x[0] <= at]
    return not heights or high - max(heights) > min(heights) - low

"""Tokens per second against memory as a figure, a line for each precision."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hotset.errors import HotsetError
from hotset.report.plot_file import drawing, save_figure
from hotset.report.plot_style import GREY, looks
from hotset.text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 6.4, 4.0
_LETTERS = 118  # of a caption's line

Line = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]


def plot_plan(
    lines: Mapping[str, Line], path: str | Path, *, title: str, memory: str, caption: str, now_gib: float
) -> None:
    """Draw the speed of each precision, given as GiB and tokens per second, and what is there now."""
    kept = {name: line for name, line in lines.items() if np.isfinite(line[1]).any()}
    if not kept:
        raise HotsetError("there is nothing to plot: no precision fits")
    with drawing():
        save_figure(_figure(kept, title, memory, caption, now_gib), Path(path))


def _figure(lines: Mapping[str, Line], title: str, memory: str, caption: str, now_gib: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    axes, style = figure.subplots(), looks(lines)
    for name, (gib, speed) in lines.items():
        axes.plot(gib, speed, color=style[name].color, linewidth=1.6, label=name)
    axes.axvline(now_gib, color=GREY, linewidth=0.7, linestyle=(0, (4, 3)), zorder=0.5)
    axes.annotate(
        "given", (now_gib, 1), (-3, -3), xycoords=axes.get_xaxis_transform(), textcoords="offset points", rotation=90,
        ha="right", va="top", fontsize=6.5, color=GREY,
    )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_title(printable(title))
    axes.set_xlabel(f"GiB of {memory}")
    axes.set_ylabel("tokens per second, expected")
    axes.grid(axis="y")
    axes.legend(loc="best")
    figure.supxlabel(fill(printable(caption), _LETTERS), x=0.01, ha="left", fontsize=7, color=GREY)
    return figure

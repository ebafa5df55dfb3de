"""Names at the ends of lines, moved apart so that none covers another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hotset.report.words import BOUND
from hotset.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hotset.report.plot_lines import Line, Panel
    from hotset.report.plot_style import Look

LABEL_SIZE = 8.0
_PITCH = 1.3 * LABEL_SIZE
_MAX_MOVED, _MAX_MOVED_OF_MANY = 6, 2  # in pitches: a panel alone has room for longer hairlines
_POINTS = 72


def label_of(policy: str) -> str:
    """A policy's name in a plot."""
    return f"{BOUND} (bound)" if policy == BOUND else printable(policy)


def spread(places: list[float], pitch: float, high: float) -> list[float]:
    """Move places, given in falling order, as little as needed to be a pitch apart and none above `high`."""
    blocks: list[list[float]] = []  # of members that touch: their wishes, as if each were alone at the block's top
    for index, place in enumerate(places):
        blocks.append([place + index * pitch])
        while len(blocks) > 1 and np.mean(blocks[-1]) > np.mean(blocks[-2]):
            last = blocks.pop()
            blocks[-1] += last
    tops = [min(float(np.mean(block)), high) for block in blocks for _ in block]
    return [top - index * pitch for index, top in enumerate(tops)]


def fits(figure: Figure, axes: Axes, panel: Panel, alone: bool) -> bool:
    """Whether names can stand by the ends of their lines without being moved far."""
    ends, places = _places(figure, axes, panel)
    most = (_MAX_MOVED if alone else _MAX_MOVED_OF_MANY) * _PITCH
    return all(abs(end - place) <= most for end, place in zip(ends, places, strict=True))


def label_ends(figure: Figure, axes: Axes, panel: Panel, looks: dict[str, Look]) -> None:
    """Write each name right of its line's end, with a hairline to it."""
    ends, places = _places(figure, axes, panel)
    for line, end, place in zip(_falling(panel), ends, places, strict=True):
        axes.annotate(
            label_of(line.policy), (line.x[-1], line.y[-1]), (20, place - end), textcoords="offset points",
            color=looks[line.policy].color, fontsize=LABEL_SIZE, va="center", annotation_clip=False,
            fontweight="bold" if line.policy in (BOUND, panel.best) else "normal",
            arrowprops={"arrowstyle": "-", "color": looks[line.policy].color, "linewidth": 0.5, "alpha": 0.7,
                        "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 5},
        )  # fmt: skip


def _falling(panel: Panel) -> list[Line]:
    return sorted(panel.lines, key=lambda line: -line.y[-1])


def _places(figure: Figure, axes: Axes, panel: Panel) -> tuple[list[float], list[float]]:
    """Where the lines end and where their names go, in points from the foot of the panel."""
    low, high = axes.get_ylim()
    height = axes.get_position().height * figure.get_figheight() * _POINTS
    ends = [float((line.y[-1] - low) / (high - low) * height) for line in _falling(panel)]
    return ends, spread(ends, _PITCH, height)

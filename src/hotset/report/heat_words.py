"""What the figure of all experts says in words, and which counts it is about."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hotset.report.plot_style import GREY
from hotset.report.words import plural
from hotset.text import printable
from hotset.trace import Phase

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hotset.profile.statistics import Grid, Statistics

UNDER = -0.14
"""Where legends begin under a panel of layers, in heights of it."""
_BLANK = "#f5f5f5"
_POINTS = 72


def phase_of(statistics: Statistics) -> Phase:
    """The phase whose use is drawn: decode, unless only prompts were read."""
    prefill, decode = (bool(statistics.uses[phase].any()) for phase in Phase)
    return Phase.PREFILL if prefill and not decode else Phase.DECODE


def shares(statistics: Statistics) -> Grid:
    """Each expert's share of its layer's uses in the drawn phase; not a number in layers without any."""
    uses = statistics.uses[phase_of(statistics)]
    total = uses.sum(axis=1, keepdims=True)
    found: Grid = np.divide(uses, total, out=np.full_like(uses, np.nan), where=total > 0)
    return found


def knows_residency(statistics: Statistics) -> bool:
    """Whether it is known which experts are resident: a profile of a trace does not know."""
    return bool(statistics.resident.any() or statistics.pinned.any())


def caption(statistics: Statistics) -> str:
    """The model, how much was counted, and what is not known."""
    shape, tokens = statistics.shape, statistics.tokens
    model = f"{plural(shape.layers, 'MoE layer')} of {plural(shape.experts, 'expert')}, {shape.top_k} per token"
    counted = f"{int(tokens[Phase.DECODE]):,} decode and {plural(int(tokens[Phase.PREFILL]), 'prefill token')}"
    memory = "" if knows_residency(statistics) else " Which experts are in memory is not known."
    idle = int(np.isnan(shares(statistics)).any(axis=1).sum())
    grey = f" Grey: {plural(idle, 'layer')} without use." if 0 < idle < shape.layers else ""
    return f"{model}; {counted}.{grey}{memory}"


def short(text: str, most: int) -> str:
    """A text from a file, safe to draw, its end left out where it is too long."""
    safe = printable(text)
    return safe if len(safe) <= most else f"{safe[: most - 3].rstrip()}..."


def write_note(axes: Axes, text: str) -> None:
    """Write what is missing where it would have been drawn."""
    from matplotlib.patches import Rectangle

    axes.set_axis_off()
    axes.add_patch(Rectangle((0, 0), 1, 1, transform=axes.transAxes, facecolor=_BLANK))
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY, fontsize=9)


def size_of(axes: Axes) -> tuple[float, float]:
    """Width and height of a panel in points, once it has its place."""
    scale = _POINTS / axes.figure.dpi
    return axes.bbox.width * scale, axes.bbox.height * scale

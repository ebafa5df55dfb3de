"""Hit rate over time, with the moments at which the workload changed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.profile.statistics import History
from hotset.report.heat_layers import DECODE
from hotset.report.heat_words import short, size_of, write_note
from hotset.report.plot_style import GREY, INK, PALE
from hotset.report.words import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_STEPS = 160
_MIN_RANGE = 20  # points of percent from the foot of the axis to its top
_LONGEST_LABEL = 16
_LETTER = 3.9  # points, of a label's width
_SLANT = 40  # degrees
_PITCH = 12.0  # points between labels that stand aslant


def draw_history(axes: Axes, history: History) -> None:
    """Draw the hit rate of each span of decode tokens; many spans also as the mean of neighbours."""
    from matplotlib.ticker import MaxNLocator

    axes.set_title("Hit rate over time")
    if not np.isfinite(history.hit_rate).any() or not history.spans[:, 0].any():
        write_note(axes, "no hits over time were kept")
        return
    coarse = _gathered(history)
    if len(coarse.spans) < len(history.spans):
        _steps(axes, history, color="#b9d3e6", linewidth=0.6)
        axes.set_title(f"Hit rate over time (pale: each of {len(history.spans):,} spans)")
    _steps(axes, coarse, color=DECODE, linewidth=1.5, clip_on=False)
    axes.set(xlim=(0, _end(history)), ylim=_limits(coarse), xlabel="decode tokens", ylabel="hit rate (%)")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y")


def label_marks(axes: Axes, history: History) -> None:
    """Draw the marks, named aslant above the frame but for those too close to the one before."""
    marks = sorted(mark for mark in history.marks if 0 <= mark.tokens <= _end(history)) if axes.axison else []
    if not marks:
        return
    width, _ = size_of(axes)
    named, longest, last = 0, 0, -math.inf
    for mark in marks:
        place = mark.tokens / _end(history) * width
        is_named = place - last >= _PITCH
        axes.axvline(mark.tokens, color=GREY if is_named else PALE, linewidth=0.7, linestyle=(0, (4, 3)), zorder=0.5)
        if is_named:
            name = short(mark.label, _LONGEST_LABEL)
            named, longest, last = named + 1, max(longest, len(name)), place
            axes.annotate(
                name, (mark.tokens, 1), (0, 3), xycoords=axes.get_xaxis_transform(), textcoords="offset points",
                rotation=_SLANT, rotation_mode="anchor", ha="left", va="bottom", fontsize=7.0, color=INK,
                annotation_clip=False,
            )  # fmt: skip
    axes.set_title(axes.get_title("left"), pad=16 + longest * _LETTER * math.sin(math.radians(_SLANT)))
    if hidden := len(marks) - named:
        axes.set_xlabel(f"decode tokens ({plural(hidden, 'mark')} too close to the next to be named)")


def _end(history: History) -> float:
    return float(history.spans[:, 0].sum(dtype=float))


def _gathered(history: History) -> History:
    """Neighbouring spans taken together, so that no more are left than can be told apart."""
    if len(history.spans) <= _MAX_STEPS:
        return history
    ends = np.cumsum(history.spans[:, 0], dtype=float)
    step = np.ceil(ends / ends[-1] * _MAX_STEPS)
    starts = np.flatnonzero(np.diff(step, prepend=-1.0))
    return History(np.add.reduceat(history.spans, starts))


def _steps(axes: Axes, history: History, **look: Any) -> None:
    edges = np.append(0.0, np.cumsum(history.spans[:, 0], dtype=float))
    axes.stairs(100 * history.hit_rate, edges, baseline=None, **look)


def _limits(history: History) -> tuple[float, float]:
    """Round numbers below and above the line, not so close that noise looks like news."""
    rates = 100 * history.hit_rate
    low = max(0, 10 * math.floor((float(np.nanmin(rates)) - 2) / 10))
    high = min(100, max(10 * math.ceil((float(np.nanmax(rates)) + 2) / 10), low + _MIN_RANGE))
    return min(low, high - _MIN_RANGE), high

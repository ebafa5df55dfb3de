"""Hit rate over time, with the moments at which the workload changed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.profile.statistics import History, Mark
from hotset.report.heat_layers import DECODE
from hotset.report.heat_words import say, short, size_of
from hotset.report.plot_style import GREY, INK, PALE
from hotset.report.words import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_STEPS = 160
_LONGEST_LABEL, _LONGEST_SLANTED = 28, 16
_MIN_LETTERS = 12  # of a label that is cut to stay level
_LETTER = 3.9  # points, of a label's width
_LABEL_SIZE = 7.0
_MIN_RANGE = 20  # points of percent from the foot of the axis to its top
_SLANT = 40
_SLANTED_PITCH = 12.0  # points between labels that stand aslant


def draw_history(axes: Axes, history: History) -> None:
    """Draw the hit rate of each span of decode tokens; many spans also as the mean of neighbours."""
    from matplotlib.ticker import MaxNLocator

    axes.set_title("Hit rate over time")
    if not np.isfinite(history.hit_rate).any() or not history.spans[:, 0].any():
        say(axes, "no hits over time were kept")
        return
    coarse = _gathered(history)
    if len(coarse.spans) < len(history.spans):
        _steps(axes, history, color="#b9d3e6", linewidth=0.6)
        axes.set_title(f"Hit rate over time (pale: each of {len(history.spans):,} spans)")
    _steps(axes, coarse, color=DECODE, linewidth=1.5, clip_on=False)
    axes.set(xlim=(0, _end(history)), ylim=_limits(coarse), xlabel="decode tokens", ylabel="hit rate (%)")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=3, width=0.7)


def label_marks(axes: Axes, history: History) -> None:
    """Draw the marks, named above the frame: level where names fit, else aslant, and those too close not at all."""
    marks = _inside(history) if axes.axison else []
    if not marks:
        return
    width, _ = size_of(axes)
    places = [mark.tokens / _end(history) * width for mark in marks]
    names, slant = _level(marks, [*places, width]), 0
    if names is None:
        named = _apart(places)
        names, slant = {index: short(marks[index].label, _LONGEST_SLANTED) for index in named}, _SLANT
    for index, mark in enumerate(marks):
        if index in names:
            _name(axes, mark.tokens, names[index], slant)
    _draw_marks(axes, marks, names)
    axes.set_title(axes.get_title("left"), pad=16 + max(map(len, names.values())) * _LETTER * _rise(slant))
    if hidden := len(marks) - len(names):
        axes.set_xlabel(f"decode tokens ({plural(hidden, 'mark')} too close to the next to be named)")


def _draw_marks(axes: Axes, marks: list[Mark], names: dict[int, str]) -> None:
    colors = [GREY if index in names else PALE for index in range(len(marks))]
    axes.vlines(
        [mark.tokens for mark in marks], 0, 1, colors, transform=axes.get_xaxis_transform(),
        linewidth=0.7, linestyle=(0, (4, 3)), zorder=0.5,
    )  # fmt: skip


def _name(axes: Axes, tokens: int, name: str, slant: int) -> None:
    axes.annotate(
        name, (tokens, 1), (0, 3), xycoords=axes.get_xaxis_transform(), textcoords="offset points", rotation=slant,
        rotation_mode="anchor", ha="left", va="bottom", fontsize=_LABEL_SIZE, color=INK, annotation_clip=False,
    )  # fmt: skip


def _rise(slant: int) -> float:
    return math.sin(math.radians(slant))


def _level(marks: list[Mark], places: list[float]) -> dict[int, str] | None:
    """The names, cut to the room before the next mark; None where too little of one would be left."""
    names = {}
    for index, (mark, gap) in enumerate(zip(marks, np.diff(places), strict=True)):
        letters = min(int((gap - 4) / _LETTER), _LONGEST_LABEL)
        if letters < min(len(mark.label), _MIN_LETTERS):
            return None
        names[index] = short(mark.label, max(letters, 1))
    return names


def _apart(places: list[float]) -> list[int]:
    """Which of these, in rising order, are far enough from the one before to be named."""
    kept = [0]
    for index, place in enumerate(places):
        if place - places[kept[-1]] >= _SLANTED_PITCH:
            kept.append(index)
    return kept


def _inside(history: History) -> list[Mark]:
    return sorted(mark for mark in history.marks if 0 <= mark.tokens <= _end(history))


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

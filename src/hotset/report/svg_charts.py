"""Figures made of lines, bars and steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.report.svg import Figure, Svg, number, shortened, ticks
from hotset.report.svg_style import SERIES

WIDTH = 940.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 34.0, 36.0, 46.0
_NAME_HEIGHT, _LETTER = 13.0, 5.6  # of small words


class Line(NamedTuple):
    """One line of a chart; `color` is the number of a colour, a dashed one says what chance would give."""

    name: str
    values: npt.NDArray[Any]
    color: int = 0
    dashed: bool = False
    band: tuple[npt.NDArray[Any], npt.NDArray[Any]] | None = None


class Horizon(NamedTuple):
    """A value to compare with, drawn from side to side."""

    name: str
    value: float


Write = Callable[[float], str]
At = Callable[[float, float], tuple[float, float]]
Points = Sequence[tuple[float, float]]


def draw_lines(
    name: str,
    title: str,
    x_names: Sequence[str],
    lines: Sequence[Line],
    *,
    x_title: str,
    write: Write,
    horizons: Sequence[Horizon] = (),
    low: float | None = None,
    high: float | None = None,
    height: float = 300.0,
) -> Figure:
    """Lines over places at even distances; values that are not numbers are left out."""
    bottom, top = _ends(lines, horizons, low, high)
    svg = Svg(WIDTH, height, title)
    across = (WIDTH - _LEFT - _RIGHT) / max(len(x_names) - 1, 1)

    def at(place: float, value: float) -> tuple[float, float]:
        share = (value - bottom) / (top - bottom)
        return _LEFT + place * across, height - _BOTTOM - share * (height - _TOP - _BOTTOM)

    _frame(svg, x_names, x_title, [(value, at(0, value)[1]) for value in ticks(bottom, top)], write, across, height)
    heights = sorted([(at(0, each.value)[1], each) for each in horizons])
    for y, _ in heights:
        svg.line(_LEFT, y, WIDTH - _RIGHT, y, "dash")
    for line in lines:
        _draw_line(svg, line, at, x_names, write)
    _name_horizons(svg, heights, write, [_points(line, at) for line in lines])
    if len(lines) > 1:
        _name_lines(svg, lines)
    return Figure(name, title, svg.render())


def _name_horizons(svg: Svg, heights: Sequence[tuple[float, Horizon]], write: Write, drawn: Sequence[Points]) -> None:
    """Names above the dashed lines, or below where another name or line is in the way, over all else."""
    taken = -100.0
    for y, each in heights:
        words = f"{each.name}: {write(each.value)}"
        above, below = y - 4, y + 13
        if above < taken + _NAME_HEIGHT or (_crossed(drawn, above, words) and not _crossed(drawn, below, words)):
            taken = below
        else:
            taken = above
        svg.text(WIDTH - _RIGHT, taken, words, "small over", "end")


def _crossed(drawn: Sequence[Points], foot: float, words: str) -> bool:
    """Whether a line runs through words that end at the right side and stand on this height."""
    x = np.linspace(WIDTH - _RIGHT - _LETTER * len(words), WIDTH - _RIGHT, 16)
    for points in drawn:
        if points:
            across, down = np.array(points).T
            y = np.interp(x, across, down, left=np.inf, right=np.inf)
            if ((y > foot - _NAME_HEIGHT + 3) & (y < foot + 3)).any():
                return True
    return False


def _ends(
    lines: Sequence[Line], horizons: Sequence[Horizon], low: float | None, high: float | None
) -> tuple[float, float]:
    values = [line.values for line in lines] + [side for line in lines for side in line.band or ()]
    known = np.concatenate([*(np.asarray(each, float).ravel() for each in values), [h.value for h in horizons]])
    known = known[np.isfinite(known)]
    least = low if low is not None else float(known.min(initial=0.0))
    most = high if high is not None else float(known.max(initial=0.0)) * 1.06
    return least, most if most > least else least + 1


def _frame(
    svg: Svg, x_names: Sequence[str], x_title: str, marks: list[tuple[float, float]], write: Write, across: float,
    height: float,
) -> None:  # fmt: skip
    for value, y in marks:
        svg.line(_LEFT, y, WIDTH - _RIGHT, y)
        svg.text(_LEFT - 6, y + 4, write(value), "small", "end")
    step = max(1, int(-(-max(34, 7 * max(map(len, x_names), default=1)) // max(across, 1e-9))))
    for place in range(0, len(x_names), step):
        svg.text(_LEFT + place * across, height - _BOTTOM + 15, x_names[place], "small", "middle")
    svg.text((_LEFT + WIDTH - _RIGHT) / 2, height - 10, x_title, "soft", "middle")


def _points(line: Line, at: At) -> Points:
    """Where the values of a line are drawn."""
    return [at(place, value) for place, value in enumerate(line.values) if np.isfinite(value)]


def _draw_line(svg: Svg, line: Line, at: At, x_names: Sequence[str], write: Write) -> None:
    places = [i for i, value in enumerate(line.values) if np.isfinite(value)]
    if line.band is not None:
        low, high = line.band
        corners = [at(i, high[i]) for i in places] + [at(i, low[i]) for i in reversed(places)]
        svg.add("path", d=_path(corners) + "z", class_=f"b{line.color % SERIES}")
    dashed = " far" if line.dashed else ""
    svg.add("path", d=_path([at(i, line.values[i]) for i in places]), class_=f"l{line.color % SERIES}{dashed}")
    if len(places) <= 200:
        for i in places:
            x, y = at(i, line.values[i])
            words = f"{line.name}, {x_names[i]}: {write(float(line.values[i]))}"
            svg.add("circle", words, cx=x, cy=y, r=2.6, class_=f"s{line.color % SERIES}")


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points) if points else "M0 0"


def _name_lines(svg: Svg, lines: Sequence[Line]) -> None:
    x = _LEFT
    for line in lines:
        svg.add("path", d=f"M{number(x)} 14h18", class_=f"l{line.color % SERIES}{' far' if line.dashed else ''}")
        svg.text(x + 24, 18, line.name, "soft")
        x += 46 + 6.5 * len(line.name)


class Bar(NamedTuple):
    """One bar: its name, its value, a colour and what it says when pointed at."""

    name: str
    value: float
    color: int
    title: str


def draw_bars(name: str, title: str, groups: Sequence[tuple[str, Sequence[Bar]]], write: Write) -> Figure:
    """Horizontal bars in groups, from 0 to the largest."""
    count = sum(len(bars) for _, bars in groups)
    left = 20 + min(6.8 * max((len(bar.name) for _, bars in groups for bar in bars), default=1), 220)
    svg = Svg(WIDTH, 16 + 24.0 * count + 30 * len(groups), title)
    most = max((bar.value for _, bars in groups for bar in bars), default=1.0) or 1.0
    y = 8.0
    for head, bars in groups:
        svg.text(left, y + 14, head, "strong")
        y += 24
        for bar in bars:
            length = max(0.0, bar.value) / most * (WIDTH - left - 80)
            svg.text(left - 8, y + 13, bar.name, "t", "end")
            svg.add("rect", bar.title, x=left, y=y, width=length, height=17, rx=2, class_=f"s{bar.color % SERIES}")
            svg.text(left + length + 6, y + 13, write(bar.value), "soft")
            y += 24
        y += 6
    return Figure(name, title, svg.render())


def draw_histograms(
    name: str, title: str, names: Sequence[str], values: npt.NDArray[Any], *, even: float, column_title: str
) -> Figure:
    """A histogram per row over the same columns, each with a line at what even use would give."""
    rows, columns = values.shape
    left = 20 + min(6.6 * max(map(len, names), default=0), 190)
    tall, across = 34.0, (WIDTH - left - _RIGHT) / columns
    most = max(float(np.nanmax(values, initial=0.0)), even)
    svg = Svg(WIDTH, 10 + rows * tall + 34, title)
    for row in range(rows):
        foot = 10 + (row + 1) * tall
        tops = foot - np.nan_to_num(values[row]) / most * (tall - 5)
        path = "".join(f"V{number(top)}h{number(across)}" for top in tops)
        svg.add("path", names[row], d=f"M{number(left)} {number(foot)}{path}V{number(foot)}z", class_="s0")
        svg.line(left, foot - even / most * (tall - 5), WIDTH - _RIGHT, foot - even / most * (tall - 5), "dash")
        svg.line(left, foot, WIDTH - _RIGHT, foot, "axis")
        svg.text(left - 6, foot - 8, shortened(names[row]), "small", "end")
    for column in range(0, columns, max(1, columns // 16)):
        svg.text(left + (column + 0.5) * across, 10 + rows * tall + 13, str(column), "small", "middle")
    svg.text(left + columns * across / 2, 10 + rows * tall + 29, column_title, "soft", "middle")
    return Figure(name, title, svg.render())

"""Figures made of cells: a colour for each row and column, with a legend and numbered axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.report.svg import Figure, Svg, every, number, shortened
from hotset.report.svg_style import LEVELS, SIDES

WIDTH = 940.0
MAX_TITLED_CELLS = 2048
"""Larger grids have a note for each row instead of one for each cell, unless they ask for more."""
NOTHING = -1
_TOP, _BOTTOM = 34.0, 34.0

Codes = npt.NDArray[np.int64]
CellTitle = Callable[[int, int], str]
RowTitle = Callable[[int], str]


class Scale(NamedTuple):
    """Which class a value has: as many bounds as classes, less one; the legend names every class."""

    bounds: tuple[float, ...]
    classes: tuple[str, ...]
    legend: tuple[str, ...]

    def codes(self, values: npt.NDArray[Any]) -> Codes:
        """The class of each value, or NOTHING where it is not a number."""
        found = np.searchsorted(np.array(self.bounds), np.nan_to_num(values), side="right")
        return np.where(np.isfinite(values), found, NOTHING)


def rising(bounds: Sequence[float], legend: Sequence[str]) -> Scale:
    """A scale from low to high over so many bounds."""
    count = len(bounds) + 1
    classes = tuple(f"q{round(i * (LEVELS - 1) / max(count - 1, 1))}" for i in range(count))
    return Scale(tuple(bounds), classes, tuple(legend))


def around(bounds: Sequence[float], legend: Sequence[str]) -> Scale:
    """A scale with a middle; an even number of bounds."""
    count = len(bounds) + 1
    classes = tuple(f"d{round(i * 2 * SIDES / (count - 1))}" for i in range(count))
    return Scale(tuple(bounds), classes, tuple(legend))


class Axes(NamedTuple):
    """What rows and columns are; names of rows stand beside them, else they are numbered."""

    rows: str
    columns: str
    row_names: Sequence[str] | None = None
    column_names: Sequence[str] | None = None
    first_column: int = 0


def draw_grid(
    name: str,
    title: str,
    codes: Codes,
    classes: Sequence[str],
    legend: Sequence[str],
    axes: Axes,
    *,
    cell_title: CellTitle | None = None,
    row_title: RowTitle | None = None,
    cell_height: float | None = None,
    max_cell: float = 26.0,
    max_titled: int = MAX_TITLED_CELLS,
) -> Figure:
    """A grid of cells, row 0 on top."""
    rows, columns = codes.shape
    left = 54.0 if axes.row_names is None else 20 + min(6.6 * max(map(len, axes.row_names), default=0), 190)
    below = _BOTTOM if axes.column_names is None else 16 + min(5.4 * max(map(len, axes.column_names), default=0), 150)
    width = min((WIDTH - left - 10) / columns, max_cell)
    height = cell_height or float(np.clip(420 / rows, 5, 20))
    svg = Svg(WIDTH, _TOP + rows * height + below, title)
    draw_legend(svg, left, classes, legend)
    titled = cell_title if rows * columns <= max_titled else None
    paint(svg, codes, classes, left, _TOP, width, height, titled)
    if titled is None and row_title is not None:
        for row in range(rows):
            box = {"x": left, "y": _TOP + row * height, "width": columns * width, "height": height}
            svg.add("rect", row_title(row), fill="transparent", **box)
    _number_axes(svg, axes, rows, columns, left, width, height)
    return Figure(name, title, svg.render())


def draw_legend(svg: Svg, x: float, classes: Sequence[str], legend: Sequence[str], y: float = 8) -> None:
    """A box and a word for each class."""
    for kind, words in zip(classes, legend, strict=True):
        svg.add("rect", x=x, y=y, width=12, height=12, class_=kind)
        svg.text(x + 16, y + 10, words, "soft")
        x += 30 + 7 * len(words)


def paint(
    svg: Svg, codes: Codes, classes: Sequence[str], left: float, top: float, width: float, height: float,
    title: CellTitle | None,
) -> None:  # fmt: skip
    """Fill the cells: one by one where each has a title, else all cells of a class at once."""
    if title is not None:
        gap = 0.5 if min(width, height) > 6 else 0.0
        for row, column in np.argwhere(codes != NOTHING).tolist():
            svg.add(
                "rect", title(row, column), x=left + column * width, y=top + row * height, width=width - gap,
                height=height - gap, class_=classes[codes[row, column]],
            )  # fmt: skip
        return
    for code, kind in enumerate(classes):
        path = "".join(
            f"M{number(left + first * width)} {number(top + row * height)}h{number((last - first) * width)}"
            f"v{number(height)}h{number((first - last) * width)}z"
            for row, first, last in _runs(codes == code)
        )
        if path:
            svg.add("path", d=path, class_=kind)


def _runs(chosen: npt.NDArray[np.bool_]) -> list[tuple[int, int, int]]:
    """Neighbouring cells of one row as one: row, first column, column after the last."""
    edges = np.diff(np.pad(chosen, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    begin, end = np.argwhere(edges == 1), np.argwhere(edges == -1)
    return [(int(b[0]), int(b[1]), int(e[1])) for b, e in zip(begin, end, strict=True)]


def _number_axes(
    svg: Svg, axes: Axes, rows: int, columns: int, left: float, width: float, height: float
) -> None:  # fmt: skip
    foot = _TOP + rows * height
    for row in (
        range(rows) if axes.row_names is not None else range(0, rows, every(rows, int(rows * height // 14) or 1))
    ):
        words = str(row) if axes.row_names is None else shortened(axes.row_names[row])
        svg.text(left - 6, _TOP + (row + 0.5) * height + 4, words, "small", "end")
    if axes.row_names is None:
        svg.text(14, _TOP + rows * height / 2, axes.rows, "soft", "middle", -90)
    if axes.column_names is not None:
        for column, words in enumerate(axes.column_names):
            x = left + (column + 0.5) * width + 4
            svg.text(x, foot + 10, shortened(words), "small", "end", -60 if width < 60 else -30)
        return
    for column in range(0, columns, every(columns, int(columns * width // 34) or 1)):
        svg.text(left + (column + 0.5) * width, foot + 13, str(axes.first_column + column), "small", "middle")
    svg.text(left + columns * width / 2, foot + 29, axes.columns, "soft", "middle")

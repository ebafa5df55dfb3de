"""The writer of SVG: what is drawn stands where it should, and words are only words."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from hotset.report.svg import Figure, Svg, every, number, shortened, ticks
from hotset.report.svg_charts import Bar, Horizon, Line, draw_bars, draw_histograms, draw_lines
from hotset.report.svg_grids import NOTHING, Axes, Scale, around, draw_grid, rising
from hotset.report.svg_style import STYLE

NAMESPACE = "{http://www.w3.org/2000/svg}"


def parsed(figure: Figure) -> ElementTree.Element:
    return ElementTree.fromstring(figure.standalone())  # noqa: S314 - our own


def test_ticks_are_round() -> None:
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(0, 64) == [0, 20, 40, 60]
    assert ticks(-0.02, 0.05, 4) == [-0.02, 0, 0.02, 0.04]
    assert ticks(3, 3) == [3]


def test_numbers_are_short() -> None:
    assert [number(value) for value in (0, 1.0, 2.5, 1 / 3, 100, -0.5)] == ["0", "1", "2.5", "0.33", "100", "-0.5"]
    assert [every(count, 10) for count in (5, 11, 64, 512)] == [1, 2, 8, 64]
    assert shortened("x" * 40) == "x" * 29 + "\u2026"


def test_words_are_no_markup() -> None:
    svg = Svg(10, 10, "<&>")
    svg.text(1, 1, "<b>\n&")
    svg.add("rect", '"<i>"', x=1)
    root = parsed(Figure("f", "t", svg.render()))
    assert root.get("aria-label") == "<&>"
    assert root.findtext(f"{NAMESPACE}text") == "<b> &"
    assert root.findtext(f"{NAMESPACE}rect/{NAMESPACE}title") == '"<i>"'


def test_every_class_has_a_colour_in_light_and_dark() -> None:
    named = set(re.findall(r"var\(--(\w+)\)", STYLE))
    light, dark = (set(re.findall(r"--(\w+):#", part)) for part in STYLE.split("@media")[:2])
    assert named <= light
    assert light == dark


def test_scales() -> None:
    scale = rising((1, 2), ("a", "b", "c"))
    assert scale.classes == ("q0", "q4", "q9")
    assert scale.codes(np.array([0.5, 1, 1.5, 2, np.nan])).tolist() == [0, 1, 1, 2, NOTHING]
    assert around((1, 2), ("a", "b", "c")).classes == ("d0", "d4", "d8")


@pytest.mark.parametrize("titled", [True, False])
def test_cells_cover_what_they_stand_for(titled: bool) -> None:
    codes = np.array([[0, 0, 1], [NOTHING, 1, 1]])
    scale = Scale((1.0,), ("q0", "q9"), ("low", "high"))
    figure = draw_grid(
        "g", "Grid", codes, scale.classes, scale.legend, Axes("row", "column"),
        cell_title=lambda row, column: f"{row},{column}", max_titled=100 if titled else 0, max_cell=10,
    )  # fmt: skip
    root = parsed(figure)
    if titled:
        cells = {(r.get("class"), r.findtext(f"{NAMESPACE}title")) for r in root.iter(f"{NAMESPACE}rect")}
        assert cells - {("q0", None), ("q9", None)} == {
            ("q0", "0,0"), ("q0", "0,1"), ("q9", "0,2"), ("q9", "1,1"), ("q9", "1,2")
        }  # fmt: skip
        return
    paths = {path.get("class"): path.get("d") for path in root.iter(f"{NAMESPACE}path")}
    assert paths == {"q0": "M54 34h20v20h-20z", "q9": "M74 34h10v20h-10zM64 54h20v20h-20z"}


def test_lines_leave_gaps_and_say_their_values() -> None:
    lines = [Line("one", np.array([0.0, np.nan, 1.0]), 0), Line("two", np.array([0.5, 0.5, 0.5]), 1, dashed=True)]
    root = parsed(
        draw_lines(
            "l", "Lines", ["a", "b", "c"], lines, x_title="x", write=lambda v: f"{v:.1f}",
            horizons=[Horizon("even", 0.25)], low=0, high=1,
        )
    )  # fmt: skip
    titles = [title.text for title in root.iter(f"{NAMESPACE}title")]
    assert titles == ["one, a: 0.0", "one, c: 1.0", "two, a: 0.5", "two, b: 0.5", "two, c: 0.5"]
    words = [text.text for text in root.iter(f"{NAMESPACE}text")]
    assert "even: 0.2" in words
    top, bottom = (float(c.get("cy", "")) for c in list(root.iter(f"{NAMESPACE}circle"))[1::-1])
    assert (top, bottom) == (36.0, 254.0)


def test_names_of_dashed_lines_keep_clear_of_drawn_ones() -> None:
    def foot(line: float) -> float:
        lines = [Line("one", np.full(3, line), 0)]
        dashed = [Horizon("even", 0.5)]
        figure = draw_lines("l", "L", ["a", "b", "c"], lines, x_title="x", write=str, horizons=dashed, low=0, high=1)
        return next(float(t.get("y", "")) for t in parsed(figure).iter(f"{NAMESPACE}text") if t.text == "even: 0.5")

    assert foot(0.53) > foot(0.9)  # below its line where the drawn one runs right above it
    assert foot(0.47) == foot(0.9)


def test_bars_are_as_long_as_their_values() -> None:
    bars = [Bar("a", 0.5, 0, "half"), Bar("b", 1.0, 1, "all")]
    root = parsed(draw_bars("b", "Bars", [("group", bars)], lambda v: f"{v:.0%}"))
    half, whole = (float(rect.get("width", "")) for rect in root.iter(f"{NAMESPACE}rect"))
    assert whole == pytest.approx(2 * half, abs=0.02)


def test_histograms_have_a_row_each() -> None:
    root = parsed(draw_histograms("h", "H", ["a", "b"], np.array([[0.5, 0.5], [1.0, 0.0]]), even=0.5, column_title="e"))
    assert [t.text for t in root.iter(f"{NAMESPACE}title")] == ["a", "b"]


def test_nothing_at_all_is_still_a_figure() -> None:
    nothing = np.array([np.nan])
    parsed(draw_lines("l", "L", ["a"], [Line("n", nothing)], x_title="x", write=str))
    parsed(draw_bars("b", "B", [], str))

"""A small writer of SVG figures whose colours are CSS classes, so that one figure suits light, dark and paper."""

from __future__ import annotations

from html import escape
from typing import Any, NamedTuple

from hotset.report.svg_style import STYLE
from hotset.text import printable


class Figure(NamedTuple):
    """A figure: the name of its file, its title, and its drawing."""

    name: str
    title: str
    svg: str

    def standalone(self) -> str:
        """The drawing as a file of its own, with its colours."""
        head, _, rest = self.svg.partition(">")
        return f'{head} xmlns="http://www.w3.org/2000/svg">\n<style>{STYLE}</style>{rest}\n'


class Svg:
    """A drawing under way: elements in the order in which they are painted."""

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width, self.height = width, height
        self._label, self._parts = label, [""]

    def add(self, tag: str, title: str | None = None, **attributes: Any) -> None:
        """Add an element; `title` shows when the pointer rests on it."""
        words = "".join(f' {_name(name)}="{_value(value)}"' for name, value in attributes.items() if value is not None)
        inner = f"><title>{clean(title)}</title></{tag}>" if title is not None else "/>"
        self._parts.append(f"<{tag}{words}{inner}")

    def text(
        self, x: float, y: float, words: str, kind: str = "t", anchor: str | None = None, turn: float | None = None
    ) -> None:
        """Write words; `anchor` is start, middle or end, `turn` an angle in degrees."""
        turned = "" if turn is None else f' transform="rotate({number(turn)} {number(x)} {number(y)})"'
        where = "" if anchor is None else f' text-anchor="{anchor}"'
        at = f'x="{number(x)}" y="{number(y)}"'
        self._parts.append(f'<text class="{kind}" {at}{where}{turned}>{clean(words)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "rule") -> None:
        """Draw a straight line."""
        self.add("path", **{"class": kind, "d": f"M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}"})

    def render(self) -> str:
        """The drawing as an element for a page."""
        size = f'viewBox="0 0 {number(self.width)} {number(self.height)}" width="{number(self.width)}"'
        return f'<svg class="fig" {size} role="img" aria-label="{clean(self._label)}">{"".join(self._parts)}</svg>'


def clean(words: str) -> str:
    """Text that cannot be taken for markup, on one line."""
    return escape(printable(words))


def number(value: float) -> str:
    """A coordinate with no more digits than show."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value else "0"


def shortened(words: str, most: int = 30) -> str:
    """Words that fit beside a figure."""
    return words if len(words) <= most else words[: most - 1] + "\u2026"


def _name(name: str) -> str:
    return name.rstrip("_").replace("_", "-")


def _value(value: Any) -> str:
    return number(value) if isinstance(value, float | int) else escape(str(value))


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values from one end of an axis to the other, not too many."""
    from math import ceil, floor, log10

    if not high > low:
        return [low]
    rough = (high - low) / most
    unit = 10.0 ** floor(log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough - 1e-12)
    first = ceil(low / step - 1e-9)
    return [round(step * i, 12) for i in range(first, floor(high / step + 1e-9) + 1)]


def every(count: int, most: int) -> int:
    """How many places apart to number so many rows or columns."""
    rough = max(1, -(-count // most))
    return next(step for step in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 256, 512, 1024) if step >= rough)

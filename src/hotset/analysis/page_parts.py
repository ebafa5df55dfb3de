"""What sections of the report are made of: sentences, figures with a sentence each, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from zlib import crc32

from hotset.report.svg import Figure, clean


@dataclass
class Section:
    """One section of the page, with the figures in it."""

    anchor: str
    title: str
    parts: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    def say(self, words: str) -> None:
        """Add a paragraph."""
        self.parts.append(f"<p>{clean(words)}</p>")

    def show(self, figure: Figure, sentence: str) -> None:
        """Add a figure and the sentence that explains it."""
        self.figures.append(figure)
        head, caption = clean(figure.title), clean(sentence)
        self.parts.append(
            f'<figure id="figure-{figure.name}"><h3>{head}</h3><div class="wide">{figure.svg}</div>'
            f"<figcaption>{caption}</figcaption></figure>"
        )

    def table(self, title: str, sentence: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table and the sentence that explains it; columns that begin with a number are set to the right."""
        right = [bool(rows) and _is_number(rows[0][i]) for i in range(len(header))]
        marks = [' class="r"' if each else "" for each in right]
        head = "".join(f"<th{mark}>{clean(word)}</th>" for mark, word in zip(marks, header, strict=True))
        body = "".join(
            "<tr>" + "".join(f"<td{mark}>{clean(word)}</td>" for mark, word in zip(marks, row, strict=True)) + "</tr>"
            for row in rows
        )
        self.parts.append(
            f"<figure><h3>{clean(title)}</h3>"
            f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
            f"<figcaption>{clean(sentence)}</figcaption></figure>"
        )

    def render(self) -> str:
        """The section as HTML."""
        return f'<section id="{self.anchor}"><h2>{clean(self.title)}</h2>{"".join(self.parts)}</section>'


def slug(words: str) -> str:
    """Words as a part of a file's name, different for different words."""
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in words.lower())[:40]
    return plain if plain.replace("-", "").isalnum() and plain == words else f"{plain}-{crc32(words.encode()):08x}"


def _is_number(words: str) -> bool:
    return words[:1].isdigit() or words in ("-", "")


def percent(share: float | None, digits: int = 1) -> str:
    """A fraction as a percentage; a dash where it is not known."""
    return "-" if share is None or not isfinite(share) else f"{100 * share:.{digits}f} %"


def decimal(value: float | None, digits: int = 2) -> str:
    """A number; a dash where it is not known."""
    return "-" if value is None or not isfinite(value) else f"{value:,.{digits}f}"


def times(value: float | None) -> str:
    """A factor, as in 2.4x."""
    return "-" if value is None or not isfinite(value) else f"{value:.2f}\u00d7" if value < 10 else f"{value:.0f}\u00d7"

"""Text that comes from files, libraries and models, made safe to show: nothing in it can steer a terminal."""

from __future__ import annotations

_MAX_LETTERS = 300
_CONTROLS: dict[int, str | None] = {code: "?" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_CONTROLS[ord("\r")] = None  # it would write over the line; of a line's end nothing is lost without it


def printable(text: str) -> str:
    """A name or a message as one line: line ends become spaces, other characters that cannot be shown "?"."""
    line = " ".join(text.splitlines()) if "\n" in text else text
    return line if line.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in line)


def without_controls(text: str) -> str:
    """Text of any length with its lines and tabs, and nothing else that a terminal would obey."""
    return text.translate(_CONTROLS)


def one_line(error: BaseException) -> str:
    """What a library said, in its first line and not too long; a single word is told with the error's class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    first = f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and lines[1:] else lines[0]
    text = printable(first if " " in first else f"{type(error).__name__} {first}".strip())
    return text[:_MAX_LETTERS].rstrip(" .:")

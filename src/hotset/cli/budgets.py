"""Budgets and sizes as people type them: a number without a unit is asked about where a person can answer."""

from __future__ import annotations

import sys

from hotset.shape import is_bare_share, is_bare_size

_PERCENT = ("%", "percent", "per cent", "p")
_GIB = ("g", "gib", "gb", "gibibytes", "gigabytes")
_BYTES = ("b", "bytes", "byte")
_ASKED_AT_MOST = 3


def settled(text: str) -> str:
    """The budget with its unit: at a terminal the person says which; elsewhere it is left as it is, and refused."""
    return _asked(text, "%", _PERCENT) if is_bare_share(text) else text


def settled_size(text: str) -> str:
    """The same for a size of memory."""
    return _asked(text, "GiB", _GIB) if is_bare_size(text) else text


def _asked(text: str, unit: str, words: tuple[str, ...]) -> str:
    """The number with the unit that a person names; without an answer as it was, which is refused in a line."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return text
    number = text.strip()
    for _ in range(_ASKED_AT_MOST):
        answer = _answer(f"{number} {unit}, or {number} bytes? Type {words[0]} or b").removeprefix(number).strip()
        if answer in words:
            return f"{number}{unit}"
        if answer in _BYTES:
            return f"{number}B"
        if not answer:
            break
    return text


def _answer(question: str) -> str:
    """What a person types in small letters: nothing by Ctrl-D."""
    sys.stderr.write(f"{question}: ")
    sys.stderr.flush()
    try:
        return input().strip().lower()
    except (EOFError, UnicodeDecodeError):
        sys.stderr.write("\n")  # the error that follows has a line of its own
        return ""

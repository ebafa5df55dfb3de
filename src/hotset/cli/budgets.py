"""Budgets and sizes as people type them: a number without a unit is asked about where a person can answer."""

from __future__ import annotations

import sys

import typer

from hotset.shape import is_bare_share, is_bare_size


def settled(text: str) -> str:
    """The budget with its unit: at a terminal the person says which; elsewhere it is left as it is, and refused."""
    return _asked(text, "%", ("%", "percent")) if is_bare_share(text) else text


def settled_size(text: str) -> str:
    """The same for a size of memory."""
    return _asked(text, "GiB", ("g", "gib", "gb")) if is_bare_size(text) else text


def _asked(text: str, unit: str, words: tuple[str, ...]) -> str:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return text
    number = text.strip()
    while True:
        asked = f"{number} {unit}, or {number} bytes? Type {words[0]} or b"
        answer = typer.prompt(asked, err=True).strip().lower()
        if answer in words:
            return f"{number}{unit}"
        if answer in ("b", "bytes"):
            return f"{number}B"

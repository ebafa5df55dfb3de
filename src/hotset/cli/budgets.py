"""Budgets as people type them: a number without a unit is asked about where a person can answer."""

from __future__ import annotations

import sys

import typer

from hotset.shape import is_bare_share


def settled(text: str) -> str:
    """The budget with its unit: at a terminal the person says which; elsewhere it is left as it is, and refused."""
    if not is_bare_share(text) or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return text
    number = text.strip()
    while True:
        answer = typer.prompt(f"{number} %, or {number} bytes? Type % or b", err=True).strip().lower()
        if answer in ("%", "percent"):
            return f"{number}%"
        if answer in ("b", "bytes"):
            return f"{number}B"

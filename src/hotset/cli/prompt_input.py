"""Prompts as people give them to a command: words, a file, or stdin."""

from __future__ import annotations

import sys
from pathlib import Path

from hotset.errors import HotsetError
from hotset.generation.prompt_files import LabelledPrompt, bounded_text, parse_prompts, read_prompts, read_text

_STDIN = "-"


def read_prompt(words: str | None, file: Path | None) -> str:
    """The prompt of the command line or of a file."""
    if words is not None and file is not None:
        raise HotsetError("give the prompt with -p or with --file, not both")
    if words is None and file is None:
        raise HotsetError("no prompt: give one with -p, or with --file (- reads stdin)")
    text = words if file is None else _text(file)
    if not text or not text.strip():
        raise HotsetError("the prompt is empty: give some words to go on from")
    return text


def read_labelled(file: Path, limit: int | None) -> list[LabelledPrompt]:
    """The prompts of a file, or of stdin for -."""
    return parse_prompts(_text(file), file, limit) if str(file) == _STDIN else read_prompts(file, limit)


def _text(path: Path) -> str:
    """The text of a file, or of stdin for -."""
    if str(path) != _STDIN:
        return read_text(path)
    try:
        return bounded_text(sys.stdin.buffer, "stdin")
    except OSError as error:
        raise HotsetError(f"cannot read {path}: {error.strerror or error}") from None

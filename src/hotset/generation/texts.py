"""Texts that a model is run over: a person's file, or the small one that ships with hotset, as windows of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hotset.errors import HotsetError
from hotset.generation.prompt_files import read_text
from hotset.models.windows import WINDOW_TOKENS, TokenText, Window
from hotset.reference import DOMAINS, workload

BUILT_IN = "hotset's own text in 14 domains"
WINDOWS_PER_DOMAIN = 2
LONGEST_TOKEN = 8
"""Letters of a token, more or less: of a long text pieces are read that surely fill a window."""
MIN_LINE = 40
"""Letters of a line that two texts have in common by more than chance."""
MAX_SHARED = 0.1


def built_in_text(tokenizer: Any) -> TokenText:
    """The beginnings of the workloads that ship with hotset, which were written for it: 14 languages and notations."""
    texts = {name: "\n\n".join(one.text for one in workload(name).prompts) for name in DOMAINS}
    windows = [
        Window(name, ids)
        for name, text in texts.items()
        for ids in list(_windows(_ids(tokenizer, text)))[:WINDOWS_PER_DOMAIN]
    ]
    return TokenText(BUILT_IN, _sha256("".join(texts.values())), tuple(windows))


def text_of_file(path: Path, tokenizer: Any, most_tokens: int, *, whole: bool = False) -> TokenText:
    """Windows of a file's text, spread evenly over it where it has more than wanted; whole ones only if so asked.

    Of fewer tokens than a window has, there is one that is as short.
    """
    text = read_text(path)
    count = max(most_tokens // WINDOW_TOKENS, 1)
    pieces = [text] if len(text) <= count * WINDOW_TOKENS * LONGEST_TOKEN else _spread(text, count)
    found = [ids for piece in pieces for ids in list(_windows(_ids(tokenizer, piece)))[: count // len(pieces)]]
    if most_tokens < WINDOW_TOKENS:
        found = [ids[:most_tokens] for ids in found]
    if whole and any(len(ids) == WINDOW_TOKENS for ids in found):
        found = [ids for ids in found if len(ids) == WINDOW_TOKENS]
    if not any(len(ids) > 1 for ids in found):
        raise HotsetError(f"{path} holds too little text: give one of some thousand words")
    return TokenText(path.name, _sha256(text), tuple(Window(path.name, ids) for ids in found))


def refuse_shared(quality: Path, calibration: Path) -> None:
    """Refuse to measure quality on what the scales were fitted to."""
    own, other = _long_lines(read_text(quality)), _long_lines(read_text(calibration))
    if own == other or len(own & other) > MAX_SHARED * len(own):
        raise HotsetError(
            f"{quality} has lines in common with {calibration}: quality is measured on text that was not used for "
            "calibration; give another, or leave out --quality"
        )


def _long_lines(text: str) -> set[str]:
    lines = {line.strip() for line in text.splitlines()}
    return {line for line in lines if len(line) >= MIN_LINE} or lines


def _spread(text: str, count: int) -> list[str]:
    """Pieces of a long text, each from the beginning of a line where one is near."""
    step, size = len(text) // count, WINDOW_TOKENS * LONGEST_TOKEN
    found = []
    for begin in range(0, step * count, step):
        line = text.find("\n", begin, begin + max(step - size, 0)) + 1 if begin else 0
        found.append(text[line or begin :][:size])
    return found


def _windows(ids: list[int]) -> Iterator[tuple[int, ...]]:
    for begin in range(0, len(ids), WINDOW_TOKENS):
        yield tuple(ids[begin : begin + WINDOW_TOKENS])


def _ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return found


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

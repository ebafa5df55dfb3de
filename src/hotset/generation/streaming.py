"""Tokens as they come, as text: a letter whose bytes are spread over tokens is shown once it is whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

OnText = Callable[[str], object]

_CUT = "\ufffd"
"""What a decoder writes for bytes that do not make a letter yet."""


class TokenStream:
    """Takes tokens from `generate`, writes their text, and keeps the time of each."""

    def __init__(self, tokenizer: Any, on_text: OnText, first: Callable[[], None] = lambda: None) -> None:
        self.ids: list[int] = []
        self.times_s: list[float] = []
        self._tokenizer, self._on_text, self._first = tokenizer, on_text, first
        self._prompt_seen = False
        self._from = self._shown = 0  # the text of a token depends on the one before: decode from a little earlier

    def put(self, tokens: Any) -> None:
        """Take the prompt, which comes first and is not shown, or the next token."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.times_s.append(time.perf_counter())
        self.ids += tokens.reshape(-1).tolist()
        if len(self.times_s) == 1:
            self._first()
        self._show(final=False)

    def end(self) -> None:
        """Show what was held back."""
        self._show(final=True)

    def _show(self, *, final: bool) -> None:
        before, now = self._text(self._shown), self._text(len(self.ids))
        if len(now) <= len(before) or (now.endswith(_CUT) and not final):
            return
        self._on_text(now[len(before) :])
        self._from, self._shown = self._shown, len(self.ids)

    def _text(self, last: int) -> str:
        text: str = self._tokenizer.decode(self.ids[self._from : last], skip_special_tokens=True)
        return text

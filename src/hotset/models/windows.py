"""Text as windows of tokens, and a model run over some of them at a time, teacher-forced."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

WINDOW_TOKENS = 256
PASS_TOKENS = 4096
"""What one forward pass computes: with so many tokens nearly every expert is needed once, and is read once."""
LOGITS_BYTES = 512 << 20
"""What the logits of one pass may take."""
LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive tokens of a text, and which part of the text they are of."""

    label: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenText:
    """A text as one model's tokens: its name, the SHA-256 of what was read, and the windows that are run."""

    name: str
    sha256: str
    windows: tuple[Window, ...]

    @property
    def tokens(self) -> int:
        """The tokens of all windows."""
        return sum(len(window.ids) for window in self.windows)

    def passes(self, vocabulary: int = 0) -> list[Sequence[Window]]:
        """The windows of each forward pass, so few that the logits of all their tokens find room if they are wanted."""
        per_pass = PASS_TOKENS // WINDOW_TOKENS
        if vocabulary:
            per_pass = max(min(per_pass, LOGITS_BYTES // (WINDOW_TOKENS * vocabulary * LOGIT_BYTES)), 1)
        return [self.windows[begin : begin + per_pass] for begin in range(0, len(self.windows), per_pass)]


def batch_of(windows: Sequence[Window], device: torch.device) -> torch.Tensor:
    """The ids of windows [windows, tokens]; a short one is filled up behind its end, which no token before it sees."""
    longest = max(len(window.ids) for window in windows)
    rows = [(*window.ids, *(window.ids[-1:] * (longest - len(window.ids)))) for window in windows]
    return torch.tensor(rows, device=device)


def logits_of(model: Any, windows: Sequence[Window]) -> torch.Tensor:
    """The logits of windows [windows, tokens, vocabulary]."""
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=batch_of(windows, model.device), use_cache=False).logits
    return found


def run_over(model: Any, windows: Sequence[Window]) -> None:
    """Run a model over windows for what happens on the way; where it can leave out logits, it does."""
    few = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(type(model).forward).parameters else {}
    with torch.no_grad():
        model(input_ids=batch_of(windows, model.device), use_cache=False, **few)

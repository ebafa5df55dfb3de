"""What a person should know of how a model runs, in one line each."""

from __future__ import annotations

import logging


class Notices:
    """Messages about one model: logged, and kept for the caller."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, *lines: str) -> None:
        """Log lines and keep them."""
        self.lines += lines
        for line in lines:
            logging.getLogger("hotset").warning(line)

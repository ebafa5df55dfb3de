"""What a person types in a chat: lines with history, blocks that are one message, and Ctrl-C that leaves nothing lost.

A block that is pasted comes as one message where Python has GNU readline (bracketed paste); three quotes open one that
is typed, and end it. So they do in a pipe.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

from hotset.cli.interrupts import is_terminated
from hotset.cli.output import message
from hotset.errors import HotsetError

PROMPT, MORE, QUOTES = "> ", "... ", '"""'
LEAVE = "Ctrl-C again, Ctrl-D or /bye ends the chat"


def messages() -> Iterator[str]:
    """What a person types, or the lines of a pipe."""
    return _Typed().messages() if sys.stdin.isatty() else _piped()


class _Typed:
    """Reads messages from a terminal."""

    def __init__(self) -> None:
        self._readline: Any = _line_editor()
        self._asked = False  # the last thing typed was Ctrl-C on an empty line

    def messages(self) -> Iterator[str]:
        """Message after message until Ctrl-D, a second Ctrl-C or SIGTERM."""
        with suppress(EOFError):
            while True:
                try:
                    text = self._message()
                except KeyboardInterrupt as interrupt:
                    if not self._goes_on(interrupt):
                        break
                    continue
                except UnicodeDecodeError:
                    message("error: that was not UTF-8 text: set the terminal to UTF-8, or type it again")
                    continue
                self._asked = False
                yield text
        sys.stdout.write("\n")

    def _message(self) -> str:
        """A line, a pasted block, or all between two times three quotes."""
        text = input(PROMPT)
        if "\n" in text:  # pasted: quotes in it are its own, as those of a docstring
            return text
        return _whole(text, self._more)

    def _more(self) -> str:
        try:
            return input(MORE)
        except (EOFError, KeyboardInterrupt):  # the block is given up, as a half-typed line is
            raise _Cleared from None

    def _goes_on(self, interrupt: KeyboardInterrupt) -> bool:
        """What Ctrl-C does: it clears what is typed, and leaves where it comes twice with nothing typed."""
        if is_terminated():
            return False
        typed = self._typed()
        sys.stdout.write("\n")
        if isinstance(interrupt, _Cleared) or typed:
            self._asked = False
            return True
        if self._asked:
            return False
        self._asked = True
        message(LEAVE)
        return True

    def _typed(self) -> bool:
        """Whether there was something on the line that Ctrl-C has ended."""
        return bool(self._readline is not None and self._readline.get_line_buffer())


class _Cleared(KeyboardInterrupt):
    """A block that was given up."""


def _line_editor() -> Any:
    """Python's readline, which input() uses once it is imported; none on some systems."""
    try:
        import readline
    except ImportError:
        return None
    # Python switches it off. A plain terminal would show its codes; libedit has no such paste.
    if os.environ.get("TERM", "dumb") != "dumb" and "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")
    return readline


def _whole(first: str, more: Callable[[], str]) -> str:
    """A line, or if three quotes open it, all up to the next three at the end of a line."""
    if not first.lstrip().startswith(QUOTES):
        return first
    block = first.lstrip().removeprefix(QUOTES)
    while not block.rstrip().endswith(QUOTES):
        block += "\n" + more()
    return block.rstrip().removesuffix(QUOTES).strip("\n")


def _piped() -> Iterator[str]:
    """The lines of a pipe, and the blocks in it."""
    lines = enumerate(_lines(), 1)
    for number, line in lines:

        def more(opened: int = number) -> str:
            following = next(lines, None)
            if following is None:
                raise HotsetError(f"the block that line {opened:,} of stdin opens has no end: close it with {QUOTES}")
            return following[1].rstrip("\n")

        yield _whole(line.rstrip("\n"), more)


def _lines() -> Iterator[str]:
    """The lines of stdin: as bytes, since one that is no text is named by its number."""
    from hotset.generation.prompt_files import MAX_TEXT_BYTES, decode

    for number in count(1):
        data = sys.stdin.buffer.readline(MAX_TEXT_BYTES)
        if not data:
            return
        yield decode(data, f"line {number:,} of stdin")

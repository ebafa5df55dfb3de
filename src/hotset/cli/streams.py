"""The standard streams of a command: a full or closed one ends in a line or in silence, never in a traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from hotset.errors import HotsetError

READER_LEFT = 141
"""What a shell reports of a program whose reader left (SIGPIPE)."""


class ReaderLeft(SystemExit):
    """The reader of our output left, as `head` does: nothing is wrong and there is nothing to say."""

    def __init__(self) -> None:
        super().__init__(READER_LEFT)


class _Stream:
    """A text stream whose failures are told as hotset's own; all else is the stream's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._at_terminal = stream, stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._told():
            return self._stream.write(_encodable(text, self._stream))
        return len(text)

    def flush(self) -> None:
        with self._told():
            self._stream.flush()

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._discard()
            self._tell(error)

    def _discard(self) -> None:
        """Let what is still in the buffer go nowhere: the interpreter would try to write it again as it leaves."""
        with suppress(OSError, ValueError):
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, self._stream.fileno())
            os.close(sink)

    def _tell(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            raise ReaderLeft from None
        if error.errno == errno.EIO and self._at_terminal:  # it was closed; SIGHUP says what to do about it
            return
        raise HotsetError(f"cannot write to stdout ({error.strerror or error}): choose another place") from error


class _Errors(_Stream):
    """Stderr: what cannot be written there is dropped."""

    def _tell(self, error: OSError) -> None:
        pass


def _encodable(text: str, stream: TextIO) -> str:
    """The text with what the stream's encoding lacks written as escapes, such as names that are not UTF-8."""
    encoding = stream.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text


@contextmanager
def standard_streams() -> Iterator[None]:
    """Guard stdout and stderr for a command's length; those that are closed become the null device."""
    before = sys.stdin, sys.stdout, sys.stderr
    sys.stdin, out, err = (stream or _null(mode) for stream, mode in zip(before, "rww", strict=True))
    sys.stdout, sys.stderr = _Stream(out), _Errors(err)
    try:
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = before


@contextmanager
def libraries_silent() -> Iterator[None]:
    """Let what libraries write to stdout past Python go nowhere: tokenizers prints words of a model's files there."""
    try:
        sys.stdout.flush()
        kept = os.dup(1)
    except OSError:  # there is no stdout to keep clean
        yield
        return
    try:
        with open(os.devnull, "wb") as sink:
            os.dup2(sink.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _null(mode: str) -> Any:
    return open(os.devnull, mode, encoding="utf-8")

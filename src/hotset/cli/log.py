"""What a command says beside its result, as log lines: to a file, as text or JSON, and with -v to stderr.

Everything goes through Python's logging under the logger "hotset"; prompts and answers never do.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from hotset.errors import HotsetError
from hotset.options import OptionError, RunOptions
from hotset.text import printable

LOG = logging.getLogger("hotset.cli")
"""Of what the command line says; a person sees it by other means."""
LOG.addHandler(logging.NullHandler())
STEPS = logging.getLogger("hotset.steps")
"""Of what is done meanwhile; a person sees it with -v."""
STEPS.addHandler(logging.NullHandler())
_quiet = False


def is_quiet() -> bool:
    """Whether nothing but text and errors is said."""
    return _quiet


def log_step(what: str, **values: Any) -> None:
    """Log something that was done, with its figures."""
    STEPS.info(what, extra={"values": values})


@contextmanager
def logging_by(options: RunOptions | None) -> Iterator[None]:
    """Log a command as its options say."""
    if options is None:
        yield
        return
    _check(options)
    with ExitStack() as stack:
        stack.callback(_set_quiet, _quiet)
        _set_quiet(options.quiet)
        for logger in (LOG, STEPS):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.DEBUG)
        if options.log_file is not None:
            _attach(stack, logging.getLogger("hotset"), _file_handler(options))
            _attach(stack, logging.getLogger("hotset.compiling"), _Screen(""))  # which else speaks for itself
        if options.verbose:
            _attach(stack, STEPS, _Screen("%(asctime)s "))
        try:
            yield
        except HotsetError as error:
            LOG.error(str(error))  # noqa: TRY400 - the input is at fault, and no traceback says more
            raise


def _check(options: RunOptions) -> None:
    if options.quiet and options.verbose:
        raise OptionError("quiet", "and --verbose exclude each other: leave one out", "--quiet")
    if options.log_json and options.log_file is None:
        raise OptionError("log_json", "is the form of a log file: pass --log-file FILE, too", "--log-json")


def _set_quiet(value: bool) -> None:
    global _quiet
    _quiet = value


def _attach(stack: ExitStack, logger: logging.Logger, handler: logging.Handler) -> None:
    logger.addHandler(handler)
    stack.callback(handler.close)
    stack.callback(logger.removeHandler, handler)


def _file_handler(options: RunOptions) -> logging.Handler:
    try:
        handler = logging.FileHandler(str(options.log_file), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise HotsetError(f"cannot write to {options.log_file}: {error.strerror}; choose another --log-file") from None
    handler.setFormatter(_JsonLines() if options.log_json else _Lines())
    return handler


class _Lines(logging.Formatter):
    """One line for each message: time, level, words, figures."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        values = getattr(record, "values", {})
        figures = "".join(f" {name}={value}" for name, value in values.items())
        return printable(super().format(record) + figures)


class _JsonLines(_Lines):
    """One JSON object for each message."""

    def format(self, record: logging.LogRecord) -> str:
        """The object of a record, in one line."""
        known = {
            "time": f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        return json.dumps(known | getattr(record, "values", {}), default=str)


class _Screen(logging.Handler):
    """Lines on stderr, as it is at the time."""

    def __init__(self, prefix: str) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter(f"{prefix}%(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line of a record."""
        figures = ", ".join(f"{name} {_short(value)}" for name, value in getattr(record, "values", {}).items())
        sys.stderr.write(printable(self.format(record) + (f": {figures}" if figures else "")) + "\n")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""How a command ends: exit codes, and one line on stderr for whatever went wrong."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import typer

from hotset.cli.interrupts import INTERRUPTED, exit_code
from hotset.cli.streams import standard_streams
from hotset.errors import HotsetError
from hotset.generation.errors import DEBUG
from hotset.plugins import uncompilable
from hotset.text import one_line, printable

WRONG_INPUT, OWN_FAULT = 2, 1

_UsageError: Any = typer.BadParameter.__base__  # typer brings its own copy of click, or uses the one installed


def run_and_report(work: Callable[[], Any]) -> int:
    """Run a command and return its exit code: 2, and one line, where the input is at fault; 1 where hotset is."""
    with standard_streams():
        try:
            code = work()
            sys.stdout.flush()
        except Exception as error:
            return _fail(error)
        except KeyboardInterrupt:
            return exit_code()
        if code == INTERRUPTED:  # as typer ends for both signals
            return exit_code()
        return code if isinstance(code, int) else 0


def _fail(error: Exception) -> int:
    with suppress(Exception, SystemExit):  # what is left to write, while its failure can still be kept quiet
        sys.stdout.flush()
    debugging = os.environ.get(DEBUG, "") not in ("", "0")
    if debugging:
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, typer.Abort) or _is_interrupt(error):
        return exit_code()
    if isinstance(error, _UsageError):
        return _misuse(error)
    error = uncompilable(error) or error
    if isinstance(error, HotsetError):
        return _report(str(error), WRONG_INPUT)
    if isinstance(error, OSError) and error.filename:
        return _report(f"{error.filename}: {error.strerror}", WRONG_INPUT)
    if isinstance(error, MemoryError):
        what = "ask for a smaller --memory, or use a smaller trace (hotset trace cut) or sweep"
        return _report(f"out of memory: {what}", WRONG_INPUT)
    more = "the lines above say where" if debugging else f"run it again with {DEBUG}=1 and report what it shows"
    return _report(f"hotset failed ({type(error).__name__}: {one_line(error)}): {more}", OWN_FAULT)


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether a fault is what a library made of Ctrl-C, as Python does while a class is made.

    Of hotset's own errors only what they were raised from counts: one may come of saving after an interrupt.
    """
    seen = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ if isinstance(error, HotsetError) else error.__cause__ or error.__context__
    return False


def _misuse(error: Any) -> int:
    """What is wrong with the words of a command, and where its help is; without any words the help itself."""
    _suggest_no_hidden(error)
    message = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return WRONG_INPUT
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "hotset"
    where = _place(error, context)
    if context and context.info_name == "run" and message.startswith("Got unexpected extra argument"):
        where = ": the prompt goes behind -p, in quotes"
    return _report(f"{message.rstrip('.')}{where} (see {command} --help)", WRONG_INPUT)


def _suggest_no_hidden(error: Any) -> None:
    """Take options of earlier versions out of what is suggested for a word that no command knows."""
    params = getattr(getattr(getattr(error, "ctx", None), "command", None), "params", ())
    hidden = {option for param in params if getattr(param, "hidden", False) for option in param.opts}
    if getattr(error, "possibilities", None):
        error.possibilities = [each for each in error.possibilities if each not in hidden]


def _place(error: Any, context: Any) -> str:
    """For an option before the command that it belongs to: where it goes."""
    option, group = getattr(error, "option_name", None), getattr(context, "command", None)
    taking = [] if option is None else list(_taking(group, option))
    if not taking:
        return ""
    given = next((words for words in taking if set(words) <= set(sys.argv)), taking[0])
    return f": it goes after the command, as in {context.command_path} {' '.join(given)} {option}"


def _taking(group: Any, option: str) -> Iterator[tuple[str, ...]]:
    """The commands of a group, and of the groups in it, that take an option."""
    for name, each in getattr(group, "commands", {}).items():
        if any(option in param.opts for param in each.params):
            yield (name,)
        yield from ((name, *rest) for rest in _taking(each, option))


def _report(message: str, code: int) -> int:
    sys.stderr.write(f"error: {printable(message)}\n")
    sys.stderr.flush()
    return code

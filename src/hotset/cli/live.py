"""Commands that take options of dataclasses: their flags, `--config`, and flags of earlier versions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from hotset.cli.budgets import settled, settled_size
from hotset.cli.log import logging_by
from hotset.cli.output import note
from hotset.options import CONFIG_NAME, MESSAGES, OptionError, Place, RunOptions, declared, read_options
from hotset.options.declare import Declared, budget_or_auto
from hotset.shape import parse_memory

_OLD = "formerly_"
_ASKED: dict[Any, Callable[[str], str]] = {budget_or_auto: settled, parse_memory: settled_size}
"""What is asked about at a terminal, by the check that would refuse it."""


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameters of a command whose types are dataclasses of options by one flag for each option.

    A default of such a parameter, if there is one, holds the command's own defaults.
    """
    hints = get_type_hints(command, include_extras=True)
    given = inspect.signature(command).parameters
    kinds = {name: hints[name] for name in given if is_dataclass(hints[name])}
    parameters = [_config(tuple(kinds.values()))]
    for name, parameter in given.items():
        if name in kinds:
            known = None if parameter.default is inspect.Parameter.empty else parameter.default
            parameters += flags(kinds[name], known)
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def call(**values: Any) -> None:
        values.pop("config")
        made = {name: _made(kind, values) for name, kind in kinds.items()}
        run = next((each for each in made.values() if isinstance(each, RunOptions)), None)
        with logging_by(run):
            command(**made, **values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call


def with_messages(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that works for long, and takes no `RunOptions`, the options of what it says: -q, -v and logs."""
    hints = get_type_hints(command, include_extras=True)
    given = inspect.signature(command).parameters
    parameters = [
        each.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY) for name, each in given.items()
    ]
    parameters += [
        _parameter(each.name, each.word_type, _flag(each, each.default), each.default) for each in _messages()
    ]

    @functools.wraps(command)
    def call(**values: Any) -> None:
        told = RunOptions(**{each.name: values.pop(each.name) for each in _messages()})
        with logging_by(told):
            command(**values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call


def _messages() -> list[Declared]:
    return [each for each in declared(RunOptions, Place.COMMAND) if each.option.group == MESSAGES]


def flags(kind: Any, known: Any = None) -> list[inspect.Parameter]:
    """The parameters of typer for the options of a dataclass, those of earlier versions hidden."""
    found = []
    for each in declared(kind, Place.COMMAND):
        default = each.default if known is None else getattr(known, each.name)
        found.append(_parameter(each.name, each.word_type, _flag(each, default), default))
        for old in each.option.formerly:
            info = typer.Option(f"--{old.replace('_', '-')}", hidden=True)
            found.append(_parameter(_OLD + old, each.word_type, info, None))
    return found


def flag_of(kind: Any, name: str, *, grouped: bool = True) -> Any:
    """What typer is told of one option, for a command that takes only a few."""
    (each,) = (each for each in declared(kind, Place.COMMAND) if each.name == name)
    return _flag(each, each.default, grouped)


def _parameter(name: str, word_type: type, info: Any, default: Any) -> inspect.Parameter:
    annotation = Annotated[word_type if default is not None else word_type | None, info]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flag(each: Declared, default: Any, grouped: bool = True) -> Any:
    option = each.option
    if option.argument:
        return typer.Argument(metavar=each.name.upper(), help=option.help, show_default=False)
    words = f" One of {', '.join(option.choices)}." if option.choices else ""
    return typer.Option(
        *([option.short] if option.short else []),
        each.flag,
        help=option.help + words,
        metavar=option.unit,
        rich_help_panel=option.group if grouped else None,
        show_default=default is not None and default is not False,
    )


def _made(kind: Any, values: dict[str, Any]) -> Any:
    """The options of one dataclass, taken out of all values of a command."""
    found = {}
    options = list(declared(kind, Place.COMMAND))
    for each in options:
        found[each.name] = values.pop(each.name)
        ask = _ASKED.get(each.option.check)
        if ask is not None and isinstance(found[each.name], str):
            found[each.name] = ask(found[each.name])
        for old in each.option.formerly:
            if (value := values.pop(_OLD + old)) is not None:
                note(each.deprecated(old, flag=True))
                found[each.name] = each.converted(old, value)
    try:
        return kind(**found)
    except OptionError as error:
        spelling = next(each.flag for each in options if each.name == error.name)
        raise error.spelled(spelling) from None


def _config(kinds: tuple[Any, ...]) -> inspect.Parameter:
    def read(context: typer.Context, file: Path | None) -> Path | None:
        """Take the file's values for defaults, which flags beat."""
        if context.resilient_parsing:
            return file
        if file is None and Path(CONFIG_NAME).is_file():
            file = Path(CONFIG_NAME)
            note(f"options from {CONFIG_NAME} in this folder; --config /dev/null goes without")
        if file is not None:
            values, notes = read_options(file, *kinds)
            for each in notes:
                note(each)
            context.default_map = {**(context.default_map or {}), **values}
        return file

    info = typer.Option(
        "--config",
        metavar="FILE",
        help=f"Take options from this TOML file; {CONFIG_NAME} in the working directory is read as well.",
        is_eager=True,
        callback=read,
        show_default=False,
    )
    return _parameter("config", Path, info, None)

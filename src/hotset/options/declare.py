"""How an option is declared: a field of a frozen dataclass with its help, its group, its bounds and its check."""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Flag, auto
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from hotset.checks import put, shown
from hotset.errors import HotsetError
from hotset.shape import Budget

Check = Callable[[Any], object]
Convert = Callable[[Any], Any]

_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}


class Place(Flag):
    """Where an option can be given."""

    LOAD = auto()  # hotset.load
    ATTACH = auto()  # hotset.attach
    COMMAND = auto()  # run, chat, trace record
    FILE = auto()  # hotset.toml
    ALL = LOAD | ATTACH | COMMAND | FILE


class OptionError(HotsetError):
    """A value that an option does not take; says which option, as it is spelled where it was given."""

    def __init__(self, name: str, reason: str, spelling: str | None = None) -> None:
        super().__init__(f"{spelling or name} {reason}")
        self.name, self.reason = name, reason

    def spelled(self, spelling: str) -> OptionError:
        """The same error with the option's name as it is written elsewhere: `--memory`."""
        return OptionError(self.name, self.reason, spelling)


@dataclass(frozen=True, kw_only=True)
class Option:
    """What is known of an option beside its name, its type and its default."""

    help: str
    group: str | None = None
    unit: str | None = None  # what stands for the value in a command's help
    places: Place = Place.ALL
    flag: str | None = None  # --name-of-the-field unless told otherwise
    short: str | None = None  # a letter of its own on the command line, such as -q
    argument: bool = False  # a word of a command rather than a flag
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    check: Check | None = None  # raises a HotsetError
    example: str | None = None  # values of a kind that people get wrong, as they are written
    formerly: Mapping[str, Convert | None] = field(
        default_factory=dict
    )  # earlier names; how their values are converted


@dataclass(frozen=True)
class Declared:
    """One option: its name, the types of its values, its default, and the rest."""

    name: str
    types: tuple[type, ...]
    default: Any
    option: Option
    annotation: Any

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return self.option.flag or f"--{self.name.replace('_', '-')}"

    @property
    def word_type(self) -> type:
        """The type that words of the command line are read as."""
        return next((kind for kind in (bool, str, int, float) if kind in self.types), str)

    def deprecated(self, old: str, *, flag: bool = False) -> str:
        """The line for one of its names of earlier versions."""
        unit = f" ({self.option.unit.lower()})" if self.option.unit and self.option.formerly[old] else ""
        now, was = (self.flag, f"--{old.replace('_', '-')}") if flag else (self.name, old)
        return f"{was} is deprecated: use {now}{unit}"

    def converted(self, old: str, value: Any) -> Any:
        """The value of today for one under an earlier name."""
        convert = self.option.formerly[old]
        return value if convert is None else convert(value)

    def checked(self, value: Any) -> Any:
        """The value as the option keeps it, or an OptionError."""
        found = self._typed(value)
        if value is None:
            return None
        option = self.option
        if option.choices and isinstance(found, str) and found not in option.choices:
            raise OptionError(self.name, f'is one of {", ".join(option.choices)}, not "{found:.60}"')
        if isinstance(found, int | float) and not isinstance(found, bool):
            self._bounded(found)
        if option.check is not None:
            option.check(found)
        return found

    def _typed(self, value: Any) -> Any:
        if Any in self.types:
            return value
        for kind in self.types:
            if isinstance(value, kind) and (not isinstance(value, bool) or kind is bool):
                return value
        if not isinstance(value, bool):
            if int in self.types and hasattr(value, "__index__"):  # numpy's numbers
                return operator.index(value)
            if float in self.types and hasattr(value, "__float__"):
                return float(value)
        words = [_WORDS[kind] for kind in self.types if kind in _WORDS]
        like = f" such as {self.option.example}" if self.option.example else ""
        raise OptionError(self.name, f"must be {' or '.join(words)}{like}, not {shown(value)}")

    def _bounded(self, value: float) -> None:
        least, most = self.option.least, self.option.most
        if (least is None or value >= least) and (most is None or value <= most) and math.isfinite(value):
            return
        kind = "whole number" if int in self.types else "number"
        bounds = f"of at least {least:,}" if most is None else f"from {least:,} to {most:,}"
        raise OptionError(self.name, f"must be a {kind} {bounds}, not {shown(value)}")


def option(default: Any, *, help: str, **known: Any) -> Any:  # noqa: A002 - as argparse, click and typer call it
    """A field of a dataclass of options."""
    return field(default=default, metadata={"option": Option(help=help, **known)})


def declared(kind: Any, places: Place = Place.ALL) -> Iterator[Declared]:
    """The options of a dataclass that can be given at one of these places, in their order."""
    hints = get_type_hints(kind)
    for each in fields(kind):
        found: Option = each.metadata["option"]
        default = each.default if each.default is not MISSING else None
        if found.places & places:
            yield Declared(each.name, _types(hints[each.name]), default, found, hints[each.name])


def check_all(holder: Any) -> None:
    """Check and convert the values of a dataclass of options while it is made."""
    for each in declared(type(holder)):
        put(holder, **{each.name: each.checked(getattr(holder, each.name))})


def budget_or_auto(value: str | Budget) -> None:
    """Refuse a budget that cannot be read."""
    if isinstance(value, str) and value != "auto":
        Budget.parse(value)


def _types(annotation: Any) -> tuple[Any, ...]:
    union = get_origin(annotation) in (Union, types.UnionType)
    return tuple(get_origin(kind) or kind for kind in (get_args(annotation) if union else (annotation,)))

"""What stands for the values of options in `--help`: words, and not the names of Python's types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

F = TypeVar("F", bound=Callable[..., Any])
_WORDS = {str: "TEXT", int: "NUMBER", float: "NUMBER", Path: "PATH"}


class Commands(typer.Typer):
    """A table of commands whose help speaks so."""

    def __init__(self, **known: Any) -> None:
        super().__init__(**({"cls": _Group} | known))

    def command(self, name: str | None = None, **known: Any) -> Callable[[F], F]:
        """Register a command, as typer does."""
        register: Callable[[F], F] = super().command(name, **({"cls": _Command} | known))
        return register


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return [_worded(param) for param in super().get_params(ctx)]


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return [_worded(param) for param in super().get_params(ctx)]


def _worded(param: Any) -> Any:
    """An option with a word for its value, and none if it is a flag; an argument has a name that says enough."""
    if param.param_type_name == "argument":
        param.display_type_rich = lambda **_: None
    elif getattr(param, "is_flag", False):
        param.metavar = ""
    elif param.metavar is None:  # versions of typer before 0.26 have such words of their own
        kind = getattr(getattr(param, "type_descriptor", None), "annotation", None)
        if get_origin(kind) is list:
            (kind,) = get_args(kind)
        param.metavar = _WORDS.get(kind) if isinstance(kind, type) else None
    return param

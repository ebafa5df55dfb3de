"""Options as keyword arguments: functions that take every option of a dataclass by its name."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from hotset.options.declare import Place, declared

P = ParamSpec("P")
M = TypeVar("M")
T = TypeVar("T")
R = TypeVar("R")


def takes_options(
    kind: Callable[P, T], place: Place, *, more: str | None = None
) -> Callable[[Callable[[M, T], R]], Callable[Concatenate[M, P], R]]:
    """Let a function of a model and its options take the options as keywords.

    Type checkers read them off the constructor of the dataclass, `help()` and editors off the signature that is made
    here. Keywords that are no options go, together, into the option called `more`, or are refused.
    """

    def decorate(function: Callable[[M, T], R]) -> Callable[Concatenate[M, P], R]:
        def call(model: M, *args: P.args, **values: P.kwargs) -> R:
            if args:
                raise TypeError(f"{function.__name__}() takes its options by name")
            return function(model, make(kind, dict(values), place, more=more, caller=function.__name__))

        functools.update_wrapper(call, function)
        call.__signature__ = _signature(function, kind, place, more)  # type: ignore[attr-defined]
        options = "\n".join(["Options:", *(f"    {each.name}: {each.option.help}" for each in declared(kind, place))])
        call.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{options}"
        return cast(Callable[Concatenate[M, P], R], call)

    return decorate


def make(
    kind: Callable[..., T], values: dict[str, Any], place: Place, *, more: str | None = None, caller: str = "load"
) -> T:
    """The options of these keywords; names of earlier versions are taken, with a deprecation warning."""
    values = dict(values)
    for each in declared(kind):
        for old in each.option.formerly.keys() & values.keys():
            values.setdefault(each.name, each.converted(old, values.pop(old)))
            warnings.warn(each.deprecated(old), DeprecationWarning, stacklevel=3)
    names = {each.name for each in declared(kind, place)}
    rest = {name: values.pop(name) for name in values.keys() - names}
    if rest and more is None:
        raise TypeError(f"{caller}() has no option {', '.join(sorted(rest))}")
    if rest and more is not None:
        values[more] = {**(values.get(more) or {}), **rest}
    return kind(**values)


def _signature(function: Callable[..., Any], kind: Any, place: Place, more: str | None) -> inspect.Signature:
    first, *_ = inspect.signature(function).parameters.values()
    options = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.annotation)
        for each in declared(kind, place)
    ]
    rest = [] if more is None else [inspect.Parameter("more", inspect.Parameter.VAR_KEYWORD, annotation=Any)]
    return inspect.Signature([first, *options, *rest], return_annotation=Any)

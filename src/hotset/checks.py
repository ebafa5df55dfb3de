"""Checks at the boundary: what a caller passes is what it should be, or an error says so in one line.

Compiled loops run without bounds checks, so nothing may reach them that was not looked at here.
"""

from __future__ import annotations

import functools
import math
import operator
import re
import warnings
from collections.abc import Callable, Sequence
from enum import Enum, IntEnum
from typing import Any, TypeVar

from hotset.errors import HotsetError

E = TypeVar("E", bound=Enum)
T = TypeVar("T")

_MAX_LETTERS = 60
_ENDLESS = 1 << 40


def shown(value: object) -> str:
    """A value as a message can name it: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= _MAX_LETTERS else f"{text[:_MAX_LETTERS]}..."


def choice(value: object, kind: type[E], what: str, error: type[HotsetError] = HotsetError) -> E:
    """A member of an enumeration, given as such or by its name."""
    if isinstance(value, kind):
        return value
    if isinstance(value, str):
        for member in kind:
            if value in (member.name.lower(), member.name, member.value):
                return member
    elif issubclass(kind, IntEnum):
        values = [member.value for member in kind]
        return kind(whole(value, what, min(values), max(values), error))
    words = [member.name.lower() for member in kind]
    raise error(f"{what} must be {', '.join(words[:-1])} or {words[-1]}, not {shown(value)}")


def known(spec: object, kind: str, names: Sequence[str], error: type[HotsetError] = HotsetError) -> None:
    """Refuse text that begins with none of these names; a file of one's own is named as one."""
    name = spec.strip().partition(":")[0] if isinstance(spec, str) else names[0]
    if name in names:
        return
    own = f"; one of yours is named by its file, as ./{name}.py" if re.fullmatch(r"[A-Za-z][\w-]{0,40}", name) else ""
    raise error(f'no {kind} is called "{name:.60}"; there are {", ".join(names)}{own}')


def whole(value: object, what: str, least: int, most: int, error: type[HotsetError] = HotsetError) -> int:
    """A whole number within bounds; numpy's count as well, booleans do not."""
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        try:
            number = operator.index(value)
        except TypeError:  # an array of several
            number = least - 1
        if least <= number <= most:
            return number
    bounds = f"from {least} to {most}" if most < _ENDLESS else f"of at least {least}"
    raise error(f"{what} must be a whole number {bounds}, not {shown(value)}")


def number(value: object, what: str, low: float, high: float, error: type[HotsetError] = HotsetError) -> float:
    """A finite number within bounds."""
    if not isinstance(value, bool | str | bytes):
        try:
            found = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            found = math.nan
        if low <= found <= high and math.isfinite(found):
            return found
    raise error(f"{what} must be a number from {low:g} to {high:g}, not {shown(value)}")


def instance(value: object, kind: type[T], what: str, error: type[HotsetError] = HotsetError) -> T:
    """An object of a class."""
    if not isinstance(value, kind):
        raise error(f"{what} must be a {kind.__name__}, not {shown(value)}")
    return value


def text(value: object, what: str, error: type[HotsetError] = HotsetError) -> str:
    """A piece of text."""
    if not isinstance(value, str):
        raise error(f"{what} must be text, not {shown(value)}")
    return value


def texts(value: object, what: str, error: type[HotsetError] = HotsetError) -> tuple[str, ...]:
    """Several pieces of text; one by itself is one of them."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple):
        raise error(f"{what} must be a list of texts, not {shown(value)}")
    return tuple(text(each, what, error) for each in value)


def put(holder: Any, **values: Any) -> None:
    """Give a frozen dataclass its checked values, while it is made."""
    for name, value in values.items():
        object.__setattr__(holder, name, value)


def renamed(**names: str) -> Callable[[type[T]], type[T]]:
    """Let old names of a dataclass's fields, given as old=new, work as arguments and as attributes, with a warning."""

    def decorate(kind: type[T]) -> type[T]:
        init: Any = kind.__init__

        def warn(old: str) -> None:
            warnings.warn(f"{kind.__name__}.{old} is deprecated: use {names[old]}", DeprecationWarning, stacklevel=3)

        @functools.wraps(init)
        def translated(self: T, *values: Any, **named: Any) -> None:
            for old in names.keys() & named.keys():
                warn(old)
                named[names[old]] = named.pop(old)
            init(self, *values, **named)

        def alias(old: str) -> property:
            def read(self: T) -> Any:
                warn(old)
                return getattr(self, names[old])

            return property(read)

        for name, member in [("__init__", translated), *((old, alias(old)) for old in names)]:
            setattr(kind, name, member)
        return kind

    return decorate

"""What a live model says of itself, `stats()` and `requests()`: a dictionary and a list that print as one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from hotset.report.words import plural


class Answered(Protocol):
    """A request with its figures."""

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain values."""


R = TypeVar("R", bound=Answered)


class Stats(dict[str, Any]):
    """The counters of a model, a dictionary; `dict(stats)` prints them all."""

    def __repr__(self) -> str:
        held = f"{self['resident']} of {self['slots']} slots used, {self['policy']}" if "slots" in self else ""
        tokens = plural(self.get("tokens", 0), "token")
        parts = [f"{tokens}, {_hit_rate(self.get('hit_rate'))}", *([held] if held else []), f"{len(self)} figures"]
        return f"<Stats: {'; '.join(parts)}>"

    def to_pandas(self) -> Any:
        """A data frame of one row, with a dot in the names of what is nested; needs pandas."""
        return _frame(dict(self))


class Requests(list[R]):
    """The last requests of a model, a list."""

    def __repr__(self) -> str:
        if not self:
            return "<Requests: none>"
        figures = [request.as_dict() for request in self]
        tokens = sum(each["prefill_tokens"] + each["decode_tokens"] for each in figures)
        first, last = figures[0]["request"], figures[-1]["request"]
        numbers = f"number {first}" if len(self) == 1 else f"numbers {first} to {last}"
        return f"<Requests: {plural(len(self), 'request')}, {numbers}; {plural(tokens, 'token')}>"

    def to_pandas(self) -> Any:
        """A data frame with a row for each request, with a dot in the names of what is nested; needs pandas."""
        return _frame(self)


def _frame(what: Mapping[str, Any] | list[Any]) -> Any:
    from hotset.report.frames import to_pandas

    return to_pandas(what)


def _hit_rate(rate: float | None) -> str:
    return "nothing asked for yet" if rate is None else f"hit rate {100 * rate:.1f} %"

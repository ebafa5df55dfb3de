"""The cache that a trace was recorded with, kept in its meta, so that a replay can repeat the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from hotset.checks import renamed

if TYPE_CHECKING:
    from hotset.trace.trace import Trace

PREFIX = "run."
_NAMES = {"prefetch_rows": "ahead"}  # fields that the meta of a trace calls by an older name
_MAX_DIGITS, _MAX_LETTERS = 9, 200


@renamed(ahead="prefetch_rows")
@dataclass(frozen=True, slots=True)
class Run:
    """The settings of a live cache; `differs` says why a replay from an empty cache would not repeat the run."""

    policy: str
    scope: str
    slots: int
    staging: int
    prefetch_rows: int
    differs: str = ""

    def to_meta(self) -> dict[str, str]:
        """The run as a trace's meta has it; what is empty is left out."""
        values = {_NAMES.get(field.name, field.name): str(getattr(self, field.name)) for field in fields(self)}
        return {PREFIX + name: value for name, value in values.items() if value}

    @classmethod
    def of(cls, trace: Trace) -> Run | None:
        """The run that a trace is a recording of, if it says so and what it says can be."""
        meta = {name.removeprefix(PREFIX): text for name, text in trace.meta.items() if name.startswith(PREFIX)}
        numbers = [meta.get(name, "") for name in ("slots", "staging", _NAMES["prefetch_rows"])]
        sound = all(text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS for text in numbers)
        if not sound or meta.get("scope") not in ("layer", "pool") or "policy" not in meta:
            return None
        policy, differs = meta["policy"][:_MAX_LETTERS], meta.get("differs", "")[:_MAX_LETTERS]
        slots, staging, prefetch_rows = (int(text) for text in numbers)
        return cls(policy, meta["scope"], slots, staging, prefetch_rows, differs)


def altered(meta: Mapping[str, str], why: str) -> dict[str, str]:
    """The meta of a trace that is no longer all of its run, in its order."""
    if PREFIX + "policy" not in meta or PREFIX + "differs" in meta:
        return dict(meta)
    return {**meta, PREFIX + "differs": why}

"""Binds templates to the two functions of a forecast and compiles them, as hotset.cache.kernel does for policies.

Numba caches machine code on disk under a function's qualified name and does not look at what the function calls; the
name therefore carries a digest of every source file involved.
"""

# ruff: noqa: F821 - observe and chances are bound per forecast
from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hotset.forecasts.base import Forecast, Seen
from hotset.policies import base
from hotset.policies.base import compiled, compiled_entry

observe: Callable[..., None]
chances: Callable[..., None]


class Steps(NamedTuple):
    """The functions of a forecast as Python calls them, event by event; `ahead` is the other two in one call."""

    observe: Callable[..., None]
    chances: Callable[..., None]
    ahead: Callable[..., None]


def observe_one(
    state: Any, layer: int, experts: Any, counts: Any, tokens: int, phase: int, request: int, token: int, guesses: Any
) -> None:
    """Learn from one event given by its parts."""
    observe(state, Seen(layer, experts, counts, tokens, phase, request, token, guesses))


def chances_one(
    state: Any, layer: int, experts: Any, counts: Any, tokens: int, phase: int, request: int, token: int, guesses: Any,
    target: int, distance: int, out: Any
) -> None:  # fmt: skip
    """Fill the chances of a layer ahead, once the event given by its parts is observed."""
    chances(state, Seen(layer, experts, counts, tokens, phase, request, token, guesses), target, distance, out)


def ahead_one(
    state: Any, layer: int, experts: Any, counts: Any, tokens: int, phase: int, request: int, token: int, guesses: Any,
    layers: int, out: Any
) -> None:  # fmt: skip
    """Learn from one event given by its parts, then fill a row of chances for each of the next layers."""
    seen = Seen(layer, experts, counts, tokens, phase, request, token, guesses)
    observe(state, seen)
    for d in range(len(out)):
        chances(state, seen, (layer + d + 1) % layers, d + 1, out[d])


_MADE: dict[type[Forecast], Steps] = {}
_ENTRIES = (observe_one, chances_one, ahead_one)


def steps_of(forecast: type[Forecast]) -> Steps:
    """The compiled functions of one forecast, made once per process; machine code comes from disk if it is there."""
    if forecast not in _MADE:
        space = bind(forecast, _ENTRIES, _ENTRIES, globals(), Path(__file__))
        _MADE[forecast] = Steps(space["observe_one"], space["chances_one"], space["ahead_one"])
    return _MADE[forecast]


def bind(
    forecast: type[Forecast],
    templates: Sequence[Callable[..., Any]],
    entries: Sequence[Callable[..., Any]],
    names: dict[str, Any],
    source: Path,
) -> dict[str, Any]:
    """Compile templates of a source file, in the order in which they call each other, for one forecast."""
    space = dict(names) | {"observe": forecast.observe, "chances": forecast.chances}
    tag = f"{forecast.name}_{_digest(source)}"
    for template in templates:
        bound = types.FunctionType(template.__code__, space, template.__name__, template.__defaults__)
        bound.__qualname__ = f"{template.__name__}_{tag}"
        space[template.__name__] = compiled_entry(bound) if template in entries else compiled(bound)
    return space


def _digest(source: Path) -> str:
    """A short hash of all source that ends up in the machine code; forecasts call each other, and parts of policies."""
    folders = (Path(__file__).parent, Path(base.__file__).parent)
    sources = [*(path for folder in folders for path in sorted(folder.glob("*.py"))), source]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]

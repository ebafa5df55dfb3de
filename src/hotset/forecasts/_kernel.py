"""Binds templates to the two functions of a forecast and compiles them, as hotset.cache.kernel does for policies."""

# ruff: noqa: F821, SIM110 - observe and probabilities are bound per forecast; compiled code knows no generators
from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hotset.forecasts.base import Forecast, Seen
from hotset.policies import base
from hotset.policies.base import bind as bind_templates
from hotset.policies.base import compiled

observe: Callable[..., None]
probabilities: Callable[..., None]


class Steps(NamedTuple):
    """The functions of a forecast as Python calls them, event by event; `pick` chooses by the probabilities."""

    observe: Callable[..., None]
    probabilities: Callable[..., None]
    pick: Callable[..., int]


def observe_one(
    state: Any, layer: int, experts: Any, counts: Any, tokens: int, phase: int, request: int, token: int, predicted: Any
) -> None:
    """Learn from one event given by its parts."""
    observe(state, Seen(layer, experts, counts, tokens, phase, request, token, predicted))


def probabilities_one(
    state: Any, layer: int, experts: Any, counts: Any, tokens: int, phase: int, request: int, token: int,
    predicted: Any, target: int, distance: int, out: Any
) -> None:  # fmt: skip
    """Fill the probabilities of a layer ahead, once the event given by its parts is observed."""
    probabilities(state, Seen(layer, experts, counts, tokens, phase, request, token, predicted), target, distance, out)


def pick_one(
    state: Any, layer: int, experts: Any, counts: Any, tokens: int, phase: int, request: int, token: int,
    predicted: Any, target: int, distance: int, slot_of: Any, least: float, out: Any, picked: Any
) -> int:  # fmt: skip
    """Fill in the likeliest experts of a layer ahead that have no slot, best first; returns how many there are.

    The probabilities of those picked are left in `out`; at most as many are picked as there are places.
    """
    probabilities(state, Seen(layer, experts, counts, tokens, phase, request, token, predicted), target, distance, out)
    for place in range(len(picked)):
        best = -1
        for expert in range(len(out)):
            better = out[expert] >= least and (best < 0 or out[expert] > out[best])
            if better and slot_of[expert] < 0 and not is_among(picked, place, expert):
                best = expert
        if best < 0:
            return place
        picked[place] = best
    return len(picked)


@compiled
def is_among(picked: Any, count: int, expert: int) -> bool:
    """Whether an expert is one of the first few."""
    for place in range(count):
        if picked[place] == expert:
            return True
    return False


_MADE: dict[type[Forecast], Steps] = {}
_ENTRIES = (observe_one, probabilities_one, pick_one)


def steps_of(forecast: type[Forecast]) -> Steps:
    """The compiled functions of one forecast, made once per process; machine code comes from disk if it is there."""
    if forecast not in _MADE:
        space = bind(forecast, _ENTRIES, _ENTRIES, globals())
        _MADE[forecast] = Steps(space["observe_one"], space["probabilities_one"], space["pick_one"])
    return _MADE[forecast]


def bind(
    forecast: type[Forecast],
    templates: Sequence[Callable[..., Any]],
    entries: Sequence[Callable[..., Any]],
    names: dict[str, Any],
    more_sources: Sequence[Path] = (),
) -> dict[str, Any]:
    """Compile templates, in the order in which they call each other, for one forecast."""
    bound = names | {"observe": forecast.observe, "probabilities": forecast.probabilities}
    sources = [*sources_of(forecast, templates), *more_sources]
    return bind_templates(templates, entries, bound, f"{forecast.name}_", sources)


def sources_of(forecast: type[Forecast], templates: Sequence[Callable[..., Any]]) -> list[Path]:
    """All source that ends up in the machine code; forecasts call each other, and parts of policies."""
    folders = (Path(__file__).parent, Path(base.__file__).parent)
    near = [path for folder in folders for path in sorted(folder.glob("*.py"))]
    own = [Path(template.__code__.co_filename) for template in templates]
    return list(dict.fromkeys([*near, *own, Path(inspect.getfile(forecast))]))

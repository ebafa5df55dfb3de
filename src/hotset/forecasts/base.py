"""What a forecast is: compiled functions that learn from events and say how likely experts are used soon.

A forecast file holds a NamedTuple of arrays (the state), two compiled functions and a frozen dataclass of options:

    observe(state, seen)
        learns from one event, once it is routed
    probabilities(state, seen, target, distance, out)
        fills out[experts]: the probability that the target layer's next event uses each expert, as known after `seen`,
        `distance` layers earlier

Distances wrap: after the last layer comes the first of the next pass. The same two functions run in the offline
evaluation, in the simulator's prefetch and in the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, TypeVar

from numba import njit

from hotset.errors import PolicyError
from hotset.policies.base import check_options
from hotset.shape import ModelShape

MAX_DISTANCE = 3

F = TypeVar("F", bound=Callable[..., Any])

_HOT: dict[str, Any] = {"nogil": True, "_nrt": False, "forceinline": True, "error_model": "numpy"}


def compiled(function: F) -> F:
    """Compile a function to be inlined where it is called, without allocation; it divides as numpy does.

    A check for zero before every division would keep loops over experts from being vectorised.
    """
    inlined: F = njit(**_HOT)(function)
    return inlined


class Seen(NamedTuple):
    """What is known once a layer has been routed."""

    layer: int
    experts: Any  # int32, rising
    counts: Any  # int32, tokens per expert
    tokens: int
    phase: int
    request: int
    token: int  # id of the token that the pass computes, -1 if not known or if there are several
    guesses: Any  # int16 [distances, width]: what the routers of the next layers make of this layer's input; -1: none


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The options of a forecast; subclasses add theirs and say how to start."""

    name: ClassVar[str]
    observe: ClassVar[Callable[..., Any]]
    probabilities: ClassVar[Callable[..., Any]]
    uses_tokens: ClassVar[bool] = False  # it goes by which token is computed, where that is known
    needs: ClassVar[str] = ""  # what a trace must hold beside the experts: "guesses" or "token_ids"

    def __post_init__(self) -> None:
        check_options(self)
        self.check()

    def check(self) -> None:
        """Raise PolicyError for options that make no sense."""

    def start(self, shape: ModelShape) -> Any:  # noqa: ARG002 - every forecast overrides this
        """Fresh state for a model of this shape."""
        raise PolicyError(f"{self.name} does not say how to start")

    @property
    def spec(self) -> str:
        """The shortest text that parses to this forecast again."""
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return self.name + (":" + ",".join(changed) if changed else "")

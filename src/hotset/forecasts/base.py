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
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from hotset.policies.base import Named
from hotset.policies.base import compiled_unchecked as compiled

__all__ = ["MAX_DISTANCE", "Forecast", "Seen", "compiled"]

MAX_DISTANCE = 3


class Seen(NamedTuple):
    """What is known once a layer has been routed."""

    layer: int
    experts: Any  # int32, rising
    counts: Any  # int32, tokens per expert
    tokens: int
    phase: int
    request: int
    token: int  # id of the token that the pass computes, -1 if not known or if there are several
    predictions: Any  # int16 [distances, width]: what the next routers make of this layer's input; -1: none


@dataclass(frozen=True, kw_only=True)
class Forecast(Named):
    """The options of a forecast; subclasses add theirs and say how to start."""

    probabilities: ClassVar[Callable[..., Any]]
    uses_tokens: ClassVar[bool] = False  # it goes by which token is computed, where that is known
    needs: ClassVar[str] = ""  # what a trace must hold beside the experts: "predictions" or "token_ids"
    on_device: ClassVar[bool] = False  # a GPU that drives itself has its rules, too
    renamed: ClassVar[dict[str, str]] = {"chances": "probabilities"}

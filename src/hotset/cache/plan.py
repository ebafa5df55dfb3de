"""How a budget of slots is laid out: per layer or in one pool, with floors, beside a little staging."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from hotset.checks import choice, instance, put, renamed, shown, whole
from hotset.errors import BudgetError, HotsetError
from hotset.shape import MAX_SLOTS, ExpertKey, ModelShape, format_size


class Scope(StrEnum):
    """Whether slots belong to a layer or to all."""

    LAYER = "layer"
    POOL = "pool"


@renamed(ahead="prefetch_rows")
@dataclass(frozen=True, slots=True)
class SlotPlan:
    """So many slots that cache, and beside them a few for staging, which experts pass, and rows for prefetch."""

    shape: ModelShape
    slots: int
    scope: Scope = Scope.LAYER
    staging: int = 0
    prefetch_rows: int = 0

    def __post_init__(self) -> None:
        instance(self.shape, ModelShape, "the shape of a plan")
        put(self, scope=choice(self.scope, Scope, "the scope"))
        put(self, slots=whole(self.slots, "the slots of a plan", -MAX_SLOTS, MAX_SLOTS, BudgetError))
        put(self, staging=whole(self.staging, "staging", 0, MAX_SLOTS, BudgetError))
        put(self, prefetch_rows=whole(self.prefetch_rows, "the number of rows for prefetch", 0, MAX_SLOTS, BudgetError))
        if self.slots < self.shape.top_k:
            raise BudgetError(
                f"a budget of {self.slots} slots cannot hold one event ({self.shape.top_k} experts); "
                f"the smallest that works is {self.shape.top_k} slots{self._in_bytes(self.shape.top_k)}"
            )

    @property
    def cached(self) -> int:
        """The slots that cache, never more than there are experts."""
        return min(self.slots, self.shape.total_experts)

    @property
    def swaps(self) -> int:
        """How many experts of an event may be evicted by others of it: each takes a row of staging, and one is left.

        A plan without staging does not say how events are computed, and sets no limit.
        """
        return self.staging - 1 if self.staging else self.shape.experts

    def per_layer(self) -> npt.NDArray[np.int64]:
        """Slots of each layer under the layer scope; the first layers get what does not divide."""
        share, rest = divmod(self.cached, self.shape.layers)
        sizes = np.full(self.shape.layers, share, np.int64)
        sizes[:rest] += 1
        return sizes

    def floors(self) -> npt.NDArray[np.int32]:
        """The residents of a layer that others cannot take away in a pool: top_k + 1 each, once that much fits."""
        floor = self.shape.top_k + 1
        fits = self.shape.layers * floor <= self.cached
        return np.full(self.shape.layers, floor if fits else 0, np.int32)

    def bounds(self) -> npt.NDArray[np.int64]:
        """Where each group of slots begins, and where the last ends."""
        sizes = self.per_layer() if self.scope is Scope.LAYER else [self.cached]
        return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)

    def checked_key(self, key: object) -> ExpertKey:
        """An expert of this plan's model, or HotsetError."""
        try:
            layer, expert = map(operator.index, key)  # type: ignore[call-overload]
        except (TypeError, ValueError):
            raise HotsetError(f"an expert is named by the numbers of its layer and its own, not {shown(key)}") from None
        if not (0 <= layer < self.shape.layers and 0 <= expert < self.shape.experts):
            raise HotsetError(
                f"layer {layer}, expert {expert} does not exist: "
                f"the model has layers 0 to {self.shape.layers - 1} and experts 0 to {self.shape.experts - 1}"
            )
        return ExpertKey(layer, expert)

    def checked_grid(self, values: object) -> npt.NDArray[np.float64]:
        """One number for each expert of this plan's model, or HotsetError."""
        shape = (self.shape.layers, self.shape.experts)
        if not isinstance(values, np.ndarray) or values.shape != shape or values.dtype.kind not in "biuf":
            raise HotsetError(f"a grid of numbers of shape {shape} is needed, not {shown(values)}")
        return np.asarray(values, np.float64)

    def warning(self, policy: str) -> str | None:
        """What a person should know of this plan, if anything."""
        cycle = self.shape.token_cycle
        if self.scope is Scope.POOL and self.cached < cycle and policy == "lru":
            return (
                f"a pool of {self.cached} slots is less than one token's cycle ({cycle} = layers x top_k): lru evicts "
                f"every expert before its layer's next turn; give it at least {cycle} slots"
                f"{self._in_bytes(cycle)}, or use --scope layer or --policy blend"
            )
        return None

    def _in_bytes(self, slots: int) -> str:
        """What a person would have to ask for, staging included."""
        size = self.shape.expert_bytes
        return f" ({format_size((slots + self.staging + self.prefetch_rows) * size)})" if size else ""

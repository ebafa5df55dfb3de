"""What the kernels of few tokens are given: pairs of a token and one of its experts, and room between launches."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch

Tensor = torch.Tensor


class Phase(IntEnum):
    """Which pairs a launch computes, as the kernels have it.

    All; or those that are there, then those that arrive late. Or in any number of parts: what is not late is kept, and
    the last part, late as it is, is summed with what was kept.
    """

    ALL = 0
    EARLY = 1
    LATE = 2
    KEEP = 3
    LAST = 4


class Pairs(NamedTuple):
    """The pairs of a launch, in the router's order."""

    row: Tensor  # int32 [pairs]: where the expert of each lies; below zero: with another machine
    late: Tensor | None  # int8 [pairs]: which of them are late
    phase: Phase = Phase.ALL
    stamp: Tensor | None = None  # int64 [2]: is told when the early phase ended, and when the late one began


@dataclass(frozen=True, eq=False)
class Scratch:
    """What passes between launches; layers that run one after another can share it."""

    hidden: Tensor  # [pairs, ...]: what lies between the products
    raw: Tensor  # [pairs, width]: results of early pairs, in the type computed in
    late: Tensor  # int8 [pairs]: all zeros, for callers that give none
    ordered: Tensor | None = None  # [tokens, ...]: the input in the order of the first product, where that has one

    def serves(self, other: Scratch) -> bool:
        """Whether it can be used instead of another."""
        return all(_serves(mine, its) for mine, its in zip(self._tensors, other._tensors, strict=True))

    @property
    def _tensors(self) -> tuple[Tensor | None, ...]:
        return self.hidden, self.raw, self.late, self.ordered


def _serves(mine: Tensor | None, its: Tensor | None) -> bool:
    if mine is None or its is None:
        return mine is its
    return mine.dtype == its.dtype and mine.shape[1:] == its.shape[1:] and len(mine) >= len(its)

"""The two products of an expert by tiles, in whatever format has a tile loader."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl

from hotset.engine.kernels.activations import Activation
from hotset.engine.kernels.launches import Launches, kind_of
from hotset.engine.kernels.linear import RowLinear
from hotset.engine.kernels.pairs import Pairs, Phase, Scratch
from hotset.engine.kernels.triton_kernels import down_kernel, up_kernel
from hotset.engine.kernels.tuning import Choice, Problem
from hotset.formats import TileLoader

Tensor = torch.Tensor

PAIRS_AT_ONCE = 8
"""So many experts of a token are multiplied side by side; each takes registers of its own."""
ROUTER_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class UnsupportedExpertsError(ValueError):
    """What these kernels cannot compute."""


@dataclass(frozen=True, eq=False)
class TiledLinear:
    """One linear map of all rows as the kernels take it: the parts of its matrices, and what makes tiles of them."""

    linear: RowLinear
    tile: TileLoader
    parts: tuple[Tensor, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, linear: RowLinear) -> TiledLinear:
        """The linear map in a format that has a tile loader."""
        tile = linear.format.tile()
        if tile is None:
            raise UnsupportedExpertsError(f"there is no kernel for {linear.format.name}")
        return cls(linear, tile, linear.views, tuple(view.stride(0) for view in linear.views))

    @property
    def biases(self) -> Tensor | None:
        """Those of all rows, if there are any."""
        return self.linear.biases

    @property
    def words(self) -> str:
        """What its matrices are made of, as far as the speed of loads depends on it."""
        return self.linear.format.tuned_as


class Products:
    """The two products of a layer's experts; here by tiles."""

    timed_phases: ClassVar[tuple[Phase, ...]] = (Phase.ALL,)

    def __init__(self, up: TiledLinear, down: TiledLinear, activation: Activation, top_k: int) -> None:
        self.up, self.down, self.activation, self.top_k = up, down, activation, top_k
        self.dtype = up.linear.dtype
        self.inner, self.width = down.linear.depth, down.linear.width
        self.group = min(triton.next_power_of_2(top_k), PAIRS_AT_ONCE)
        self._launches: dict[tuple[str, Choice], Launches] = {}

    def scratch(self, pairs: int, device: torch.device) -> Scratch:
        """Room for so many pairs."""
        hidden = torch.zeros((pairs, self.inner), dtype=self.dtype, device=device)
        late = torch.zeros(pairs, dtype=torch.int8, device=device)
        return Scratch(hidden, hidden.new_zeros((pairs, self.width)), late)

    def room(self, pairs: int, raw: Tensor, late: Tensor) -> Scratch:
        """Room for so many pairs, with results and lateness in the memory given."""
        return Scratch(torch.empty((pairs, self.inner), dtype=self.dtype, device=raw.device), raw, late)

    def multiply_up(self, x: Tensor, pairs: Pairs, choices: tuple[Choice, Choice], scratch: Scratch) -> None:
        """From the input to what lies between the products."""
        linear, activation, choice = self.up, self.activation, choices[0]
        stamp, late = pairs.stamp, scratch.late if pairs.late is None else pairs.late
        bias, hidden = _or(linear.biases, scratch.hidden), scratch.hidden
        launch = self._launch("up", choice, up_kernel)
        launch(
            (len(x) * self.top_k, triton.cdiv(self.inner, choice.block_n)),
            (stamp is not None, *kind_of(x, hidden)),
            x, linear.parts, bias, hidden, pairs.row, late, int(pairs.phase), _or(stamp, late),
            linear.strides, bias.stride(0), self.inner, x.shape[1], self.top_k, activation.function, activation.alpha,
            activation.limit, activation.gated, activation.interleaved, linear.tile.function, linear.tile.settings,
            linear.biases is not None, stamp is not None, choice.block_n, choice.block_k, choice.stages, choice.unroll,
            linear.tile.lane,
        )  # fmt: skip

    def multiply_down(
        self, pairs: Pairs, weights: Tensor, out: Tensor, choices: tuple[Choice, Choice], scratch: Scratch
    ) -> None:
        """From there to the weighted sum."""
        linear, choice, stamp = self.down, choices[1], pairs.stamp
        late, bias = scratch.late if pairs.late is None else pairs.late, _or(linear.biases, scratch.hidden)
        launch = self._launch("down", choice, down_kernel)
        launch(
            (len(out), triton.cdiv(self.width, choice.block_n)),
            (stamp is not None, weights.dtype, *kind_of(scratch.hidden, scratch.raw, out)),
            scratch.hidden, linear.parts, bias, weights, scratch.raw, out, pairs.row, late, int(pairs.phase),
            _or(stamp, late), linear.strides, bias.stride(0), self.width, self.inner, self.top_k,
            linear.tile.function, linear.tile.settings, linear.biases is not None, stamp is not None,
            self.summed(weights), self.group, triton.next_power_of_2(self.top_k), choice.block_n, choice.block_k,
            choice.stages, choice.unroll, linear.tile.lane,
        )  # fmt: skip

    def problems(self, tokens: int) -> tuple[Problem, Problem]:
        """What the two kernels have to do, as far as their speed depends on it."""
        first, second, gated = self.up, self.down, self.activation.gated
        pairs = tokens * self.top_k
        up = Problem("up", self.inner, self.width, first.words, first.tile.by_columns, gated, 1, pairs)
        down = Problem("down", self.width, self.inner, second.words, second.tile.by_columns, False, self.group, tokens)
        return up, down

    def summed(self, weights: Tensor) -> Any:
        """The type in which experts are weighted and summed."""
        return _summed(self.dtype, weights.dtype)

    def _launch(self, name: str, choice: Choice, kernel: Any) -> Launches:
        found = self._launches.get((name, choice))
        if found is None:
            # Without fusion a product is rounded before it is added, as in torch; kernels name what they want fused.
            found = Launches(kernel, num_warps=choice.warps, enable_fp_fusion=False)
            self._launches[name, choice] = found
        return found


@cache
def _summed(dtype: torch.dtype, weights: torch.dtype) -> Any:
    return ROUTER_DTYPES[torch.promote_types(dtype, weights)]


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """A kernel has to be given some pointer, even where it does not look."""
    return stand_in if tensor is None else tensor

"""Whole experts for few tokens in two launches, on weights where they lie in their rows.

The first kernel multiplies and gates, the second multiplies, weights and sums. A pair is one token with one of its
experts, in the router's order; the row of a pair is where its expert lies. Nothing here waits for the host
or allocates, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import triton
import triton.language as tl

from hotset.engine.arena import Arena
from hotset.engine.kernels.activations import Activation, activation_of
from hotset.engine.kernels.cpu import RowLinear
from hotset.engine.kernels.spec import ExpertSpec
from hotset.engine.kernels.triton_kernels import down_kernel, up_kernel
from hotset.engine.kernels.tuning import BUCKETS, Choice, Problem, bucket, chosen, remembered
from hotset.formats import TileLoader, Weight, element_type, weight_of
from hotset.store import SlotLayout

Tensor = torch.Tensor

MAX_TOKENS = 8
PAIRS_AT_ONCE = 8
"""So many experts of a token are multiplied side by side; each takes registers of its own."""
DTYPES = ("float32", "bfloat16", "float16")


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


@dataclass(frozen=True, eq=False)
class Scratch:
    """What passes between launches; layers that run one after another can share it."""

    hidden: Tensor  # [pairs, intermediate], in the type computed in
    raw: Tensor  # [pairs, width]: results of early pairs, in the type computed in
    late: Tensor  # int8 [pairs]: all zeros, for callers that give none

    @classmethod
    def of(cls, spec: ExpertSpec, layout: SlotLayout, pairs: int, device: torch.device) -> Scratch:
        """Room for so many pairs."""
        down = _down(spec, layout)
        hidden = torch.zeros((pairs, down.inputs), dtype=element_type(down.format.dtype), device=device)
        late = torch.zeros(pairs, dtype=torch.int8, device=device)
        return cls(hidden, hidden.new_zeros((pairs, down.outputs)), late)

    def serves(self, spec: ExpertSpec, layout: SlotLayout, pairs: int) -> bool:
        """Whether it is of use to these experts."""
        down = _down(spec, layout)
        same = self.hidden.dtype == element_type(down.format.dtype) and len(self.late) >= pairs
        return same and (self.raw.shape[1], self.hidden.shape[1]) == (down.outputs, down.inputs)


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


class UnsupportedExpertsError(ValueError):
    """What these kernels cannot compute."""


class TritonExperts:
    """All experts of one layer, for few tokens."""

    def __init__(
        self,
        arena: Arena,
        layout: SlotLayout,
        spec: ExpertSpec,
        *,
        top_k: int,
        max_tokens: int = MAX_TOKENS,
        scratch: Scratch | None = None,
        choices: tuple[Choice, Choice] | None = None,
    ) -> None:
        activation = _activation(spec, layout)
        reason = _reason(spec, layout, activation)
        if reason is not None or activation is None:
            raise UnsupportedExpertsError(reason)
        self.up = TiledLinear.of(RowLinear(arena, layout, spec.up, spec.up_bias, spec.up_transposed))
        self.down = TiledLinear.of(RowLinear(arena, layout, spec.down, spec.down_bias, spec.down_transposed))
        self.dtype, self.top_k, self.max_tokens = self.up.linear.dtype, top_k, max_tokens
        self.activation = activation
        self.inner, self.width = self.down.linear.depth, self.down.linear.width
        pairs = max_tokens * top_k
        if scratch is None or not scratch.serves(spec, layout, pairs):
            scratch = Scratch.of(spec, layout, pairs, arena.memory.device)
        self.scratch = scratch
        self.group = min(triton.next_power_of_2(top_k), PAIRS_AT_ONCE)
        self._choices = {} if choices is None else dict.fromkeys(BUCKETS, choices)

    @staticmethod
    def supports(spec: ExpertSpec, layout: SlotLayout) -> str | None:
        """Why these experts cannot be computed here, in words; None if they can."""
        return _reason(spec, layout, _activation(spec, layout))

    def __call__(
        self,
        x: Tensor,
        pair_row: Tensor,
        pair_late: Tensor | None,
        weights: Tensor,
        out: Tensor,
        phase: Phase = Phase.ALL,
        stamp: Tensor | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        """out = what the experts make of x [tokens, width], or the part of the work that belongs to a phase.

        `pair_row` [tokens * top_k] says the row of every pair or is below zero, `pair_late` which of them are late,
        `weights` [tokens, top_k] what the router gives them. The late phase expects what the early one has left.
        `stamp` (int64 [2]) is told, in nanoseconds, when the early phase ended and when the late one began. A caller
        with several events under way at once brings a scratch for each.
        """
        scratch = scratch or self.scratch
        most = len(scratch.hidden) // self.top_k
        if len(x) > most or not (x.is_contiguous() and weights.is_contiguous() and out.is_contiguous()):
            raise ValueError(f"up to {most} tokens are served, and their tensors must be contiguous")
        self.multiply_up(x, pair_row, pair_late, phase, stamp=stamp, scratch=scratch)
        self.multiply_down(pair_row, pair_late, weights, out, phase, stamp=stamp, scratch=scratch)

    def warm_up(self, tokens: int, weights_dtype: torch.dtype = torch.float32) -> None:
        """Choose and compile what serves so many tokens; before a capture, since this waits for the device."""
        device = self.scratch.hidden.device
        trial = _Trial(self, tokens, weights_dtype, device)
        if bucket(tokens) not in self._choices:
            up, down = self._problems(tokens)
            self._choices[bucket(tokens)] = chosen(up, trial.up, device), chosen(down, trial.down, device)
        self(trial.x, trial.rows[0], None, trial.weights, trial.out)

    def multiply_up(
        self,
        x: Tensor,
        pair_row: Tensor,
        pair_late: Tensor | None,
        phase: Phase,
        choice: Choice | None = None,
        stamp: Tensor | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        """The first kernel: from x to the scratch."""
        linear, activation, scratch = self.up, self.activation, scratch or self.scratch
        choice = choice or self._choice(len(x))[0]
        late, bias = _or(pair_late, scratch.late), _or(linear.biases, scratch.hidden)
        grid = (len(x) * self.top_k, triton.cdiv(self.inner, choice.block_n))
        launch: Any = up_kernel[grid]
        launch(
            x, linear.parts, bias, scratch.hidden, pair_row, late, int(phase), _or(stamp, late), linear.strides,
            bias.stride(0), self.inner, x.shape[1], self.top_k, activation.function, activation.alpha,
            activation.limit, activation.gated, activation.interleaved, linear.tile.function, linear.tile.settings,
            linear.biases is not None, stamp is not None, choice.block_n, choice.block_k, choice.stages, choice.unroll,
            linear.tile.lane, num_warps=choice.warps, enable_fp_fusion=False,
        )  # fmt: skip

    def multiply_down(
        self,
        pair_row: Tensor,
        pair_late: Tensor | None,
        weights: Tensor,
        out: Tensor,
        phase: Phase,
        choice: Choice | None = None,
        stamp: Tensor | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        """The second kernel: from the scratch to the sum."""
        linear, scratch = self.down, scratch or self.scratch
        choice = choice or self._choice(len(out))[1]
        late, bias = _or(pair_late, scratch.late), _or(linear.biases, scratch.hidden)
        summed = torch.promote_types(self.dtype, weights.dtype)
        # Without fusion a product is rounded before it is added, as in torch; the kernels name what they want fused.
        launch: Any = down_kernel[(len(out), triton.cdiv(self.width, choice.block_n))]
        launch(
            scratch.hidden, linear.parts, bias, weights, scratch.raw, out, pair_row, late, int(phase),
            _or(stamp, late), linear.strides, bias.stride(0), self.width, self.inner, self.top_k,
            linear.tile.function, linear.tile.settings, linear.biases is not None, stamp is not None,
            ROUTER_DTYPES[summed], self.group,
            triton.next_power_of_2(self.top_k), choice.block_n, choice.block_k, choice.stages, choice.unroll,
            linear.tile.lane, num_warps=choice.warps, enable_fp_fusion=False,
        )  # fmt: skip

    def _choice(self, tokens: int) -> tuple[Choice, Choice]:
        found = self._choices.get(bucket(tokens))
        if found is None:  # not warmed up: what an earlier run has measured, and the same from here on
            device, (up, down) = self.up.parts[0].device, self._problems(tokens)
            found = self._choices[bucket(tokens)] = remembered(up, device), remembered(down, device)
        return found

    def _problems(self, tokens: int) -> tuple[Problem, Problem]:
        """What the two kernels have to do, as far as their speed depends on it."""
        few, pairs = bucket(tokens), bucket(tokens) * self.top_k
        first, second = self.up, self.down
        up = Problem(
            "up", self.inner, self.width, first.words, first.tile.by_columns, self.activation.gated, 1, pairs
        )  # fmt: skip
        down = Problem(
            "down", self.width, self.inner, second.words, second.tile.by_columns, False, self.group, few
        )  # fmt: skip
        return up, down


class _Trial:
    """Calls of both kernels with rows all over the arena, so that no cache holds what the next one reads."""

    def __init__(
        self, kernels: TritonExperts, tokens: int, weights_dtype: torch.dtype, device: torch.device, sets: int = 16
    ) -> None:
        random = torch.Generator("cpu").manual_seed(0)
        self.kernels, rows = kernels, len(kernels.up.parts[0])
        tokens = min(bucket(tokens), kernels.max_tokens)
        shape = (sets, tokens * kernels.top_k)
        self.rows = torch.randint(rows, shape, generator=random, dtype=torch.int32, device="cpu").to(device)
        self.x = torch.zeros((tokens, kernels.width), dtype=kernels.dtype, device=device)
        self.weights = torch.zeros((tokens, kernels.top_k), dtype=weights_dtype, device=device)
        self.out = torch.empty_like(self.x)

    def up(self, choice: Choice) -> None:
        """The first kernel, once with every set of rows."""
        for rows in self.rows:
            self.kernels.multiply_up(self.x, rows, None, Phase.ALL, choice)

    def down(self, choice: Choice) -> None:
        """The second kernel, once with every set of rows."""
        for rows in self.rows:
            self.kernels.multiply_down(rows, None, self.weights, self.out, Phase.ALL, choice)


ROUTER_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """A kernel has to be given some pointer, even where it does not look."""
    return stand_in if tensor is None else tensor


def _down(spec: ExpertSpec, layout: SlotLayout) -> Weight:
    """The second matrix, which says how wide experts are inside, and how wide what they return."""
    return weight_of(layout, spec.down, transposed=spec.down_transposed)


def _activation(spec: ExpertSpec, layout: SlotLayout) -> Activation | None:
    return activation_of(spec, element_type(weight_of(layout, spec.up, transposed=spec.up_transposed).format.dtype))


def _reason(spec: ExpertSpec, layout: SlotLayout, activation: Activation | None) -> str | None:
    if spec.norm is not None:
        return "its experts end in a norm of their own"
    up, down = weight_of(layout, spec.up, transposed=spec.up_transposed), _down(spec, layout)
    biases = [layout.part(name).dtype for name in (spec.up_bias, spec.down_bias) if name is not None]
    dtypes = {up.format.dtype, down.format.dtype, *biases}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        return f"its experts are stored as {' and '.join(sorted(dtypes))}"
    without = next((weight.format.name for weight in (up, down) if weight.format.tile() is None), None)
    if without is not None:
        return f"its experts are stored as {without}, for which there is no kernel"
    if activation is None:
        return "what its experts compute between their two products is none of the known kinds"
    if up.outputs != down.inputs * (2 if activation.gated else 1):
        return f"{up.outputs} columns of its first matrix do not make {down.inputs} rows of the second"
    return None

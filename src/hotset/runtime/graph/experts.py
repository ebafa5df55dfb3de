# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Whole experts for few tokens in two launches, on weights where they lie in their slots.

The first kernel multiplies and gates, the second multiplies, weights and sums. A pair is one token with one of its
experts, in the router's order; the row of a pair is the slot that its expert lies in. Nothing here waits for the host
or allocates, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from hotset.runtime.arena import Arena
from hotset.runtime.graph.activations import Activation, activation_of, rounded
from hotset.runtime.graph.tuning import BUCKETS, Choice, Problem, bucket, chosen, default
from hotset.runtime.math import ExpertMath, SlotLinear
from hotset.store import SlotLayout

Tensor = torch.Tensor

MOST_TOKENS = 8
PAIRS_AT_ONCE = 8
"""So many experts of a token are multiplied side by side; each takes registers of its own."""
DTYPES = ("float32", "bfloat16", "float16")


class Phase(IntEnum):
    """Which pairs a launch computes: all, those that are there, or those that arrive late."""

    ALL = 0
    EARLY = 1
    LATE = 2


_ALL = tl.constexpr(0)
_EARLY = tl.constexpr(1)
_LATE = tl.constexpr(2)


@triton.jit
def _is_wanted(row, late, phase):
    """Whether pairs are to be computed; a row below zero is an expert of another machine."""
    return (row >= 0) & ((phase == _ALL) | ((late != 0) == (phase == _LATE)))


@triton.jit
def _note_time(stamp, now):
    """Have the first program note the time, in nanoseconds."""
    if now & (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(stamp, globaltimer().to(tl.int64))


@triton.jit
def _places(columns, depth, n: tl.constexpr, k: tl.constexpr, transposed: tl.constexpr):
    """Where the elements of a tile lie in a matrix of n outputs and k inputs."""
    if transposed:
        return depth[None, :] * n + columns[:, None]
    else:  # noqa: RET505 - Triton wants both arms of a choice at compile time
        return columns[:, None] * k + depth[None, :]


@triton.jit
def _plus(total, tile, values, rows: tl.constexpr, block_k: tl.constexpr, lane: tl.constexpr):
    """Add the products of a tile to sums of its shape, or of a lane-th of its depth.

    A lane is what one load brings to a thread: summed at once, its products take one register, not eight.
    """
    tile = tile.to(tl.float32)
    values = tl.broadcast_to(values, tile.shape)
    if lane == 1:
        return tl.fma(tile, values, total)
    else:  # noqa: RET505
        parts = tl.sum(tl.reshape(tile * values, (rows, block_k // lane, lane)), axis=2)
        return total + tl.reshape(parts, total.shape)


@triton.jit
def _times(
    x, matrix, columns, inside, n: tl.constexpr, k: tl.constexpr, transposed: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr, stages: tl.constexpr, unroll: tl.constexpr, lane: tl.constexpr,
):  # fmt: skip
    """One row times some columns of one matrix."""
    dtype = matrix.dtype.element_ty
    total = tl.zeros((block_n, block_k // lane), tl.float32)
    for start in tl.range(0, k, block_k, num_stages=stages, loop_unroll_factor=unroll):
        depth = start + tl.arange(0, block_k)
        there = depth < k
        places = _places(columns, depth, n, k, transposed)
        mask = inside[:, None] & there[None, :]
        tile = tl.load(matrix + places, mask=mask, other=0.0, eviction_policy="evict_first")
        values = tl.load(x + depth, mask=there, other=0.0)
        values = values.to(dtype).to(tl.float32)[None, :]
        total = _plus(total, tile, values, block_n, block_k, lane)
    return tl.sum(total, axis=1)


@triton.jit
def _times_both(
    x, matrix, first, second, inside, n: tl.constexpr, k: tl.constexpr, transposed: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr, stages: tl.constexpr, unroll: tl.constexpr, lane: tl.constexpr,
):  # fmt: skip
    """One row times some columns of both halves of one matrix, with the loads of both under way at once."""
    dtype = matrix.dtype.element_ty
    total = tl.zeros((block_n, block_k // lane), tl.float32)
    other = tl.zeros((block_n, block_k // lane), tl.float32)
    for start in tl.range(0, k, block_k, num_stages=stages, loop_unroll_factor=unroll):
        depth = start + tl.arange(0, block_k)
        there = depth < k
        mask = inside[:, None] & there[None, :]
        places = _places(first, depth, n, k, transposed)
        tile = tl.load(matrix + places, mask=mask, other=0.0, eviction_policy="evict_first")
        places = _places(second, depth, n, k, transposed)
        twin = tl.load(matrix + places, mask=mask, other=0.0, eviction_policy="evict_first")
        values = tl.load(x + depth, mask=there, other=0.0)
        values = values.to(dtype).to(tl.float32)[None, :]
        total = _plus(total, tile, values, block_n, block_k, lane)
        other = _plus(other, twin, values, block_n, block_k, lane)
    return tl.sum(total, axis=1), tl.sum(other, axis=1)


@triton.jit
def _biased(product, bias, columns, inside, has_bias: tl.constexpr, dtype: tl.constexpr):
    """A product as stock has it: rounded before the bias is added, and again after."""
    product = rounded(product, dtype)
    if has_bias:
        product = rounded(product + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32), dtype)
    return product


@triton.jit(do_not_specialize=["phase", "pair_row", "pair_late"])
def up_kernel(
    x, w, bias, h, pair_row, pair_late, phase, stamp, slot_stride, bias_stride,
    n: tl.constexpr, k: tl.constexpr, top_k: tl.constexpr, activate: tl.constexpr, alpha: tl.constexpr,
    limit: tl.constexpr, gated: tl.constexpr, interleaved: tl.constexpr, transposed: tl.constexpr,
    has_bias: tl.constexpr, clocked: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
    stages: tl.constexpr, unroll: tl.constexpr, lane: tl.constexpr,
):  # fmt: skip
    """h[pair] = the gate of x[token] times the first matrix, n columns of it, for one block of columns of one pair.

    Pairs come first in the order of programs: those of one expert read the same block at the same time, once from
    memory. The phase is no constant: one binary serves all phases, so that they cannot differ in a bit.
    """
    pair = tl.program_id(0)
    if clocked:
        _note_time(stamp + 1, phase == _LATE)
    row = tl.load(pair_row + pair)
    if not _is_wanted(row, tl.load(pair_late + pair), phase):
        return
    dtype = h.dtype.element_ty
    matrix = w + row.to(tl.int64) * slot_stride
    biases = bias + row.to(tl.int64) * bias_stride
    token = x + (pair // top_k) * k
    columns = tl.program_id(1) * block_n + tl.arange(0, block_n)
    inside = columns < n
    if gated and interleaved:
        both = tl.program_id(1) * (2 * block_n) + tl.arange(0, 2 * block_n)
        product = _times(
            token, matrix, both, both < 2 * n, 2 * n, k, transposed, 2 * block_n, block_k, stages, unroll, lane
        )
        product = _biased(product, biases, both, both < 2 * n, has_bias, dtype)
        gate, up = tl.split(tl.reshape(product, (block_n, 2)))
    elif gated:
        gate, up = _times_both(
            token, matrix, columns, columns + n, inside, 2 * n, k, transposed, block_n, block_k, stages, unroll, lane
        )
        gate = _biased(gate, biases, columns, inside, has_bias, dtype)
        up = _biased(up, biases, columns + n, inside, has_bias, dtype)
    else:
        gate = _times(token, matrix, columns, inside, n, k, transposed, block_n, block_k, stages, unroll, lane)
        gate = _biased(gate, biases, columns, inside, has_bias, dtype)
        up = gate
    result = activate(gate, up, alpha, limit, dtype)
    tl.store(h + pair * n + columns, result.to(dtype), mask=inside)


@triton.jit
def _pairs_times(
    h, matrices, pairs, take, columns, inside, n: tl.constexpr, k: tl.constexpr, transposed: tl.constexpr,
    group: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, stages: tl.constexpr, unroll: tl.constexpr,
    lane: tl.constexpr,
):  # fmt: skip
    """The rows of some pairs times some columns of their matrices, all pairs side by side: [group, block_n]."""
    total = tl.zeros((group, block_n, block_k // lane), tl.float32)
    for start in tl.range(0, k, block_k, num_stages=stages, loop_unroll_factor=unroll):
        depth = start + tl.arange(0, block_k)
        there = depth < k
        places = _places(columns, depth, n, k, transposed)
        mask = inside[:, None] & there[None, :]
        tile = tl.load(
            matrices[:, None, None] + places[None, :, :], mask=take[:, None, None] & mask[None, :, :], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        values = tl.load(
            h + pairs[:, None] * k + depth[None, :], mask=take[:, None] & there[None, :], other=0.0
        ).to(tl.float32)  # fmt: skip
        total = _plus(total, tile, values[:, None, :], group * block_n, block_k, lane)
    return tl.sum(total, axis=2)


@triton.jit(do_not_specialize=["phase", "pair_row", "pair_late", "weights"])
def down_kernel(
    h, w, bias, weights, raw, out, pair_row, pair_late, phase, stamp, slot_stride, bias_stride,
    n: tl.constexpr, k: tl.constexpr, top_k: tl.constexpr, transposed: tl.constexpr, has_bias: tl.constexpr,
    clocked: tl.constexpr,
    summed: tl.constexpr, group: tl.constexpr, lanes: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
    stages: tl.constexpr, unroll: tl.constexpr, lane: tl.constexpr,
):  # fmt: skip
    """out[token] = the weighted sum of what its experts make of h, for one block of columns of one token.

    Where an expert is late, the early phase sums nothing: each pair's result goes to `raw`, where the late phase finds
    it. Where none is, the early phase does all, and the late one nothing.
    """
    token = tl.program_id(0)
    mine = tl.arange(0, lanes)
    its_row = tl.load(pair_row + token * top_k + mine, mask=mine < top_k, other=-1)
    its_late = tl.load(pair_late + token * top_k + mine, mask=mine < top_k, other=0)
    waits = tl.max(((its_row >= 0) & (its_late != 0)).to(tl.int32), axis=0)
    if (phase == _LATE) & (waits == 0):
        return
    columns = tl.program_id(1) * block_n + tl.arange(0, block_n)
    inside = columns < n
    dtype = h.dtype.element_ty
    total = tl.zeros((block_n,), tl.float32)
    for first in tl.static_range(0, top_k, group):
        number = first + tl.arange(0, group)
        real = number < top_k
        pairs = token * top_k + number
        row = tl.load(pair_row + pairs, mask=real, other=-1)
        late = tl.load(pair_late + pairs, mask=real, other=0)
        weight = tl.load(weights + pairs, mask=row >= 0, other=0.0).to(tl.float32)  # here, to arrive with the rest
        take = _is_wanted(row, late, phase)
        slot = tl.where(take, row, 0).to(tl.int64)
        result = _pairs_times(
            h, w + slot * slot_stride, pairs, take, columns, inside, n, k, transposed, group,
            block_n, block_k, stages, unroll, lane,
        )  # fmt: skip
        result = rounded(result, dtype)
        taken = take[:, None] & inside[None, :]
        if has_bias:
            added = tl.load(bias + (slot * bias_stride)[:, None] + columns[None, :], mask=taken, other=0.0)
            result = rounded(result + added.to(tl.float32), dtype)
        places = raw + pairs[:, None] * n + columns[None, :]
        if (phase == _EARLY) & (waits != 0):
            tl.store(places, result.to(dtype), mask=taken)
        if phase == _LATE:
            earlier = (row >= 0) & (late == 0)
            known = tl.load(places, mask=earlier[:, None] & inside[None, :], other=0.0).to(tl.float32)
            result = tl.where(take[:, None], result, known)
        weighted = rounded(result * weight[:, None], summed)
        for i in tl.static_range(group):
            # One after another, as the router has them; a sum over the axis would take its own order.
            total += tl.sum(tl.where(number[:, None] == first + i, weighted, 0.0), axis=0)
    if (phase != _EARLY) | (waits == 0):
        tl.store(out + token * n + columns, rounded(total, summed).to(out.dtype.element_ty), mask=inside)
    if clocked:
        _note_time(stamp, phase == _EARLY)


@dataclass(frozen=True, eq=False)
class Scratch:
    """What passes between launches; layers that run one after another can share it."""

    hidden: Tensor  # [pairs, intermediate], in the weights' type
    raw: Tensor  # [pairs, width]: results of early pairs, in the weights' type
    late: Tensor  # int8 [pairs]: nobody is, for whoever does not say

    @classmethod
    def of(cls, math: ExpertMath, layout: SlotLayout, pairs: int, device: torch.device) -> Scratch:
        """Room for so many pairs."""
        inner, width = _sizes(math, layout)
        hidden = torch.zeros((pairs, inner), dtype=getattr(torch, layout.part(math.down).dtype), device=device)
        late = torch.zeros(pairs, dtype=torch.int8, device=device)
        return cls(hidden, hidden.new_zeros((pairs, width)), late)

    def serves(self, math: ExpertMath, layout: SlotLayout, pairs: int) -> bool:
        """Whether it is of use to these experts."""
        inner, width = self.hidden.shape[1], self.raw.shape[1]
        same = self.hidden.dtype == getattr(torch, layout.part(math.down).dtype) and len(self.late) >= pairs
        return same and (inner, width) == _sizes(math, layout)


class ExpertKernels:
    """All experts of one layer, for few tokens."""

    def __init__(
        self,
        arena: Arena,
        layout: SlotLayout,
        math: ExpertMath,
        dtype: torch.dtype,
        *,
        top_k: int,
        most_tokens: int = MOST_TOKENS,
        scratch: Scratch | None = None,
        choices: tuple[Choice, Choice] | None = None,
    ) -> None:
        reason = self.supports(math, layout)
        if reason is not None:
            raise ValueError(reason)
        self.up = SlotLinear(arena, layout, math.up, math.up_bias, math.up_transposed)
        self.down = SlotLinear(arena, layout, math.down, math.down_bias, math.down_transposed)
        self.dtype, self.top_k, self.most_tokens = dtype, top_k, most_tokens
        self.activation = _known(math, layout)
        self.inner, self.width = _sizes(math, layout)
        pairs = most_tokens * top_k
        if scratch is None or not scratch.serves(math, layout, pairs):
            scratch = Scratch.of(math, layout, pairs, arena.memory.device)
        self.scratch = scratch
        self.group = min(triton.next_power_of_2(top_k), PAIRS_AT_ONCE)
        self._choices = {} if choices is None else dict.fromkeys(BUCKETS, choices)

    @staticmethod
    def supports(math: ExpertMath, layout: SlotLayout) -> str | None:
        """Why these experts cannot be computed here, in words; None if they can."""
        if math.norm is not None:
            return "its experts end in a norm of their own"
        names = [name for name in (math.up, math.down, math.up_bias, math.down_bias) if name is not None]
        dtypes = {layout.part(name).dtype for name in names}
        if len(dtypes) != 1 or not dtypes <= set(DTYPES):
            return f"its experts are stored as {' and '.join(sorted(dtypes))}"
        activation = _activation(math, layout)
        if activation is None:
            return "what its experts compute between their two products is none of the known kinds"
        columns, inner = layout.part(math.up).shape[-1 if math.up_transposed else 0], _sizes(math, layout)[0]
        if columns != inner * (2 if activation.gated else 1):
            return f"{columns} columns of its first matrix do not make {inner} rows of the second"
        return None

    def __call__(
        self,
        x: Tensor,
        pair_row: Tensor,
        pair_late: Tensor | None,
        weights: Tensor,
        out: Tensor,
        phase: Phase = Phase.ALL,
        stamp: Tensor | None = None,
    ) -> None:
        """out = what the experts make of x [tokens, width], or the part of the work that belongs to a phase.

        `pair_row` [tokens * top_k] says the slot of every pair or is below zero, `pair_late` which of them are late,
        `weights` [tokens, top_k] what the router gives them. The late phase expects what the early one has left.
        `stamp` (int64 [2]) is told, in nanoseconds, when the early phase ended and when the late one began.
        """
        if len(x) > self.most_tokens or not (x.is_contiguous() and weights.is_contiguous() and out.is_contiguous()):
            raise ValueError(f"up to {self.most_tokens} tokens are served, and their tensors must be contiguous")
        self.multiply_up(x, pair_row, pair_late, phase, stamp=stamp)
        self.multiply_down(pair_row, pair_late, weights, out, phase, stamp=stamp)

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
    ) -> None:
        """The first kernel: from x to the scratch."""
        linear, activation = self.up, self.activation
        choice = choice or self._choice(len(x))[0]
        late, bias = _or(pair_late, self.scratch.late), _or(linear.biases, linear.weights)
        grid = (len(x) * self.top_k, triton.cdiv(self.inner, choice.block_n))
        launch: Any = up_kernel[grid]
        launch(
            x, linear.weights, bias, self.scratch.hidden, pair_row, late, int(phase), _or(stamp, late),
            linear.weights.stride(0), bias.stride(0), self.inner, x.shape[1], self.top_k, activation.function,
            activation.alpha, activation.limit, activation.gated, activation.interleaved, linear.transposed,
            linear.biases is not None, stamp is not None, choice.block_n, choice.block_k, choice.stages, choice.unroll,
            _lane(linear), num_warps=choice.warps, enable_fp_fusion=False,
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
    ) -> None:
        """The second kernel: from the scratch to the sum."""
        linear, scratch = self.down, self.scratch
        choice = choice or self._choice(len(out))[1]
        late, bias = _or(pair_late, self.scratch.late), _or(linear.biases, linear.weights)
        summed = torch.promote_types(linear.weights.dtype, weights.dtype)
        # Without fusion a product is rounded before it is added, as in torch; the kernels name what they want fused.
        launch: Any = down_kernel[(len(out), triton.cdiv(self.width, choice.block_n))]
        launch(
            scratch.hidden, linear.weights, bias, weights, scratch.raw, out, pair_row, late, int(phase),
            _or(stamp, late), linear.weights.stride(0), bias.stride(0), self.width, self.inner, self.top_k,
            linear.transposed, linear.biases is not None, stamp is not None, _TRITON[summed], self.group,
            triton.next_power_of_2(self.top_k), choice.block_n, choice.block_k, choice.stages, choice.unroll,
            _lane(linear), num_warps=choice.warps, enable_fp_fusion=False,
        )  # fmt: skip

    def _choice(self, tokens: int) -> tuple[Choice, Choice]:
        found = self._choices.get(bucket(tokens))
        if found is None:  # not warmed up
            up, down = self._problems(tokens)
            return default(up), default(down)
        return found

    def _problems(self, tokens: int) -> tuple[Problem, Problem]:
        """What the two kernels have to do, as far as their speed depends on it."""
        dtype = str(self.up.weights.dtype).removeprefix("torch.")
        few, pairs = bucket(tokens), bucket(tokens) * self.top_k
        gated = self.activation.gated
        up = Problem("up", self.inner, self.width, dtype, self.up.transposed, gated, 1, pairs)
        return up, Problem("down", self.width, self.inner, dtype, self.down.transposed, False, self.group, few)


class _Trial:
    """Calls of both kernels with rows all over the arena, so that no cache holds what the next one reads."""

    def __init__(
        self, kernels: ExpertKernels, tokens: int, weights_dtype: torch.dtype, device: torch.device, sets: int = 16
    ) -> None:
        random = torch.Generator("cpu").manual_seed(0)
        self.kernels, slots = kernels, len(kernels.up.weights)
        tokens = min(bucket(tokens), kernels.most_tokens)
        shape = (sets, tokens * kernels.top_k)
        self.rows = torch.randint(slots, shape, generator=random, dtype=torch.int32, device="cpu").to(device)
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


_TRITON = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """A kernel has to be given some pointer, even where it does not look."""
    return stand_in if tensor is None else tensor


def _sizes(math: ExpertMath, layout: SlotLayout) -> tuple[int, int]:
    """How wide experts are inside, and how wide what they return."""
    first, second = layout.part(math.down).shape
    return (first, second) if math.down_transposed else (second, first)


def _lane(linear: SlotLinear) -> int:
    """The numbers that lie next to each other in depth in 16 bytes."""
    return 1 if linear.transposed else 16 // linear.weights.dtype.itemsize


def _activation(math: ExpertMath, layout: SlotLayout) -> Activation | None:
    return activation_of(math, getattr(torch, layout.part(math.up).dtype))


def _known(math: ExpertMath, layout: SlotLayout) -> Activation:
    found = _activation(math, layout)
    assert found is not None  # noqa: S101 - supports() has looked
    return found

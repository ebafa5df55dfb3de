"""Triton kernels that multiply by matrices where they lie in their slots: no weight is gathered."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor


@triton.jit
def _rows_times_slots(
    x, w, bias, out, slots,
    n: tl.constexpr, k: tl.constexpr, slot_stride, bias_stride, pairs_per_row: tl.constexpr,
    has_bias: tl.constexpr, transposed: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """Multiply the row of one pair by a block of the matrix in its slot; a slot below zero means not now."""
    pair = tl.program_id(1)
    slot = tl.load(slots + pair)
    if slot < 0:
        return
    columns = tl.program_id(0) * block_n + tl.arange(0, block_n)
    inside = columns < n
    row = x + (pair // pairs_per_row) * k
    matrix = w + slot.to(tl.int64) * slot_stride
    total = tl.zeros((block_n, block_k), tl.float32)
    for start in range(0, k, block_k):
        depth = start + tl.arange(0, block_k)
        there = depth < k
        values = tl.load(row + depth, mask=there, other=0.0).to(tl.float32)
        place = depth[None, :] * n + columns[:, None] if transposed else columns[:, None] * k + depth[None, :]
        tile = tl.load(matrix + place, mask=inside[:, None] & there[None, :], other=0.0).to(tl.float32)
        total += tile * values[None, :]
    result = tl.sum(total, axis=1)
    if has_bias:
        # As stock does: the product is rounded to the type of the weights before the bias is added.
        result = result.to(out.dtype.element_ty).to(tl.float32)
        result += tl.load(bias + slot.to(tl.int64) * bias_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + pair.to(tl.int64) * n + columns, result.to(out.dtype.element_ty), mask=inside)


def rows_times_slots(
    x: Tensor,
    weights: Tensor,
    biases: Tensor | None,
    slots: Tensor,
    out: Tensor,
    *,
    transposed: bool,
    pairs_per_row: int,
) -> None:
    """out[p] = x[p // pairs_per_row] times the matrix in slots[p], plus its bias; pairs with slots[p] < 0 are left."""
    pairs, n = out.shape
    k = x.shape[1]
    block_n, block_k, warps = (32, 64, 8) if transposed else (4, 1024, 4)  # the fastest of some thirty on an H200
    grid = (triton.cdiv(n, block_n), pairs)
    launch: Any = _rows_times_slots[grid]
    launch(
        x, weights, x if biases is None else biases, out, slots, n, k, weights.stride(0),
        0 if biases is None else biases.stride(0), pairs_per_row, biases is not None, transposed, block_n, block_k,
        num_warps=warps,
    )  # fmt: skip

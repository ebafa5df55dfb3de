# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Packed matrices of several experts written out as plain numbers, in one launch: what products of many tokens need."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from hotset.engine.kernels.launches import Launches, kind_of
from hotset.engine.kernels.linear import RowLinear
from hotset.engine.kernels.triton_kernels import _parts_at
from hotset.formats import TileLoader

Tensor = torch.Tensor

BLOCK_N, BLOCK_K, WARPS = 4, 512, 2


@triton.jit(do_not_specialize=["rows"])
def decode_kernel(
    parts, strides, rows, out, n: tl.constexpr, k: tl.constexpr, load: tl.constexpr, settings: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """out[number] = the matrix in row rows[number], n outputs by k inputs, a tile of it for each program.

    Programs next to each other write next to each other.
    """
    number = tl.program_id(2)
    matrix = _parts_at(parts, strides, tl.load(rows + number).to(tl.int64))
    columns = tl.program_id(1) * block_n + tl.arange(0, block_n)
    start = tl.program_id(0) * block_k
    tile = load(matrix, columns[:, None], (columns < n)[:, None], start, block_k, n, k, settings)
    depth = start + tl.arange(0, block_k)
    target = out + number.to(tl.int64) * (n * k) + columns[:, None] * k + depth[None, :]
    tl.store(target, tile.to(out.dtype.element_ty), mask=(columns < n)[:, None] & (depth < k)[None, :])


class MatrixDecoder:
    """Writes out the matrices of a linear map."""

    def __init__(self, linear: RowLinear, tile: TileLoader) -> None:
        self.linear, self.tile = linear, tile
        self._strides = tuple(view.stride(0) for view in linear.views)
        self._launch = Launches(decode_kernel, num_warps=WARPS, enable_fp_fusion=False)

    @classmethod
    def of(cls, linear: RowLinear) -> MatrixDecoder | None:
        """The decoder of a linear map in a packed format that has tiles; None for any other."""
        tile = linear.format.tile() if linear.format.stacked(linear.views) is None else None
        return None if tile is None else cls(linear, tile)

    def __call__(self, rows: Tensor) -> Tensor | None:
        """The matrices of some rows (int32): [rows, outputs, inputs], in the type computed in; None if Triton fails."""
        linear = self.linear
        out = torch.empty((len(rows), linear.width, linear.depth), dtype=linear.dtype, device=rows.device)
        try:
            self._launch(
                (triton.cdiv(linear.depth, BLOCK_K), triton.cdiv(linear.width, BLOCK_N), len(rows)), kind_of(out),
                linear.views, self._strides, rows, out, linear.width, linear.depth, self.tile.function,
                self.tile.settings, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        except TritonError:
            return None
        return out

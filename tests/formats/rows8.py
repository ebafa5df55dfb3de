"""A weight format that exists in the tests only: 8-bit values with one scale per output.

Everything that hotset needs to know of it is in this file; `formats.register(Rows8)` is all that a test does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from hotset.errors import FormatError
from hotset.formats import Encoded, FormatPart, StoredModule, TileLoader, WeightFormat

try:
    import triton
    import triton.language as tl

    from hotset.formats._dense_tiles import along
except ImportError:  # everything but the kernels works without
    triton = None

Tensor = torch.Tensor

if triton is not None:

    @triton.jit
    def load_tile(
        parts, columns, wanted, start, block: tl.constexpr, n: tl.constexpr, k: tl.constexpr, settings: tl.constexpr
    ):
        """Values times their scale, rounded to the type computed in."""
        depth = along(start, block, wanted)
        mask = wanted & (depth < k)
        places = depth * n + columns if settings[1] else columns * k + depth
        codes = tl.load(parts[0] + places, mask=mask, other=0)
        scales = tl.load(parts[1] + columns + 0 * depth, mask=mask, other=0.0)
        values = codes.to(tl.float32) * scales
        return values.to(tl.bfloat16) if settings[0] else values


@dataclass(frozen=True)
class Rows8(WeightFormat):
    """int8 [outputs, inputs] and float32 [outputs]; a GPU has the values turned, as [inputs, outputs]."""

    name: ClassVar[str] = "rows8"
    methods: ClassVar[tuple[str, ...]] = ("rows8-by-hand",)
    multiple: int = 1  # of inputs
    turned: bool = False

    def parts(self, outputs: int, inputs: int) -> tuple[FormatPart, ...]:
        if inputs % self.multiple:
            raise FormatError(f"{inputs} inputs are no multiple of {self.multiple}")
        values = (inputs, outputs) if self.turned else (outputs, inputs)
        return FormatPart("values", values, "int8"), FormatPart("scales", (outputs,), "float32")

    def on(self, kind: str, outputs: Sequence[int]) -> WeightFormat:  # noqa: ARG002 - every row is by itself
        return replace(self, turned=kind == "cuda")

    def fill(self, pieces: Sequence[tuple[WeightFormat, Sequence[Tensor]]], out: Sequence[Tensor]) -> None:
        super().fill(pieces, [out[0].T if self.turned else out[0], out[1]])

    def shape(self, parts: Sequence[Tensor]) -> tuple[int, int]:
        outputs, inputs = parts[0].T.shape if self.turned else parts[0].shape
        return outputs, inputs

    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        values, scales = parts
        out.copy_((values.transpose(-2, -1) if self.turned else values).float() * scales[..., None])

    def tile(self) -> TileLoader | None:
        if triton is None:
            return None
        settings = (self.dtype == "bfloat16", self.turned)
        return TileLoader(load_tile, settings, lane=1 if self.turned else 16, by_columns=self.turned)

    @classmethod
    def detect(cls, module: StoredModule) -> Sequence[Encoded]:
        values, scales = module.tensors.get("weight"), module.tensors.get("weight_scale")
        if values is None or scales is None or values.dtype != "int8":
            return ()
        return [Encoded("weight", values.shape, cls(module.dtype), ("weight", "weight_scale"))]


def encoded(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The parts of a matrix (outputs, inputs)."""
    scales = matrix.float().abs().amax(dim=-1) / 127
    scales = torch.where(scales == 0, 1.0, scales)
    return (matrix.float() / scales[..., None]).round().to(torch.int8), scales

"""MXFP4: E2M1 values, two to a byte, low half first, and a power of two for every 32 inputs.

As gpt-oss has it (`_blocks` and `_scales`), DeepSeek-V4 (int8 values beside exponents) and compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hotset.errors import FormatError
from hotset.formats.base import Encoded, FormatPart, StoredModule, TileLoader, WeightFormat

if TYPE_CHECKING:
    import torch

    from hotset.formats._rows import RowKernels

    Tensor = torch.Tensor

GROUP = 32


@dataclass(frozen=True)
class Mxfp4(WeightFormat):
    """Bytes (outputs, inputs / 2) and exponents (outputs, inputs / 32)."""

    name: ClassVar[str] = "mxfp4"
    methods: ClassVar[tuple[str, ...]] = ("mxfp4", "fp8", "compressed-tensors")

    def parts(self, outputs: int, inputs: int) -> tuple[FormatPart, ...]:
        """Codes and scales."""
        if inputs % GROUP:
            raise FormatError(f"mxfp4 has groups of {GROUP} inputs, which {inputs} are no multiple of")
        return (
            FormatPart("codes", (outputs, inputs // 2), "uint8"),
            FormatPart("scales", (outputs, inputs // GROUP), "uint8"),
        )

    def shape(self, parts: Sequence[Tensor]) -> tuple[int, int]:
        """The outputs and inputs of a matrix of these parts."""
        outputs, half = parts[0].shape
        return outputs, 2 * half

    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Values times powers of two, which is exact in float32 and bfloat16."""
        from hotset.formats._blocks import tiles
        from hotset.formats._numbers import e8m0, fp4, grouped

        codes, scales = parts
        for rows in tiles(*out.shape):
            values = grouped(fp4(codes[rows]), scales.shape[1])
            out[rows] = values.mul_(e8m0(scales[rows])[..., None]).flatten(-2)

    def encode(self, matrix: Tensor, out: Sequence[Tensor], importance: Tensor | None = None) -> None:
        """The exponent of least squared error for each group."""
        from hotset.formats._blocks import tiles
        from hotset.formats._numbers import grouped, joined
        from hotset.formats._search import mxfp4_groups

        count = matrix.shape[1] // GROUP
        by_group = None if importance is None else grouped(importance.float(), count)
        for rows in tiles(*matrix.shape):
            codes, scales = mxfp4_groups(grouped(matrix[rows].float(), count), by_group)
            out[0][rows], out[1][rows] = joined(codes.flatten(-2)), scales

    def row_kernels(self, outputs: int, inputs: int) -> RowKernels | None:
        """Those of 4-bit numbers."""
        from hotset.formats._float_rows import mxfp4_kernels

        return mxfp4_kernels(self.dtype, outputs, inputs)

    def tile(self) -> TileLoader | None:
        """Codes widened by shifts."""
        from hotset.formats._low_bit_tiles import TYPES, load_mxfp4
        from hotset.formats._unit_ptx import product_of

        if self.dtype not in TYPES:
            return None
        units = product_of("fp4", "e8m0", 1, inputs_per_scale=GROUP)
        return TileLoader(load_mxfp4, (TYPES[self.dtype],), lane=16, units=units)

    @classmethod
    def detect(cls, module: StoredModule) -> Sequence[Encoded]:
        """Blocks and scales of experts, or a weight of half as many bytes as inputs with exponents beside it."""
        found, tensors = [], module.tensors
        for word, blocks in tensors.items():
            name = word.removesuffix("_blocks")
            scales = tensors.get(f"{name}_scales")
            if name != word and scales is not None and blocks.dtype == scales.dtype == "uint8":
                if len(blocks.shape) < 3 or blocks.shape[-1] * 2 != GROUP:
                    raise FormatError(f"{blocks.name} is {list(blocks.shape)}, and mxfp4 has blocks of {GROUP // 2}")
                shape = (*blocks.shape[:-2], blocks.shape[-2] * GROUP)
                found.append(Encoded(name, shape, cls(module.dtype), (word, f"{name}_scales")))
        for pair in (("weight", "scale"), ("weight_packed", "weight_scale")):
            codes, factors = tensors.get(pair[0]), tensors.get(pair[1])
            if codes is None or factors is None or len(codes.shape) < 2:
                continue
            if codes.dtype in ("int8", "uint8") and factors.dtype in ("float8_e8m0fnu", "uint8"):
                shape = (*codes.shape[:-1], codes.shape[-1] * 2)
                beside = ("weight_shape",) if "weight_shape" in tensors else ()
                found.append(Encoded("weight", shape, cls(module.dtype), pair, beside))
        return found


FORMAT = Mxfp4

"""NVFP4: E2M1 values, an E4M3 scale for every 16 inputs, and a scale of the whole matrix.

modelopt multiplies by the last (`weight_scale_2`), compressed-tensors divides by it (`weight_global_scale`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from hotset.errors import FormatError
from hotset.formats.base import Encoded, FormatPart, StoredModule, TileLoader, WeightFormat

if TYPE_CHECKING:
    import torch

    from hotset.formats._rows import RowKernels

    Tensor = torch.Tensor

GROUP = 16


@dataclass(frozen=True)
class Nvfp4(WeightFormat):
    """Bytes (outputs, inputs / 2), scales (outputs, inputs / 16), and one float32 for each matrix below another."""

    name: ClassVar[str] = "nvfp4"
    methods: ClassVar[tuple[str, ...]] = ("modelopt", "nvfp4", "compressed-tensors")
    matrices: int = 1  # that lie below each other, all of the same outputs
    divides: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.matrices < 1:
            raise FormatError("nvfp4: there is at least one matrix")

    def parts(self, outputs: int, inputs: int) -> tuple[FormatPart, ...]:
        """Codes, scales and scales of scales."""
        if inputs % GROUP or outputs % self.matrices:
            raise FormatError(f"nvfp4 has groups of {GROUP} inputs, and {self.matrices} matrices of the same outputs")
        return (
            FormatPart("codes", (outputs, inputs // 2), "uint8"),
            FormatPart("scales", (outputs, inputs // GROUP), "uint8"),
            FormatPart("global", (self.matrices,), "float32"),
        )

    def on(self, kind: str, outputs: Sequence[int]) -> WeightFormat:  # noqa: ARG002 - the same on all devices
        """The same with a global scale for each matrix."""
        if len(set(outputs)) > 1:
            raise FormatError("nvfp4: matrices below each other have the same outputs")
        return replace(self, matrices=self.matrices * max(len(outputs), 1))

    def holds(self, stored: WeightFormat) -> bool:
        """Whether it is the same, whatever the number of matrices."""
        return isinstance(stored, Nvfp4) and replace(stored, matrices=self.matrices) == self

    def stacks(self, outputs: Sequence[int], inputs: int) -> bool:  # noqa: ARG002 - rows are by themselves
        """Whether there are as many matrices as there is room for."""
        return len(outputs) == self.matrices

    def shape(self, parts: Sequence[Tensor]) -> tuple[int, int]:
        """The outputs and inputs of a matrix of these parts."""
        outputs, half = parts[0].shape
        return outputs, 2 * half

    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Values times scales, the product of both scales rounded to float32 before, as the libraries do."""
        from hotset.formats._blocks import tiles
        from hotset.formats._numbers import e4m3, fp4, grouped

        codes, scales, whole = parts
        each = whole.repeat_interleave(len(codes) // self.matrices)[:, None]
        for rows in tiles(*out.shape):
            own = e4m3(scales[rows])
            factors = own / each[rows] if self.divides else own * each[rows]
            out[rows] = grouped(fp4(codes[rows]), scales.shape[1]).mul_(factors[..., None]).flatten(-2)

    def row_kernels(self, outputs: int, inputs: int) -> RowKernels | None:
        """Those of 4-bit numbers."""
        from hotset.formats._float_rows import nvfp4_kernels

        return nvfp4_kernels(self.dtype, self.matrices, self.divides, outputs, inputs)

    def tile(self) -> TileLoader | None:
        """Codes and scales widened by shifts."""
        from hotset.formats._low_bit_tiles import TYPES, load_nvfp4
        from hotset.formats._unit_ptx import product_of

        if self.dtype not in TYPES:
            return None
        whole = 2 if self.divides else 1
        units = product_of(
            "fp4", "e4m3", 2, rounded=self.dtype, inputs_per_scale=2 * GROUP, whole=whole, matrices=self.matrices
        )
        return TileLoader(load_nvfp4, (TYPES[self.dtype], self.matrices, self.divides), lane=16, units=units)

    @classmethod
    def detect(cls, module: StoredModule) -> Sequence[Encoded]:
        """A weight of half as many bytes as inputs, with E4M3 scales and the scale of all beside it."""
        found, tensors = [], module.tensors
        for values, whole, divides in (
            ("weight", "weight_scale_2", False),
            ("weight_packed", "weight_global_scale", True),
        ):
            codes, scales = tensors.get(values), tensors.get("weight_scale")
            if codes is None or scales is None or whole not in tensors:
                continue
            if codes.dtype == "uint8" and scales.dtype == "float8_e4m3fn" and len(codes.shape) == 2:
                shape = (codes.shape[0], codes.shape[1] * 2)
                beside = tuple(word for word in ("input_scale", "input_global_scale") if word in tensors)
                chosen = cls(module.dtype, divides=divides)
                found.append(Encoded("weight", shape, chosen, (values, "weight_scale", whole), beside))
        return found


FORMAT = Nvfp4

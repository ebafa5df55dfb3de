"""FP8: E4M3 or E5M2 values with one scale for each block, row or matrix, as DeepSeek-V3 and many others have them.

Checkpoints call the scale `weight_scale_inv`, `weight_scale` or `scale`; it is always multiplied with. Blocks at the
lower and right edge of a matrix may be partial. MXFP8 is the same with groups of 32 inputs and exponents for scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from hotset.checks import shown
from hotset.errors import FormatError
from hotset.formats.base import Encoded, FormatPart, StoredModule, TileLoader, WeightFormat
from hotset.store.header import StoredTensor
from hotset.store.layout import ITEM_BYTES

if TYPE_CHECKING:
    import torch

    from hotset.formats._rows import RowKernels

    Tensor = torch.Tensor

SCALES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "e8m0": "uint8"}
"""The types that scales may have, and how they lie in memory: Triton takes no pointers to exponents."""
VALUES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
FEW_OUTPUTS = 16
"""Blocks of fewer outputs have their scales written out for every output: each block by itself would be slower."""
_WORDS = ("{}_scale_inv", "{}_scale")
_STORED = {"float8_e8m0fnu": "e8m0", "uint8": "e8m0"}


@dataclass(frozen=True)
class Fp8(WeightFormat):
    """Bytes (outputs, inputs), and one scale for each block; a side of 0 is the whole matrix."""

    name: ClassVar[str] = "fp8"
    methods: ClassVar[tuple[str, ...]] = ("fp8", "mxfp8", "compressed-tensors")
    block_n: int = 128  # outputs of a block
    block_k: int = 128
    scales: str = "float32"
    values: str = "e4m3"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scales not in SCALES:
            raise FormatError(f"fp8: scales are one of {', '.join(SCALES)}, not {shown(self.scales)}")
        if self.values not in VALUES:
            raise FormatError(f"fp8: values are one of {', '.join(VALUES)}, not {shown(self.values)}")

    def parts(self, outputs: int, inputs: int) -> tuple[FormatPart, ...]:
        """Values and scales."""
        grid = (_blocks(outputs, self.block_n), _blocks(inputs, self.block_k))
        return FormatPart("values", (outputs, inputs), "uint8"), FormatPart("scales", grid, SCALES[self.scales])

    def on(self, kind: str, outputs: Sequence[int]) -> WeightFormat:  # noqa: ARG002 - the same on all devices
        """Smaller blocks, where the matrices below each other do not begin at whole ones."""
        if len(outputs) == 1:
            return self
        if not self.block_n:
            return replace(self, block_n=math.gcd(*outputs))
        return replace(self, block_n=math.gcd(self.block_n, *outputs[:-1]))

    def stacks(self, outputs: Sequence[int], inputs: int) -> bool:  # noqa: ARG002 - blocks of inputs are as they were
        """Whether each matrix but the last is of whole blocks."""
        return len(outputs) == 1 or (self.block_n > 0 and all(count % self.block_n == 0 for count in outputs[:-1]))

    def fill(self, pieces: Sequence[tuple[WeightFormat, Sequence[Tensor]]], out: Sequence[Tensor]) -> None:
        """Put matrices below each other, the scale of a block once for each smaller block within."""
        first = 0
        for stored, (values, scales) in pieces:
            last = first + len(values)
            out[0][first:last] = values
            each = getattr(stored, "block_n", 0) or len(values)
            if self.block_n == 0 or each == self.block_n:
                own = scales
            else:
                own = scales.repeat_interleave(each // self.block_n, 0)[: _blocks(len(values), self.block_n)]
            begin = first // self.block_n if self.block_n else 0
            out[1][begin : begin + len(own)] = own
            first = last

    def shape(self, parts: Sequence[Tensor]) -> tuple[int, int]:
        """The outputs and inputs of a matrix of these parts."""
        outputs, inputs = parts[0].shape
        return outputs, inputs

    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Values times scales in float32, rounded once."""
        from hotset.formats._blocks import tiles
        from hotset.formats._numbers import e4m3, e5m2, e8m0

        values, scales = parts
        widened = e5m2 if self.values == "e5m2" else e4m3
        outputs, inputs = values.shape
        block_n, block_k = self.block_n or outputs, self.block_k or inputs
        factors = e8m0(scales) if self.scales == "e8m0" else scales.float()
        factors = factors.repeat_interleave(block_k, 1)[:, :inputs] if block_k < inputs else factors[:, :1]
        if block_n < FEW_OUTPUTS:
            factors, block_n = factors.repeat_interleave(block_n, 0)[:outputs], 1
        for rows in tiles(outputs, inputs, block_n):
            numbers = widened(values[rows])
            if block_n == 1:
                numbers.mul_(factors[rows])
            else:
                for first in range(0, len(numbers), block_n):
                    numbers[first : first + block_n].mul_(factors[(rows.start + first) // block_n])
            out[rows] = numbers

    def row_kernels(self, outputs: int, inputs: int) -> RowKernels | None:
        """Those of 8-bit numbers."""
        from hotset.formats._float_rows import fp8_kernels

        wide = self.values == "e5m2"
        return fp8_kernels(self.dtype, self.block_n, self.block_k, self.scales, wide, outputs, inputs)

    def tile(self) -> TileLoader | None:
        """Bytes widened by shifts, since Triton knows the type on some devices only."""
        from hotset.formats._low_bit_tiles import TYPES, load_fp8
        from hotset.formats._unit_ptx import product_of

        if self.dtype not in TYPES:
            return None
        settings = (TYPES[self.dtype], self.block_n, self.block_k, self.scales == "e8m0", self.values == "e5m2")
        size, sides = ITEM_BYTES[SCALES[self.scales]], (self.block_n, self.block_k)
        rounded = "float32" if self.scales == "e8m0" else self.dtype  # numbers times powers of two need none
        units = product_of(
            self.values, self.scales, size, rounded=rounded, outputs_per_scale=sides[0], inputs_per_scale=sides[1]
        )
        return TileLoader(load_fp8, settings, lane=16, units=units)

    @classmethod
    def detect(cls, module: StoredModule) -> Sequence[Encoded]:
        """Tensors of 8-bit numbers with scales beside them."""
        found = []
        for word, values in module.tensors.items():
            kind = next((kind for kind, stored in VALUES.items() if stored == values.dtype), None)
            if kind is None or len(values.shape) not in (2, 3):
                continue
            names = [*(text.format(word) for text in _WORDS), *(["scale"] if word == "weight" else [])]
            name = next((name for name in names if name in module.tensors), None)
            if name is not None:
                chosen = cls(module.dtype, *_block_of(module, values, module.tensors[name]), kind)
                found.append(Encoded(word, values.shape, chosen, (word, name), _unused(module, word)))
        return found


def _unused(module: StoredModule, word: str) -> tuple[str, ...]:
    """Scales of activations, which stay in the type computed in."""
    names = ("input_scale", "activation_scale") if word == "weight" else (f"{word}_activation_scale",)
    return tuple(name for name in names if name in module.tensors)


def _block_of(module: StoredModule, values: StoredTensor, scales: StoredTensor) -> tuple[int, int, str]:
    """The sides of a block, and the type of its scale.

    What config.json says counts where the scales are as many as that makes; there are also checkpoints with one block
    size for experts and another for all else, or none.
    """
    kind = _STORED.get(scales.dtype, scales.dtype)
    if kind not in SCALES:
        raise FormatError(f"{scales.name} is {scales.dtype}, which scales of {values.name} cannot be")
    outputs, inputs = values.shape[-2:]
    shape = scales.shape[len(values.shape) - 2 :]
    if math.prod(shape) == 1:
        return (0, 0, kind)
    said: Any = module.config.get("weight_block_size")
    sides: list[tuple[int, int]] = []
    if isinstance(said, list) and len(said) == 2 and all(type(side) is int and side > 0 for side in said):
        sides.append((said[0], said[1]))
    sides += [(128, 128), (1, 32), (1, 0)]
    for block_n, block_k in sides:
        if shape == (_blocks(outputs, block_n), _blocks(inputs, block_k)):
            return block_n, block_k, kind
    raise FormatError(
        f"{scales.name} is {list(scales.shape)}, which is no number of blocks of {values.name}, {list(values.shape)}"
    )


def _blocks(size: int, block: int) -> int:
    return -(-size // block) if block else 1


FORMAT = Fp8

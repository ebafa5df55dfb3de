"""GGUF: rows of blocks, each with its own scales, in one of the types that ggml numbers.

Experts of the types in `KEPT` are used as they lie in the file. Others are decoded by the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hotset.checks import shown
from hotset.errors import FormatError
from hotset.formats.base import FormatPart, TileLoader, WeightFormat
from hotset.store.gguf import BLOCKS, BlockType

if TYPE_CHECKING:
    import torch

    from hotset.formats._rows import RowKernels

    Tensor = torch.Tensor

KEPT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
"""The types that experts are kept and computed in."""


@dataclass(frozen=True)
class Gguf(WeightFormat):
    """Bytes (outputs, bytes of a row)."""

    name: ClassVar[str] = "gguf"
    kind: str = "Q4_0"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in BLOCKS:
            raise FormatError(f"{self.name}: no blocks are called {shown(self.kind)}; there are {', '.join(BLOCKS)}")

    @property
    def block(self) -> BlockType:
        """The weights and the bytes of a block."""
        return BLOCKS[self.kind]

    @property
    def title(self) -> str:
        """What a person calls it."""
        return f"GGUF {self.kind}"

    @property
    def served(self) -> bool:
        """Whether products are made of it as it is."""
        return self.kind in KEPT

    def parts(self, outputs: int, inputs: int) -> tuple[FormatPart, ...]:
        """The blocks, row by row."""
        if inputs % self.block.weights:
            raise FormatError(
                f"{self.kind} has blocks of {self.block.weights} inputs, which {inputs} are no multiple of"
            )
        return (FormatPart("", (outputs, inputs // self.block.weights * self.block.size_bytes), "uint8"),)

    def shape(self, parts: Sequence[Tensor]) -> tuple[int, int]:
        """The outputs and inputs of a matrix of these parts."""
        outputs, size = parts[0].shape
        return outputs, size // self.block.size_bytes * self.block.weights

    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Numbers in float32, rounded to the type computed in."""
        from hotset.formats._blocks import tiles
        from hotset.formats._gguf_blocks import DECODERS

        decoder = DECODERS.get(self.kind, self._by_package)
        for rows in tiles(*out.shape):
            blocks = parts[0][rows].view(rows.stop - rows.start, -1, self.block.size_bytes)
            out[rows] = decoder(blocks).flatten(-2)

    def row_kernels(self, outputs: int, inputs: int) -> RowKernels | None:  # noqa: ARG002 - rows are whole blocks
        """Those of its kind of blocks."""
        from hotset.formats._gguf_rows import row_kernels

        return row_kernels(self.dtype, self.kind, outputs)

    def tile(self) -> TileLoader | None:
        """Blocks decoded by shifts; the table of IQ4 lies in four words."""
        from hotset.formats._gguf_ptx import product_of_blocks
        from hotset.formats._gguf_tiles import KINDS, load_gguf
        from hotset.formats._low_bit_tiles import TYPES

        if self.dtype not in TYPES or self.kind not in KINDS:
            return None
        units = product_of_blocks(self.kind, self.dtype)
        return TileLoader(load_gguf, (TYPES[self.dtype], KINDS.index(self.kind)), lane=16, units=units)

    def _by_package(self, blocks: Tensor) -> Tensor:
        """Blocks that are decoded on arrival only."""
        import torch

        try:
            from gguf import GGMLQuantizationType, dequantize
        except ImportError as error:
            raise FormatError(f"decoding {self.kind} needs the gguf package: pip install gguf") from error
        kind = GGMLQuantizationType[self.kind]
        try:
            found = dequantize(blocks.flatten(-2).cpu().numpy(), kind)
        except NotImplementedError as error:
            raise FormatError(f"the gguf package cannot decode {self.kind}: use a file in another type") from error
        return torch.from_numpy(found).to(blocks.device).view(*blocks.shape[:-1], self.block.weights)


FORMAT = Gguf

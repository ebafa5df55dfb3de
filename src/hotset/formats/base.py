"""What a weight format is: how one matrix of an expert lies in memory, and how products are made of it.

A format file holds one frozen dataclass; its fields are the format's options, and the text of name and options, as in
"dense:dtype=float32", says everything about the bytes. A matrix has outputs and inputs, whichever way round they lie.
It is stored in up to four *parts*: packed values, scales, zero points, scales of scales. A part's element type need not
be the type that is computed in. Parts and bytes need no torch; everything else has it.

A CPU and a GPU may want other layouts of the same bits. The layout is one of the format's options then: `on` says
which variant a kind of device wants, and `fill` makes the parts of one variant of those of another.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from hotset.checks import shown
from hotset.errors import FormatError
from hotset.store.header import StoredTensor
from hotset.store.layout import ITEM_BYTES

if TYPE_CHECKING:
    import torch

    from hotset.formats._rows import RowKernels

    Tensor = torch.Tensor

MAX_PARTS = 4
"""Of one matrix: what the kernels take."""


class FormatPart(NamedTuple):
    """One tensor of a matrix; its role is empty where it is the only one."""

    role: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """The bytes of this tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class UnitAssembly(NamedTuple):
    """The PTX of a unit's product for devices of some kind, and the order in which it wants the inputs."""

    multiply: str
    constraints: str
    order: int


class UnitProduct(NamedTuple):
    """How one thread multiplies a *unit* in registers: 16 bytes of a row's codes with the inputs that belong to them.

    `assemble` is given a compute capability and returns PTX of: the sum (float32), four words of codes, the inputs
    (float32), what was loaded of the scale, and of the zero point where that is stored. Rows are whole units.
    """

    assemble: Callable[[int], UnitAssembly]
    inputs: int  # of a unit
    scale_bytes: int  # that belong to a unit
    outputs_per_scale: int = 1  # 0: all
    inputs_per_scale: int = 0  # whole units; 0: all
    zeros: bool = False  # whether the third part is a byte for each scale
    whole: int = 0  # whether the third part is a scale of the matrix: 1 to multiply by, 2 to divide by
    matrices: int = 1  # below each other, each with such a scale
    early: bool = False  # whether that one is given to the PTX, in the place of a zero point
    blocks: int = 0  # the kind of blocks that codes lie in together with their scales; 0: in parts of their own
    loaded: int = 6  # registers that a thread loads of a unit

    def shape(self, outputs: int) -> tuple[int, ...]:
        """What the kernels have to know of the parts of a matrix with so many outputs.

        Inputs of a unit, bytes of a scale, outputs and inputs that have one; whether a zero point (1) or the scale of a
        matrix (2) goes with it; whether the latter comes at the end, and the outputs that have one; the kind of blocks;
        and the registers that are loaded.
        """
        beside = int(self.zeros) or (2 if self.whole and self.early else 0)
        sides = (self.outputs_per_scale, self.inputs_per_scale)
        last = 0 if self.early else self.whole
        rest = (last, outputs // self.matrices, self.blocks, self.loaded)
        return (self.inputs, self.scale_bytes, *sides, beside, *rest)

    def serves(self, inputs: int) -> bool:
        """Whether rows of so many inputs are whole units with a scale each."""
        return inputs % self.inputs == 0 and self.inputs_per_scale % self.inputs == 0


class TileLoader(NamedTuple):
    """How the Triton kernels get numbers out of a format's parts: code that is compiled into them.

    `function(parts, columns, wanted, start, block, n, k, settings)` is given the pointers to a matrix's parts and
    returns its values at some outputs (`columns`) and `block` inputs from `start`, as they are in the type computed in,
    and zero for outputs that are not `wanted` and inputs beyond `k`. Pointers, outputs and `wanted` have a last
    dimension of one for the inputs. The start is a multiple of the block, a power of two; `n` outputs, `k` inputs and
    the block are constants.
    """

    function: Any
    settings: tuple[int | float | bool, ...] = ()
    lane: int = 1  # values next to each other in depth that one load brings to a thread; a power of two
    by_columns: bool = False  # whether values next to each other in memory belong to different outputs
    units: UnitProduct | None = None  # what devices with PTX do instead where rows are whole units


class StoredModule(NamedTuple):
    """What a checkpoint has of one module: its tensors by the last word of their names, and what its config says."""

    tensors: Mapping[str, StoredTensor]
    config: Mapping[str, Any]  # the checkpoint's quantization_config
    dtype: str  # the type that the model computes in


class Encoded(NamedTuple):
    """A matrix of a module, or one of each of its experts, in a format."""

    name: str  # the word by which the model's library knows it
    shape: tuple[int, ...]  # (outputs, inputs), or (experts, outputs, inputs)
    format: WeightFormat
    tensors: tuple[str, ...]  # the words of its parts, in the format's order
    beside: tuple[str, ...] = ()  # the words of tensors that belong to it, and that nothing is read from


@dataclass(frozen=True)
class WeightFormat(ABC):
    """How a matrix is encoded."""

    name: ClassVar[str]
    methods: ClassVar[tuple[str, ...]] = ()  # the `quant_method` of checkpoints that have it; transformers reads others
    dtype: str = "bfloat16"  # the type that is computed in

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise FormatError(f"{self.name}: dtype is a type of numbers, not {shown(self.dtype)}")

    @property
    def spec(self) -> str:
        """The format in words: its name, and the options that are not as usual."""
        changed = [f for f in fields(self) if f.default is MISSING or getattr(self, f.name) != f.default]
        options = ",".join(f"{f.name}={_word(getattr(self, f.name))}" for f in changed)
        return f"{self.name}:{options}" if options else self.name

    @abstractmethod
    def parts(self, outputs: int, inputs: int) -> tuple[FormatPart, ...]:
        """The tensors of a matrix; a shape that the format cannot have raises FormatError."""

    @property
    def title(self) -> str:
        """What a person calls it."""
        return self.name

    @property
    def served(self) -> bool:
        """Whether products are made of it as it is; if not, experts are expanded when they arrive."""
        return True

    def size_bytes(self, outputs: int, inputs: int) -> int:
        """The bytes of a matrix."""
        return sum(part.size_bytes for part in self.parts(outputs, inputs))

    def on(self, kind: str, outputs: Sequence[int]) -> WeightFormat:  # noqa: ARG002 - most are the same everywhere
        """The variant of the same bits that a kind of device ("cpu", "cuda") wants of matrices below each other.

        Matrices of so many outputs become one, such as gate and up: blocks that span outputs, or a scale of a whole
        matrix, may need a variant that knows where each of them begins.
        """
        return self

    @abstractmethod
    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Fill out [outputs, inputs] with the numbers of a matrix, rounded once to its type."""

    def matrix(self, parts: Sequence[Tensor]) -> Tensor:
        """The numbers of a matrix in the type computed in, of shape (inputs, outputs): a view where they lie so."""
        import torch

        outputs, inputs = self.shape(parts)
        out = torch.empty((outputs, inputs), dtype=element_type(self.dtype), device=parts[0].device)
        self.decode(parts, out)
        return out.T

    @abstractmethod
    def shape(self, parts: Sequence[Tensor]) -> tuple[int, int]:
        """The outputs and inputs of a matrix of these parts."""

    def operand(self, parts: Sequence[Tensor]) -> Any:
        """What `product` wants of a matrix: made once for every row of memory, so that it may only refer to it."""
        return parts

    def product(self, x: Tensor, operand: Any, out: Tensor) -> None:
        """Fill out [tokens, outputs] with x [tokens, inputs] times a matrix: on a CPU, or for many tokens on a GPU."""
        import torch

        numbers = scratch(self.shape(operand), self.dtype, x.device)
        self.decode(operand, numbers)
        torch.mm(x, numbers.T, out=out)

    def row_kernels(self, outputs: int, inputs: int) -> RowKernels | None:  # noqa: ARG002 - any format may have some
        """The compiled kernels that a CPU multiplies few tokens by; None if there are none, and it is as for many."""
        return None

    def stacked(self, views: Sequence[Tensor]) -> Tensor | None:  # noqa: ARG002 - plain numbers alone can
        """The matrices of all rows as one tensor (rows, inputs, outputs), where they lie as plain numbers."""
        return None

    def tile(self) -> TileLoader | None:
        """The code that loads tiles in Triton kernels; None if there is none, and few tokens go as many do."""
        return None

    @property
    def tuned_as(self) -> str:
        """What the kernels' measured choices are remembered by."""
        return self.spec

    @classmethod
    def detect(cls, module: StoredModule) -> Sequence[Encoded]:  # noqa: ARG003 - some are only ever made by hotset
        """The matrices of a checkpoint's module that are in this format."""
        return ()

    def encode(self, matrix: Tensor, out: Sequence[Tensor], importance: Tensor | None = None) -> None:  # noqa: ARG002
        """Fill the parts of a matrix from its numbers [outputs, inputs], with as little squared error as it takes.

        Errors count by the importance of their inputs [inputs], where that is known. Most formats are only ever read.
        """
        raise FormatError(f"hotset reads {self.name}, and does not make it")

    def fill(self, pieces: Sequence[tuple[WeightFormat, Sequence[Tensor]]], out: Sequence[Tensor]) -> None:
        """Fill the parts of a matrix from pieces of a checkpoint, each with the format it has there, one below another.

        Where the format is the same and rows of outputs follow each other in every part, nothing need be done but this.
        """
        import torch

        for number, target in enumerate(out):
            torch.cat([parts[number] for _, parts in pieces], out=target)

    def holds(self, stored: WeightFormat) -> bool:
        """Whether the parts of a matrix in a checkpoint's format are parts of this one, byte for byte."""
        return stored == self

    def stacks(self, outputs: Sequence[int], inputs: int) -> bool:
        """Whether matrices of so many outputs below each other are one, byte for byte in every part."""
        if len(outputs) == 1:
            return True
        whole = self.parts(sum(outputs), inputs)
        pieces = [self.parts(count, inputs) for count in outputs]
        return all(
            part.shape[0] == sum(piece[number].shape[0] for piece in pieces)
            and all(piece[number].shape[1:] == part.shape[1:] for piece in pieces)
            for number, part in enumerate(whole)
        )


_SCRATCH = threading.local()


def scratch(shape: tuple[int, int], dtype: str, device: torch.device) -> Tensor:
    """Room for the numbers of a matrix until this thread asks for some again.

    On a CPU it is kept: fresh pages would take longer than the numbers. A GPU's allocator keeps its own.
    """
    import torch

    size, kind = math.prod(shape), element_type(dtype)
    if device.type != "cpu":
        return torch.empty(shape, dtype=kind, device=device)
    kept: Tensor | None = getattr(_SCRATCH, "bytes", None)
    if kept is None or len(kept) < size * kind.itemsize:
        kept = _SCRATCH.bytes = torch.empty(size * kind.itemsize, dtype=torch.uint8)
    return kept[: size * kind.itemsize].view(kind).view(shape)


def element_type(name: str) -> torch.dtype:
    """The torch type of a part's elements."""
    import torch

    found = getattr(torch, name, None) if name in ITEM_BYTES else None
    if not isinstance(found, torch.dtype):
        raise FormatError(f"torch has no numbers of the type {shown(name)}")
    return found


def _word(value: Any) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)

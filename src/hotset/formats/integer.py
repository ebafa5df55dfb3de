"""Integers of 4 or 8 bits in groups: a scale for each group of inputs, and a zero point in the middle or of its own.

As compressed-tensors has it (`pack-quantized`), and as hotset makes it. GPTQ and AWQ become this on arrival.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

BITS = (4, 8)
SCALES = ("bfloat16", "float16", "float32")
DIGITS = {"bfloat16": 8, "float16": 11, "float32": 24}
"""Binary digits of a number: units do not round weights to a scale's type of fewer digits than the type computed in."""
ZEROS = ("none", "bytes", "packed")
"""Zero points: none, for the middle of the codes; bytes, one for each scale; or packed into words along outputs."""


@dataclass(frozen=True)
class Integer(WeightFormat):
    """Codes (outputs, bytes of the inputs), 4-bit ones low half first; scales and zero points (outputs, groups)."""

    name: ClassVar[str] = "integer"
    methods: ClassVar[tuple[str, ...]] = ("compressed-tensors",)
    bits: int = 4
    group: int = 32  # inputs; 0 is all of them
    scales: str = "bfloat16"
    zeros: str = "none"
    ordered: int = 0  # matrices below each other that have the group of each input stored, for inputs in any order
    short: bool = False  # whether scales have so few digits that weights are bfloat16 numbers without being rounded

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("bits", BITS), ("scales", SCALES), ("zeros", ZEROS)):
            if getattr(self, name) not in known:
                raise FormatError(f"{self.name}: {name} cannot be {shown(getattr(self, name))}")
        if self.short and (self.bits != 4 or self.zeros != "none"):
            raise FormatError(f"{self.name}: scales are short for 4 bits without zero points only")

    def groups(self, inputs: int) -> int:
        """How many groups so many inputs make."""
        return inputs // self.group if self.group else 1

    def parts(self, outputs: int, inputs: int) -> tuple[FormatPart, ...]:
        """Codes, scales, zero points, and the groups of inputs, as far as there are any."""
        per_byte = 8 // self.bits
        if inputs % (self.group or per_byte) or inputs % per_byte or (self.ordered and outputs % self.ordered):
            raise FormatError(f"{self.spec}: {outputs} x {inputs} is not of whole groups")
        grid = (outputs, self.groups(inputs))
        found = [FormatPart("codes", (outputs, inputs // per_byte), "uint8"), FormatPart("scales", grid, self.scales)]
        if self.zeros == "packed":
            found.append(FormatPart("zeros", (-(-outputs * self.bits // 32), grid[1]), "int32"))
        elif self.zeros == "bytes":
            found.append(FormatPart("zeros", grid, "uint8"))
        if self.ordered:
            found.append(FormatPart("groups", (self.ordered, inputs), "int32"))
        return tuple(found)

    def on(self, kind: str, outputs: Sequence[int]) -> WeightFormat:  # noqa: ARG002 - the same on all devices
        """Zero points as bytes, since packed ones are awkward for products, and the groups of inputs of each matrix."""
        if self.ordered and len(set(outputs)) > 1:
            raise FormatError(f"{self.name}: matrices below each other have the same outputs")
        zeros = "bytes" if self.zeros == "packed" else self.zeros
        return replace(self, zeros=zeros, ordered=self.ordered * max(len(outputs), 1))

    def fill(self, pieces: Sequence[tuple[WeightFormat, Sequence[Tensor]]], out: Sequence[Tensor]) -> None:
        """Put matrices below each other, in whichever of the formats of integers they are stored."""
        first = 0
        for number, (stored, parts) in enumerate(pieces):
            taken = stored.as_integer(parts) if hasattr(stored, "as_integer") else parts
            last = first + len(taken[0])
            for part, target in zip(taken, out, strict=True):
                if target is out[-1] and self.ordered:  # the groups of inputs, once for each matrix
                    _check_groups(part, out[1].shape[1], stored)
                    target[number] = part
                else:
                    target[first:last] = part
            first = last

    def as_integer(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """The same parts, with zero points as bytes."""
        from hotset.formats._numbers import words

        if self.zeros != "packed":
            return parts
        outputs = len(parts[0])
        return [*parts[:2], words(parts[2], self.bits, 0)[:outputs], *parts[3:]]

    def shape(self, parts: Sequence[Tensor]) -> tuple[int, int]:
        """The outputs and inputs of a matrix of these parts."""
        outputs, size = parts[0].shape
        return outputs, size * 8 // self.bits

    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Codes less their zero points, times scales, rounded to the scale's type and then to the one computed in."""
        from hotset.formats._blocks import tiles
        from hotset.formats._numbers import grouped, nibbles, rounded

        codes, scales, *rest = self.as_integer(parts)
        zeros = rest[0] if self.zeros != "none" else None
        groups = self._group_of_each(rest[-1], len(codes), scales.shape[1]) if self.ordered else None
        for rows in tiles(*out.shape):
            numbers = (nibbles(codes[rows]) if self.bits == 4 else codes[rows]).float()
            factors = scales[rows].float()
            middle = 1 << (self.bits - 1) if zeros is None else zeros[rows].float()
            if groups is not None:
                own = groups[rows]
                numbers -= middle if zeros is None else middle.gather(1, own)  # type: ignore[union-attr]
                out[rows] = rounded(numbers.mul_(factors.gather(1, own)), self.scales)
                continue
            by_group = grouped(numbers, factors.shape[1])
            by_group -= middle if zeros is None else middle[..., None]  # type: ignore[index]
            out[rows] = rounded(by_group.mul_(factors[..., None]).flatten(-2), self.scales)

    def _group_of_each(self, stored: Tensor, outputs: int, count: int) -> Tensor:
        """The group of each number; a device would have to wait for a look at them, and has nothing beyond the last."""
        if not stored.is_cuda:
            _check_groups(stored, count, self)
        return stored.long().clamp(0, count - 1).repeat_interleave(outputs // self.ordered, 0)

    def encode(self, matrix: Tensor, out: Sequence[Tensor], importance: Tensor | None = None) -> None:
        """Codes around the middle, and the scale of least squared error for each group."""
        from hotset.formats._blocks import tiles
        from hotset.formats._numbers import grouped, joined
        from hotset.formats._search import integer_groups

        if self.zeros != "none" or self.ordered:
            super().encode(matrix, out)
        count = self.groups(matrix.shape[1])
        by_group = None if importance is None else grouped(importance.float(), count)
        for rows in tiles(*matrix.shape):
            groups = grouped(matrix[rows].float(), count)
            codes, scales = integer_groups(groups, self.bits, self.scales, by_group, short=self.short)
            out[0][rows] = joined(codes.flatten(-2)) if self.bits == 4 else codes.flatten(-2)
            out[1][rows] = scales

    def row_kernels(self, outputs: int, inputs: int) -> RowKernels | None:
        """Those of integers, unless inputs are in any order."""
        from hotset.formats._integer_rows import row_kernels

        if self.ordered or self.zeros == "packed":
            return None
        exact = (self.short and self.dtype != "float16") or self.scales == self.dtype == "float32"
        return row_kernels(
            self.dtype, self.bits, self.group, self.scales, self.zeros == "bytes", not exact, outputs, inputs
        )

    def tile(self) -> TileLoader | None:
        """Codes to integers to float32."""
        from hotset.formats._low_bit_tiles import TYPES, load_integer
        from hotset.formats._unit_ptx import product_of

        if self.zeros == "packed" or self.dtype not in TYPES:
            return None
        settings = (
            TYPES[self.dtype], self.bits, self.group, TYPES[self.scales], self.zeros == "bytes", self.ordered,
        )  # fmt: skip
        if self.ordered or DIGITS[self.scales] < DIGITS[self.dtype]:
            return TileLoader(load_integer, settings, lane=16)
        size, zeros = ITEM_BYTES[self.scales], self.zeros == "bytes"
        rounded = "float32" if self.short and self.dtype == "bfloat16" else self.dtype
        units = product_of(
            f"int{self.bits}", self.scales, size, zeros=zeros, rounded=rounded, inputs_per_scale=self.group
        )
        return TileLoader(load_integer, settings, lane=16, units=units)

    @property
    def tuned_as(self) -> str:
        """Itself; how many digits scales have makes no difference to the kernels of a GPU."""
        return replace(self, short=False).spec

    @classmethod
    def detect(cls, module: StoredModule) -> Sequence[Encoded]:
        """Words of codes with plain scales beside them, as compressed-tensors writes."""
        tensors = module.tensors
        codes, scales = tensors.get("weight_packed"), tensors.get("weight_scale")
        if codes is None or scales is None or codes.dtype != "int32" or len(codes.shape) != 2:
            return ()
        if scales.dtype not in SCALES or len(scales.shape) != 2 or not scales.shape[1]:
            raise FormatError(f"{scales.name} is {scales.dtype} {list(scales.shape)}, which scales cannot be")
        settings = _weights_of(module.config, codes, scales)
        bits, size = settings["num_bits"], settings.get("group_size")
        words: tuple[str, ...] = ("weight_packed", "weight_scale")
        zeros, ordered = "weight_zero_point" in tensors, "weight_g_idx" in tensors
        words += (("weight_zero_point",) if zeros else ()) + (("weight_g_idx",) if ordered else ())
        chosen = cls(
            module.dtype, bits, max(size or 0, 0), scales.dtype, "packed" if zeros else "none", int(ordered)
        )  # fmt: skip
        beside = ("weight_shape",) if "weight_shape" in tensors else ()
        return [Encoded("weight", (codes.shape[0], codes.shape[1] * 32 // bits), chosen, words, beside)]


def _check_groups(groups: Tensor, count: int, stored: WeightFormat) -> None:
    """Raise FormatError where an input is said to be of a group that is none."""
    low, high = int(groups.min()), int(groups.max())
    if low < 0 or high >= count:
        odd = low if low < 0 else high
        raise FormatError(f"{stored.spec}: an input is of group {odd}, of {count}: the checkpoint is damaged")


def _weights_of(config: Mapping[str, Any], codes: StoredTensor, scales: StoredTensor) -> Mapping[str, Any]:
    """What a compressed-tensors config says of these weights: of its groups, the first that the shapes agree with.

    The regular expressions by which a config says so are not run: they come from a file that anyone may have written.
    """
    groups: Any = config.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights: Any = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and _agrees(weights, codes.shape[1], scales.shape[1]):
            return weights
    raise FormatError(
        f"{codes.name} is {list(codes.shape)} with scales {list(scales.shape)}: no group of config.json's "
        f"quantization_config is of 4 or 8 bits and makes that"
    )


def _agrees(weights: Mapping[str, Any], words: int, groups: int) -> bool:
    bits, size = weights.get("num_bits"), weights.get("group_size")
    if type(bits) is not int or bits not in BITS or weights.get("type", "int") != "int":
        return False
    inputs = words * 32 // bits
    return inputs == groups * size if type(size) is int and size > 0 else groups == 1


FORMAT = Integer

"""PTX for the product of a unit: codes and scales of some kind become weights, and those are multiplied and summed."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache, partial

from hotset.formats._ptx import (
    BYTES,
    CONVERTS_E4M3,
    NATURAL,
    NIBBLES,
    Assembly,
    Pairs,
    e4m3_pairs,
    e4m3_scales,
    e5m2_pairs,
    fp4_pairs,
    int4_pairs,
    int8_pairs,
    scale_of,
    shifted_e4m3_pairs,
    signed_int8_pairs,
    wide_int4_pairs,
    wide_int8_pairs,
)
from hotset.formats.base import UnitAssembly, UnitProduct


def products(to: Assembly, numbers: Sequence[str], inputs: Sequence[str], total: str | None) -> str | None:
    """The products of some float32 with their inputs, one after another onto a sum."""
    for number, given in zip(numbers, inputs, strict=True):
        if total is None:
            total = to.new("mul.rn.f32", number, given, kind="f32")
        else:
            total = to.new("fma.rn.f32", number, given, total, kind="f32")
    return total


def _both(to: Assembly, code: str) -> str:
    """A number of two bytes twice."""
    return to.new("prmt.b32", code, code, "0x1010")


class _Plain:
    """Weights that need no rounding: codes are multiplied as they are, and the scale comes last."""

    def __init__(self, pairs: Pairs, small: float, factor: str) -> None:
        self.pairs, self.small, self.factor = pairs, small, factor

    def numbers(self, to: Assembly, word: str, zero: str | None) -> list[str]:
        """The codes of a word as float32."""
        return [half for pair in self.pairs(to, word, zero) for half in to.halves(pair)]

    def end(self, to: Assembly, total: str) -> str:
        """The sum of products, scaled."""
        if self.small != 1.0:
            total = to.new("mul.rn.f32", total, f"0f{_bits(self.small):08X}", kind="f32")
        return to.new("mul.rn.f32", total, self.factor, kind="f32")


class _Rounded(_Plain):
    """Weights in float32, rounded to the type computed in as the definition of their format says."""

    def __init__(self, pairs: Pairs, small: float, factor: str, rounded: str) -> None:
        super().__init__(pairs, small, factor)
        self.rounded = rounded

    def numbers(self, to: Assembly, word: str, zero: str | None) -> list[str]:
        """The weights of a word as float32."""
        found: list[str] = []
        for pair in self.pairs(to, word, zero):
            if self.small != 1.0:
                pair = to.new("fma.rn.f16x2", pair, to.constant(_half(self.small)), to.constant(0x80008000))
            low, high = (to.new("mul.rn.f32", half, self.factor, kind="f32") for half in to.halves(pair))
            found += to.rounded(low, high, self.rounded)
        return found

    def end(self, to: Assembly, total: str) -> str:  # noqa: ARG002 - nothing is left to do
        """The sum as it is."""
        return total


class _ByPairs(_Rounded):
    """Weights that are products of pairs in the scale's own type, rounded to it, and then to the type computed in."""

    def __init__(self, pairs: Pairs, scale: str, code: str, rounded: str) -> None:
        super().__init__(pairs, 1.0, code, rounded)
        self.scale = scale

    def numbers(self, to: Assembly, word: str, zero: str | None) -> list[str]:
        """The weights of a word as float32."""
        found: list[str] = []
        kind = "bf16x2" if self.scale == "bfloat16" else "f16x2"
        for pair in self.pairs(to, word, zero):
            product = to.new(f"fma.rn.{kind}", pair, self.factor, to.constant(0x80008000))
            if self.scale == "bfloat16":
                found += to.wide_halves(product)
            elif self.rounded == "float16":
                found += to.halves(product)
            else:
                found += to.rounded(*to.halves(product), self.rounded)
        return found


_CODES: dict[str, tuple[Pairs, int, float, int]] = {
    "fp4": (fp4_pairs, 8, 2.0**14, NIBBLES),
    "int4": (int4_pairs, 8, 1.0, NIBBLES),
    "int8": (int8_pairs, 4, 1.0, BYTES),
    "signed int8": (signed_int8_pairs, 4, 1.0, BYTES),
    "e4m3": (e4m3_pairs, 4, 1.0, NATURAL),
    "shifted e4m3": (shifted_e4m3_pairs, 4, 2.0**8, BYTES),
    "e5m2": (e5m2_pairs, 4, 1.0, BYTES),
}
"""By the kind of codes: how pairs are made, how many codes a word has, what is too small by how much, and the order."""


_WIDE: dict[str, Pairs] = {"int4": wide_int4_pairs, "int8": wide_int8_pairs}
"""Pairs of bfloat16, in the same order."""


@cache
def assembled(
    codes: str, scale: str, zeros: bool, capability: int, rounded: str = "float32", whole: int = 0
) -> UnitAssembly:
    """The product of a unit of codes and a scale of some kind, in float32.

    Weights are rounded to the type given before they are multiplied. `whole`: whether scales are multiplied (1) or
    divided (2) by another one first, which lies where zero points would.
    """
    if codes == "e4m3" and capability < CONVERTS_E4M3:
        codes = "shifted e4m3"
    pairs, per_word, small, order = _CODES[codes]
    to, count = Assembly(), 4 * per_word
    inputs = [f"${5 + place}" for place in range(count)]
    code, beside = f"${5 + count}", f"${6 + count}"
    factors: tuple[str, ...] = e4m3_scales(to, code, capability) if scale == "e4m3" else (scale_of(to, scale, code),)
    if whole:
        kind = "mul.rn.f32" if whole == 1 else "div.rn.f32"
        factors = tuple(to.new(kind, factor, beside, kind="f32") for factor in factors)
    sums = []
    for part, factor in enumerate(factors):
        ways: _Plain
        if rounded == "float32":
            ways = _Plain(pairs, small, factor)
        elif scale in ("bfloat16", "float16") and codes in _WIDE:
            ways = _ByPairs(_WIDE[codes] if scale == "bfloat16" else pairs, scale, _both(to, code), rounded)
        else:
            ways = _Rounded(pairs, small, factor, rounded)
        total = None
        for number in range(4 * part // len(factors), 4 * (part + 1) // len(factors)):
            own = inputs[number * per_word : (number + 1) * per_word]
            total = products(to, ways.numbers(to, f"${1 + number}", beside if zeros else None), own, total)
        assert total is not None  # noqa: S101 - a unit has words
        sums.append(ways.end(to, total))
    while len(sums) > 1:
        sums[:2] = [to.new("add.rn.f32", sums[0], sums[1], kind="f32")]
    to.line(f"mov.f32 $0, {sums[0]}")
    more = ["r"] if zeros or whole else []
    return UnitAssembly(to.text, ",".join(["=f", *["r"] * 4, *["f"] * count, "r", *more]), order)


def product_of(
    codes: str, scale: str, scale_bytes: int, *, zeros: bool = False, rounded: str = "float32", whole: int = 0,
    **options: int,
) -> UnitProduct:  # fmt: skip
    """How units of codes and scales of some kind are multiplied, with weights rounded to a type or as they are."""
    per_unit = 4 * _CODES[codes][1]
    assemble = partial(_assembled, codes, scale, zeros, rounded, whole if rounded != "float32" else 0)
    return UnitProduct(assemble, per_unit, scale_bytes, zeros=zeros, whole=whole, early=rounded != "float32", **options)


def _assembled(codes: str, scale: str, zeros: bool, rounded: str, whole: int, capability: int) -> UnitAssembly:
    return assembled(codes, scale, zeros, capability, rounded, whole)


def _bits(number: float) -> int:
    found: int = struct.unpack("<I", struct.pack("<f", number))[0]
    return found


def _half(number: float) -> int:
    """A pair of the same float16."""
    found: int = struct.unpack("<H", struct.pack("<e", number))[0]
    return found << 16 | found

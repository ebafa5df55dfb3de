"""PTX for units of GGUF's blocks: 16 bytes of codes with the scales of their block, as the kernels load them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

from hotset.formats._ptx import HALF, HALVES, HALVES_OF_64, HALVES_OF_128, Assembly, int4_pairs
from hotset.formats._unit_ptx import assembled, products
from hotset.formats.base import UnitAssembly, UnitProduct

KINDS = ("", "Q4_0", "Q8_0", "Q4_K", "Q6_K")
"""Of blocks, by the number that the kernels know them by."""
LOADED = {"Q4_0": 5, "Q8_0": 5, "Q4_K": 8, "Q6_K": 11}
"""Registers that a thread loads of a unit."""


def product_of_blocks(kind: str, rounded: str) -> UnitProduct | None:
    """How units of a kind of blocks are multiplied, with weights rounded to a type; None where there is no way."""
    if kind not in LOADED:
        return None
    inputs = 16 if kind == "Q8_0" else 32
    return UnitProduct(partial(_assembled, kind, rounded), inputs, 0, blocks=KINDS.index(kind), loaded=LOADED[kind])


@cache
def _assembled(kind: str, rounded: str, capability: int) -> UnitAssembly:
    if kind == "Q4_0":
        return assembled("int4", HALF, False, capability, rounded)._replace(order=HALVES)
    if kind == "Q8_0":
        return assembled("signed int8", HALF, False, capability, rounded)
    to, inputs = Assembly(), [f"${5 + place}" for place in range(32)]
    total = None
    for word in range(4):
        if kind == "Q4_K":
            numbers = _q4_k_word(to, f"${1 + word}", ("$37", "$38", "$39", "$40"), rounded)
        else:
            numbers = _q6_k_word(to, f"${1 + word}", f"${37 + word}", ("$41", "$42"), rounded)
        total = products(to, numbers, inputs[8 * word : 8 * word + 8], total)
    to.line(f"mov.f32 $0, {total}")
    beside = ["f"] * 4 if kind == "Q4_K" else [*["r"] * 4, "f", "f"]
    order = HALVES_OF_64 if kind == "Q4_K" else HALVES_OF_128
    return UnitAssembly(to.text, ",".join(["=f", *["r"] * 4, *["f"] * 32, *beside]), order)


def _q4_k_word(to: Assembly, word: str, factors: Sequence[str], rounded: str) -> list[str]:
    """The weights of a word, low and high nibbles in turns: each has a factor, and what is added."""
    found: list[str] = []
    for place, pair in enumerate(int4_pairs(to, word, None, middle=0)):
        factor, least = factors[place % 2 * 2 : place % 2 * 2 + 2]
        low, high = (to.new("fma.rn.f32", half, factor, least, kind="f32") for half in to.halves(pair))
        found += to.rounded(low, high, rounded)
    return found


def _q6_k_word(to: Assembly, word: str, upper: str, factors: Sequence[str], rounded: str) -> list[str]:
    """The same with two bits more, which lie in a word of their own: below the exponent of 1024, less 1056."""
    two = to.new("shl.b32", to.new("and.b32", upper, "0x03030303"), 4)
    low = to.new("lop3.b32", word, "0x0F0F0F0F", two, "0xEA")
    two = to.new("and.b32", upper, "0x30303030")
    high = to.new("lop3.b32", to.new("shr.b32", word, 4), "0x0F0F0F0F", two, "0xEA")
    found: list[str] = []
    for place in range(4):
        numbers = to.new(
            "prmt.b32", (low, high)[place % 2], to.constant(0x64646464), ("0x5250", "0x5351")[place // 2]
        )  # fmt: skip
        pair = to.new("add.rn.f16x2", numbers, to.constant(0xE420E420))
        scaled = [to.new("mul.rn.f32", half, factors[place % 2], kind="f32") for half in to.halves(pair)]
        found += to.rounded(scaled[0], scaled[1], rounded)
    return found

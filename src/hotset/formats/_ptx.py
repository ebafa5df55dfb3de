"""PTX for the kernels of few tokens: words of codes become pairs of float16 in registers, and those are multiplied.

A pair is a register with two numbers. Which two codes of a word make one is a matter of what takes the fewest
instructions; the order of inputs says where each has to lie so that it meets its code.
"""

from __future__ import annotations

from collections.abc import Callable

NATURAL, NIBBLES, BYTES, HALVES, HALVES_OF_64, HALVES_OF_128 = range(6)
"""Orders of inputs: as they are; nibbles n and n + 4 of a word paired; bytes n and n + 2 of a word paired; the nibbles
where the upper ones of some bytes are the second half of 32, 64 or 128 inputs."""
HALF = "half"
"""Scales of float16 whose products with codes are float32."""
CONVERTS_E4M3 = 89
"""The compute capability from which on devices widen E4M3 themselves."""


class Assembly:
    """Lines of PTX with registers of their own."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._constants: dict[int, str] = {}
        self._count = 0

    def register(self, kind: str = "b32") -> str:
        """A new register."""
        self._count += 1
        self._lines.append(f".reg .{kind} q{self._count};")
        return f"q{self._count}"

    def line(self, text: str) -> None:
        """One instruction as it is."""
        self._lines.append(f"{text};")

    def new(self, operation: str, *operands: object, kind: str = "b32") -> str:
        """What an instruction makes of its operands, in a new register."""
        result = self.register(kind)
        self.line(f"{operation} {result}, {', '.join(map(str, operands))}")
        return result

    def constant(self, value: int) -> str:
        """A register that holds a number: some instructions take no second one."""
        if value not in self._constants:
            self._constants[value] = self.new("mov.b32", hex(value))
        return self._constants[value]

    def shifted(self, word: str, left: int) -> str:
        """A word moved to the left, or to the right."""
        return word if not left else self.new("shl.b32" if left > 0 else "shr.b32", word, abs(left))

    def joined(self, word: str, mask: int, magic: int, *, turned: bool = False) -> str:
        """Some bits of a word, or what they are not, the rest those of a constant: one instruction."""
        return self.new("lop3.b32", word, hex(mask), self.constant(magic), "0xAE" if turned else "0xEA")

    def signed(self, word: str, sign_left: int, rest_left: int, sign: int, rest: int) -> str:
        """Signs and the other bits of the codes of a word, each moved to their place."""
        signs = self.new("and.b32", self.shifted(word, sign_left), hex(sign))
        return self.new("or.b32", signs, self.new("and.b32", self.shifted(word, rest_left), hex(rest)))

    def halves(self, pair: str) -> tuple[str, str]:
        """Both numbers of a pair as float32."""
        low, high = self.register("b16"), self.register("b16")
        self.line(f"mov.b32 {{{low}, {high}}}, {pair}")
        return self.new("cvt.f32.f16", low, kind="f32"), self.new("cvt.f32.f16", high, kind="f32")

    def rounded(self, low: str, high: str, to: str) -> tuple[str, str]:
        """Two float32 rounded to a type, as float32 again."""
        if to == "float32":
            return low, high
        if to == "bfloat16":
            return self.wide_halves(self.new("cvt.rn.bf16x2.f32", high, low))
        return self.halves(self.new("cvt.rn.f16x2.f32", high, low))

    def wide_halves(self, pair: str) -> tuple[str, str]:
        """Both bfloat16 of a pair as float32."""
        return self.new("shl.b32", pair, 16), self.new("and.b32", pair, "0xFFFF0000")

    @property
    def text(self) -> str:
        """All of it, as a block."""
        return "{\n" + "\n".join(self._lines) + "\n}"


Pairs = Callable[[Assembly, str, str | None], list[str]]
"""The pairs of a word, given the zero point of its group where that is stored."""


def fp4_pairs(to: Assembly, word: str, zero: str | None) -> list[str]:  # noqa: ARG001 - it has none
    """E2M1: four codes at once become upper bytes of float16, 2^14 times as small."""
    low = to.signed(word, 4, 1, 0x80808080, 0x0E0E0E0E)
    high = to.signed(word, 0, -3, 0x80808080, 0x0E0E0E0E)
    first = [to.new("prmt.b32", half, to.constant(0), "0x2404") for half in (low, high)]
    return first + [to.new("and.b32", half, "0xFF00FF00") for half in (low, high)]


def int4_pairs(to: Assembly, word: str, zero: str | None, middle: int = 8) -> list[str]:
    """Codes below the exponent of 1024, or of 64 with the next nibble, less that and the zero point."""
    upper, pairs = to.new("shr.b32", word, 8), []
    low, high = (to.constant(first + 0x10001 * step * middle) for first, step in ((0xE400E400, 1), (0xD400D400, 16)))
    if zero is not None:
        both = to.new("prmt.b32", zero, zero, "0x1010")
        low = to.new("or.b32", both, "0xE400E400")
        high = to.new("or.b32", to.new("shl.b32", both, 4), "0xD400D400")
    for source in (word, upper):
        pairs.append(to.new("add.rn.f16x2", to.joined(source, 0x000F000F, 0x64006400), low))
        numbers = to.joined(source, 0x00F000F0, 0x64006400)
        pairs.append(to.new("fma.rn.f16x2", numbers, to.constant(0x2C002C00), high))  # by 1/16
    return pairs


def int8_pairs(to: Assembly, word: str, zero: str | None) -> list[str]:
    """Codes below the exponent of 1024, less that and the zero point."""
    less = to.constant(0xE480E480)  # -1152
    if zero is not None:
        less = to.new("or.b32", to.new("prmt.b32", zero, zero, "0x1010"), "0xE400E400")
    numbers = [to.new("prmt.b32", word, to.constant(0x64646464), places) for places in ("0x5250", "0x5351")]
    return [to.new("add.rn.f16x2", each, less) for each in numbers]


def signed_int8_pairs(to: Assembly, word: str, zero: str | None) -> list[str]:
    """The same of two's complements."""
    return int8_pairs(to, to.new("xor.b32", word, "0x80808080"), zero)


def wide_int4_pairs(to: Assembly, word: str, zero: str | None) -> list[str]:
    """As bfloat16: codes below the exponent of 128, less that and the zero point."""
    less = to.constant(0xC308C308)  # -136
    if zero is not None:
        less = to.new("or.b32", to.new("prmt.b32", zero, zero, "0x1010"), "0xC300C300")
    numbers = [to.joined(to.shifted(word, -4 * place), 0x000F000F, 0x43004300) for place in range(4)]
    return [to.new("fma.rn.bf16x2", each, to.constant(0x3F803F80), less) for each in numbers]


def wide_int8_pairs(to: Assembly, word: str, zero: str | None) -> list[str]:
    """As bfloat16: seven bits below the exponent of 128, less 128 or twice that by the eighth; then the zero point."""
    pairs = []
    for source in (word, to.new("shr.b32", word, 8)):
        low = to.joined(source, 0x007F007F, 0x43004300)
        less = to.joined(source, 0x00800080, 0x43004300, turned=True)
        pairs.append(to.new("fma.rn.bf16x2", less, to.constant(0xBF80BF80), low))
    if zero is None:
        return pairs
    own = wide_int8_pairs(to, to.new("prmt.b32", zero, zero, "0x1010"), None)[0]
    return [to.new("fma.rn.bf16x2", own, to.constant(0xBF80BF80), each) for each in pairs]


def e4m3_pairs(to: Assembly, word: str, zero: str | None) -> list[str]:  # noqa: ARG001 - it has none
    """By the device's own conversion: pairs are neighbours, in natural order."""
    low, high = to.register("b16"), to.register("b16")
    to.line(f"mov.b32 {{{low}, {high}}}, {word}")
    return [to.new("cvt.rn.f16x2.e4m3x2", half) for half in (low, high)]


def shifted_e4m3_pairs(to: Assembly, word: str, zero: str | None) -> list[str]:  # noqa: ARG001 - it has none
    """Exponent and fraction are those of a float16 2^8 times as small; what is no number becomes one of float16."""
    mask = (0x80008000, 0x3F803F80)
    found = [to.signed(word, 8, 7, *mask), to.signed(word, 0, -1, *mask)]
    # A seventh bit that one more than the lower seven makes says that all of those were set.
    over = to.new("add.u32", to.new("and.b32", word, "0x7F7F7F7F"), to.constant(0x01010101))
    for place, left in enumerate((8, 0)):
        none = to.new("and.b32", to.shifted(over, left), "0x80008000")
        high = to.new("shr.u32", none, 1)  # the exponent's upper bit: with the four below it all are set
        found[place] = to.new("or.b32", found[place], high)
    return found


def e5m2_pairs(to: Assembly, word: str, zero: str | None) -> list[str]:  # noqa: ARG001 - it has none
    """Bytes are the upper ones of float16."""
    return [to.new("prmt.b32", word, to.constant(0), "0x2404"), to.new("and.b32", word, "0xFF00FF00")]


def scale_of(to: Assembly, kind: str, code: str) -> str:
    """A scale as float32, from what was loaded of it."""
    if kind == "e8m0":  # the smallest is a subnormal number, the largest code is none
        power = to.new("max.u32", to.new("shl.b32", code, 23), to.constant(0x00400000))
        none = to.register("pred")
        to.line(f"setp.eq.u32 {none}, {code}, 255")
        return to.new("selp.b32", to.constant(0x7FC00000), power, none)
    if kind == "bfloat16":
        return to.new("shl.b32", code, 16)
    if kind in ("float16", HALF):
        half = to.register("b16")
        to.line(f"cvt.u16.u32 {half}, {code}")
        return to.new("cvt.f32.f16", half, kind="f32")
    return code


def e4m3_scales(to: Assembly, code: str, capability: int) -> tuple[str, str]:
    """Two scales of E4M3 from two bytes."""
    if capability >= CONVERTS_E4M3:
        return to.halves(e4m3_pairs(to, code, None)[0])
    apart = to.new("prmt.b32", code, to.constant(0), "0x4140")  # each byte to the lower half of a half-word
    low, high = to.halves(shifted_e4m3_pairs(to, apart, None)[0])
    return to.new("mul.rn.f32", low, "0f43800000", kind="f32"), to.new("mul.rn.f32", high, "0f43800000", kind="f32")

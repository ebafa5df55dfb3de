# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Vectors of 16 numbers for kernels that Numba compiles: what loops over single numbers are not vectorised to.

LLVM makes of them whatever the processor has. Two things have a form for some processors: a table of 16 numbers that is
looked up by codes is one instruction with AVX-512, and pairs of bfloat16 numbers are multiplied and summed by one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model

LANES = 16
PAIRED = 32
"""The bfloat16 numbers of which a vector of sums takes two for each lane."""

F32, F16, I8, I16, I32, I64 = ir.FloatType(), ir.HalfType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64))


def vector(element: ir.Type, count: int = LANES) -> ir.VectorType:
    """A vector of so many elements."""
    return ir.VectorType(element, count)


class VectorType(types.Type):
    """A type of vectors, as Numba knows it."""

    def __init__(self, name: str, of: ir.VectorType) -> None:
        self.of = of
        super().__init__(name=name)


floats = VectorType("hotset_f32x16", vector(F32))
ints = VectorType("hotset_i32x16", vector(I32))
few = VectorType("hotset_f32x4", vector(F32, 4))
words = VectorType("hotset_i16x32", vector(I16, PAIRED))
"""Bits of bfloat16 numbers, or codes that are to become some."""


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, type_: VectorType) -> None:
        super().__init__(manager, type_, type_.of)


@cache
def features() -> frozenset[str]:
    """What the processor has, in LLVM's words, as far as Numba may use it."""
    _triple, _name, listed = cpu_target.target_context.codegen().magic_tuple()
    return frozenset(word[1:] for word in listed.split(",") if word.startswith("+"))


def has_lookup() -> bool:
    """Whether a table of 16 numbers is looked up by a few instructions."""
    return bool(features() & {"avx512f", "avx2"})


def has_pairs() -> bool:
    """Whether pairs of bfloat16 numbers are multiplied and summed by one instruction."""
    return {"avx512bf16", "avx512bw", "avx512f"} <= features()


def has_half() -> bool:
    """Whether float16 is converted by instructions."""
    return bool(features() & {"f16c", "fullfp16", "fp-armv8", "neon"})


def can_compute(*kinds: str) -> bool:
    """Whether the processor converts all these types of numbers."""
    return "float16" not in kinds or has_half()


def operation(result: types.Type, *given: types.Type):
    """Make an operation of Numba from a function that builds it of LLVM values."""

    def wrap(build):
        signature = result(*given)

        def generate(context, builder, _signature, arguments):
            made = build(builder, *arguments)
            return context.get_dummy_value() if made is None else made

        def none(typingctx):
            return signature, generate

        def one(typingctx, a):
            return signature, generate

        def two(typingctx, a, b):
            return signature, generate

        def three(typingctx, a, b, c):
            return signature, generate

        def four(typingctx, a, b, c, d):
            return signature, generate

        typed = (none, one, two, three, four)[len(given)]
        typed.__name__, typed.__doc__ = build.__name__, build.__doc__
        return intrinsic(typed)

    return wrap


def same(element: ir.Type, value: float, count: int = LANES) -> ir.Constant:
    """One constant in all lanes."""
    return ir.Constant(vector(element, count), [value] * count)


def order(*places: int) -> ir.Constant:
    """Places, by which vectors are put in order."""
    return ir.Constant(vector(I32, len(places)), list(places))


def spread_value(b, value, count: int = LANES):
    """One number in all lanes."""
    kind = vector(value.type, count)
    first = b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    return b.shuffle_vector(first, first, order(*[0] * count))


def load_value(b, address, kind: ir.Type):
    """What lies at an address, which need not be aligned."""
    return b.load(b.inttoptr(address, kind.as_pointer()), align=1)


def store_value(b, address, value) -> None:
    """Put a value to an address."""
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=1)


def call(b, name: str, result: ir.Type, *arguments):
    """Call a function of LLVM by its name."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), arguments)

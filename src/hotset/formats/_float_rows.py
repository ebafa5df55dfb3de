# mypy: allow-untyped-defs, allow-untyped-calls
"""Numbers of 4 and 8 bits with scales, for the kernels of a CPU: FP8, MXFP4 and NVFP4."""

from __future__ import annotations

from functools import cache

from hotset.compiling import keep_callback
from hotset.formats import _code_rows as c
from hotset.formats import _pair_rows as p
from hotset.formats import _rows as r
from hotset.formats import _vector_memory as m
from hotset.formats import _vector_types as t
from hotset.formats import _vectors as v
from hotset.formats import _whole_rows as w

SCALES = {"float32": 0, "bfloat16": 1, "float16": 2, "e8m0": 3}


@r.inlined
def power_at(address):
    """A power of two by its exponent byte: 0 is a subnormal number, 255 none."""
    exponent = m.uint8_at(address)
    if exponent == 0:
        return m.float_of(0x00400000)
    if exponent == 255:
        return m.float_of(0x7FC00000)
    return m.float_of(exponent << 23)


@r.inlined
def fp8_weights(settings, parts, shape, row, block):
    """32 weights; settings: outputs and inputs of a block or 0, the scale's type, if E5M2, the type to round to."""
    block_n, block_k, kind, wide, own = settings
    inputs = shape[r.INPUTS]
    across = (inputs + block_k - 1) // block_k if block_k else 1
    number = (row // block_n if block_n else 0) * across + (32 * block // block_k if block_k else 0)
    if kind == 3:
        scale = v.spread(power_at(parts[1] + number))
    else:
        scale = v.spread(r.number_at(parts[1] + (4 if kind == 0 else 2) * number, kind))
    at = parts[0] + row * inputs + 32 * block
    if wide:
        first, last = v.multiply(m.load_e5m2(at), scale), v.multiply(m.load_e5m2(at + 16), scale)
    else:
        first, last = v.multiply(m.load_e4m3(at), scale), v.multiply(m.load_e4m3(at + 16), scale)
    return r.as_type(first, own), r.as_type(last, own)


@r.inlined
def mxfp4_weights(settings, parts, shape, row, block):
    """32 weights; settings: codes, zero points, the type to round to."""
    inputs = shape[r.INPUTS]
    table = v.multiply(v.fp4_values(), v.spread(power_at(parts[1] + row * (inputs // 32) + block)))
    table = r.as_type(table, settings[2])
    codes = m.load_bytes(parts[0] + row * (inputs // 2) + 16 * block)
    return v.lookup(table, codes), v.lookup(table, v.shift_right(codes, 4))


@r.inlined
def mxfp4_factors(settings, parts, shape, row, block):
    """The scales of 128 codes."""
    inputs = shape[r.INPUTS]
    return m.four_powers(parts[1] + (row * inputs + min(128 * block, inputs - 128)) // 32), v.zeros()


@r.inlined
def nvfp4_scale(settings, parts, shape, row, scales):
    """Scales of groups with that of their matrix; settings: codes, zero points, matrices,
    whether to divide by it, and the type to round to."""
    whole = v.spread(m.float32_at(parts[2] + 4 * (row // (shape[r.OUTPUTS] // settings[2]))))
    return v.divide(scales, whole) if settings[3] else v.multiply(scales, whole)


@r.inlined
def nvfp4_weights(settings, parts, shape, row, block):
    """32 weights: those of the first half of the bytes have one scale, those of the second another."""
    inputs = shape[r.INPUTS]
    scales = nvfp4_scale(settings, parts, shape, row, m.two_e4m3(parts[1] + (row * inputs + 32 * block) // 16))
    codes = m.load_bytes(parts[0] + row * (inputs // 2) + 16 * block)
    first, last = v.lookup(v.fp4_values(), codes), v.lookup(v.fp4_values(), v.shift_right(codes, 4))
    return r.as_type(v.multiply(first, scales), settings[4]), r.as_type(v.multiply(last, scales), settings[4])


@r.inlined
def nvfp4_factors(settings, parts, shape, row, block):
    """The scales of 128 codes."""
    inputs = shape[r.INPUTS]
    scales = m.eight_e4m3(parts[1] + (row * inputs + min(128 * block, inputs - 128)) // 16)
    return nvfp4_scale(settings, parts, shape, row, scales), v.zeros()


def fp8_kernels(
    dtype: str, block_n: int, block_k: int, scales: str, wide: bool, outputs: int, inputs: int
) -> r.RowKernels | None:
    """The kernels of FP8; None where there are none."""
    if dtype not in r.TYPES or inputs % 32 or block_k % 32 or not outputs or not t.has_half():
        return None
    options, pairs = (block_n, block_k, SCALES[scales], int(wide)), dtype == "bfloat16" and t.has_pairs()
    product = _fp8_product((*options, 0 if pairs else r.TYPES[dtype]), pairs)
    return r.RowKernels(product, _fp8_expand((*options, 0)), w.arranged(32, 1, pairs, False), 32, pairs, False)


def mxfp4_kernels(dtype: str, outputs: int, inputs: int) -> r.RowKernels | None:
    """The kernels of MXFP4; None where there are none. Its weights need no rounding but in float16."""
    if dtype not in r.TYPES or inputs % 32 or not outputs or not t.can_compute(dtype):
        return None
    if inputs >= 128 and t.has_lookup() and dtype != "float16":
        pairs = dtype == "bfloat16" and t.has_pairs()
        return r.RowKernels(
            _mxfp4_codes(pairs), _mxfp4_expand(), w.arranged(128, 4 if pairs else 8, pairs, False), 128, pairs, False
        )
    product = _mxfp4_product(r.TYPES[dtype] if dtype == "float16" else 0)
    return r.RowKernels(product, _mxfp4_expand(), w.arranged(32, 2, False, False), 32, False, False)


def nvfp4_kernels(dtype: str, matrices: int, divides: bool, outputs: int, inputs: int) -> r.RowKernels | None:
    """The kernels of NVFP4; None where there are none."""
    if dtype not in r.TYPES or inputs % 32 or not outputs or not t.has_half():
        return None
    options = (c.FP4_CODES, 0, matrices, int(divides))
    expand = _nvfp4_expand((*options, 0))
    if inputs >= 128 and t.has_lookup() and dtype == "float32":
        return r.RowKernels(_nvfp4_codes((*options, 0)), expand, w.arranged(128, 8, False, False), 128, False, False)
    pairs = dtype == "bfloat16" and t.has_pairs()
    product = _nvfp4_product((*options, 0 if pairs else r.TYPES[dtype]), pairs)
    return r.RowKernels(product, expand, w.arranged(32, 2, pairs, False), 32, pairs, False)


@cache
def _fp8_product(settings: tuple[int, ...], pairs: bool) -> int:
    def fp8_pairs(args):
        r.multiply(args, p.step_rounded, p.steps_rounded, fp8_weights, settings)

    def fp8(args):
        r.multiply(args, r.step_32, r.steps_32, fp8_weights, settings)

    return keep_callback(fp8_pairs if pairs else fp8)


@cache
def _fp8_expand(settings: tuple[int, ...]) -> int:
    def fp8(args):
        w.expand(args, fp8_weights, settings, False)

    return keep_callback(fp8)


_MXFP4 = (c.FP4_CODES, 0, 0)


@cache
def _mxfp4_product(kind: int) -> int:
    settings = (c.FP4_CODES, 0, kind)

    def mxfp4(args):
        r.multiply(args, r.step_32, r.steps_32, mxfp4_weights, settings)

    return keep_callback(mxfp4)


@cache
def _mxfp4_codes(pairs: bool) -> int:
    def by_pairs(args):
        r.multiply(args, c.step_pairs, c.steps_pairs, mxfp4_factors, _MXFP4)

    def by_floats(args):
        r.multiply(args, c.step_codes, c.steps_codes, mxfp4_factors, _MXFP4)

    return keep_callback(by_pairs if pairs else by_floats)


@cache
def _mxfp4_expand() -> int:
    def mxfp4(args):
        w.expand(args, mxfp4_weights, _MXFP4, True)

    return keep_callback(mxfp4)


@cache
def _nvfp4_product(settings: tuple[int, ...], pairs: bool) -> int:
    def nvfp4_pairs(args):
        r.multiply(args, p.step_rounded, p.steps_rounded, nvfp4_weights, settings)

    def nvfp4(args):
        r.multiply(args, r.step_32, r.steps_32, nvfp4_weights, settings)

    return keep_callback(nvfp4_pairs if pairs else nvfp4)


@cache
def _nvfp4_codes(settings: tuple[int, ...]) -> int:
    def nvfp4(args):
        r.multiply(args, c.step_codes, c.steps_codes, nvfp4_factors, settings)

    return keep_callback(nvfp4)


@cache
def _nvfp4_expand(settings: tuple[int, ...]) -> int:
    def nvfp4(args):
        w.expand(args, nvfp4_weights, settings, True)

    return keep_callback(nvfp4)

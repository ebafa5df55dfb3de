# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Products with codes of 4 bits, low half of a byte first: 128 at a time, the scales of groups multiplied afterwards.

Lane i has the inputs 8 i to 8 i + 7 of a block. The last block may begin before the one before it ends: inputs that
were there already are zero in it.
"""

from __future__ import annotations

from hotset.formats import _vector_memory as m
from hotset.formats import _vectors as v
from hotset.formats._rows import ROW_BYTES, SUMS_AT, inlined

MIDDLE_CODES, FP4_CODES = 0, 1
"""What codes stand for: -8 to 7, or E2M1."""


@inlined
def codes_at(parts, shape, row, block):
    """Where the codes of a block are."""
    size = shape[ROW_BYTES]
    return parts[0] + row * size + min(64 * block, size - 64)


@inlined
def scaled(values, settings, parts, shape, row, block, x, products, sums):
    """Sums with the products of a block added, less those of its zero points, times its scales."""
    scales, offsets = values(settings, parts, shape, row, block)
    if settings[1]:
        own = m.load_float32(x + shape[SUMS_AT] + 64 * block)
        products = v.subtract(products, v.multiply(offsets, own))
    return v.multiply_add(products, scales, sums)


@inlined
def float_table(settings):
    """What codes stand for."""
    if settings[0] == FP4_CODES:
        return v.fp4_values()
    return v.subtract(v.counting(), v.spread(m.float_of(0x41000000)))


@inlined
def word_table(settings):
    """The same as bfloat16."""
    if settings[0] == FP4_CODES:
        return v.fp4_words()
    return v.middle_words()


@inlined
def part_of_floats(table, codes, shift, x, sums):
    """One of eight shares of a block: every eighth input."""
    return v.multiply_add(v.lookup(table, v.shift_right(codes, shift)), m.load_float32(x + 16 * shift), sums)


@inlined
def products_of_floats(table, codes, x):
    """The sums of products of a block in float32."""
    sums = part_of_floats(table, codes, 0, x, v.zeros())
    sums = part_of_floats(table, codes, 4, x, sums)
    sums = part_of_floats(table, codes, 8, x, sums)
    sums = part_of_floats(table, codes, 12, x, sums)
    sums = part_of_floats(table, codes, 16, x, sums)
    sums = part_of_floats(table, codes, 20, x, sums)
    sums = part_of_floats(table, codes, 24, x, sums)
    return part_of_floats(table, codes, 28, x, sums)


@inlined
def step_codes(values, settings, parts, shape, row, block, x, sums):
    """Sums with a block added, in float32."""
    codes, at = m.load_ints(codes_at(parts, shape, row, block)), x + 512 * block
    found = products_of_floats(float_table(settings), codes, at)
    return scaled(values, settings, parts, shape, row, block, x, found, sums)


@inlined
def steps_codes(values, settings, parts, shape, row, block, xs, sums):
    """The same of four tokens."""
    return (
        step_codes(values, settings, parts, shape, row, block, xs[0], sums[0]),
        step_codes(values, settings, parts, shape, row, block, xs[1], sums[1]),
        step_codes(values, settings, parts, shape, row, block, xs[2], sums[2]),
        step_codes(values, settings, parts, shape, row, block, xs[3], sums[3]),
    )


@inlined
def products_of_pairs(table, codes, x):
    """The sums of products of a block by pairs of bfloat16."""
    sums = v.add_pairs(v.zeros(), v.lookup_words(table, codes), m.load_words(x))
    sums = v.add_pairs(sums, v.lookup_words(table, v.shift_words(codes, 4)), m.load_words(x + 64))
    sums = v.add_pairs(sums, v.lookup_words(table, v.shift_words(codes, 8)), m.load_words(x + 128))
    return v.add_pairs(sums, v.lookup_words(table, v.shift_words(codes, 12)), m.load_words(x + 192))


@inlined
def step_pairs(values, settings, parts, shape, row, block, x, sums):
    """Sums with a block added, by pairs of bfloat16."""
    codes, at = m.load_words(codes_at(parts, shape, row, block)), x + 256 * block
    found = products_of_pairs(word_table(settings), codes, at)
    return scaled(values, settings, parts, shape, row, block, x, found, sums)


@inlined
def steps_pairs(values, settings, parts, shape, row, block, xs, sums):
    """The same of four tokens."""
    return (
        step_pairs(values, settings, parts, shape, row, block, xs[0], sums[0]),
        step_pairs(values, settings, parts, shape, row, block, xs[1], sums[1]),
        step_pairs(values, settings, parts, shape, row, block, xs[2], sums[2]),
        step_pairs(values, settings, parts, shape, row, block, xs[3], sums[3]),
    )

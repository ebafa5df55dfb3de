# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Products in bfloat16 by pairs, 32 weights at a time, each rounded to bfloat16 as its format's definition says."""

from __future__ import annotations

from hotset.formats import _vector_memory as m
from hotset.formats import _vectors as v
from hotset.formats._rows import ROW_BYTES, inlined


@inlined
def add_to_four(weights, block, xs, sums):
    """The sums of four tokens with the products of 32 weights added."""
    at = 64 * block
    return (
        v.add_pairs(sums[0], weights, m.load_words(xs[0] + at)),
        v.add_pairs(sums[1], weights, m.load_words(xs[1] + at)),
        v.add_pairs(sums[2], weights, m.load_words(xs[2] + at)),
        v.add_pairs(sums[3], weights, m.load_words(xs[3] + at)),
    )


@inlined
def step_rounded(values, settings, parts, shape, row, block, x, sums):
    """Sums with the products of 32 inputs added, of weights as `values` gives them."""
    first, last = values(settings, parts, shape, row, block)
    return v.add_pairs(sums, v.rounded_words(first, last), m.load_words(x + 64 * block))


@inlined
def steps_rounded(values, settings, parts, shape, row, block, xs, sums):
    """The same of four tokens."""
    first, last = values(settings, parts, shape, row, block)
    return add_to_four(v.rounded_words(first, last), block, xs, sums)


@inlined
def looked_up(table, settings, parts, shape, row, block):
    """The weights of 32 codes of 4 bits, by the 16 numbers that `table` gives for their group."""
    numbers = table(settings, parts, shape, row, block)
    codes = m.load_nibbles(parts[0] + row * shape[ROW_BYTES] + 16 * block)
    return v.lookup_words(v.rounded_words(numbers, numbers), codes)


@inlined
def step_table(values, settings, parts, shape, row, block, x, sums):
    """Sums with the products of 32 codes of 4 bits added."""
    return v.add_pairs(sums, looked_up(values, settings, parts, shape, row, block), m.load_words(x + 64 * block))


@inlined
def steps_table(values, settings, parts, shape, row, block, xs, sums):
    """The same of four tokens."""
    return add_to_four(looked_up(values, settings, parts, shape, row, block), block, xs, sums)

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Products of a few tokens with packed matrices on a CPU: rows of outputs are decoded in registers as they are read.

A kernel is a C function that any number of threads call with the address of the same arguments: each takes tiles of
rows until none is left. A row is computed by the same operations whichever thread takes it, so that the number of
threads does not change a bit. Arguments are whole numbers of 64 bits: `HEAD` for all jobs, then `JOB` for each.
"""

from __future__ import annotations

from typing import NamedTuple

from numba import njit

from hotset.formats import _vector_memory as m
from hotset.formats import _vectors as v

HEAD, JOB = 12, 8
(
    NEXT,
    TILES,
    TILES_PER_JOB,
    ROWS_PER_TILE,
    OUTPUTS,
    INPUTS,
    BLOCKS,
    ROW_BYTES,
    AHEAD_BYTES,
    X_BYTES,
    SUMS_AT,
    OUT_TYPE,
) = range(HEAD)
"""What the numbers at the head are: the tile to be taken next; how many there are, in all and of a job, and their rows;
the matrix's outputs and inputs, and the blocks of its inputs; the bytes of a row of codes, and how far ahead these are
brought near; the bytes of a token's inputs, and where among them are the sums; the type of the outputs."""
X, OUT, TOKENS, RAW = 4, 5, 6, 7
"""What those of a job are, behind the four parts of a matrix: inputs, outputs, tokens, and the inputs as they came."""
TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}

inlined = njit(forceinline=True, error_model="numpy")


@inlined
def number(args, place):
    """The argument at a place."""
    return m.int64_at(args + 8 * place)


@inlined
def shape_of(args):
    """The numbers at the head, out of the memory that is written to meanwhile."""
    return (
        0, number(args, 1), number(args, 2), number(args, 3), number(args, 4), number(args, 5), number(args, 6),
        number(args, 7), number(args, 8), number(args, 9), number(args, 10), number(args, 11),
    )  # fmt: skip


@inlined
def number_at(address, kind):
    """A number of the type of inputs."""
    if kind == 1:
        return m.bfloat16_at(address)
    if kind == 2:
        return m.float16_at(address)
    return m.float32_at(address)


@inlined
def as_type(numbers, kind):
    """Numbers rounded to a type; float32 is what they are."""
    if kind == 1:
        return v.rounded_bfloat16(numbers)
    if kind == 2:
        return v.rounded_float16(numbers)
    return numbers


@inlined
def put(address, kind, number):
    """Store a result in the type of the output."""
    if kind == 1:
        m.put_bfloat16(address, number)
    elif kind == 2:
        m.put_float16(address, number)
    else:
        m.put_float32(address, number)


@inlined
def job_at(args, number):
    """Where a job's arguments are."""
    return args + 8 * (HEAD + JOB * number)


@inlined
def parts_of(job):
    """The addresses of a matrix's parts."""
    return m.int64_at(job), m.int64_at(job + 8), m.int64_at(job + 16), m.int64_at(job + 24)


@inlined
def bring_near(parts, shape, row, place, share):
    """Have a share of the codes brought near that will be read some rows later, in the order in which they lie."""
    address = parts[0] + row * shape[ROW_BYTES] + shape[AHEAD_BYTES] + place * share
    for at in range(0, share, 64):
        m.prefetch(address + at)


@inlined
def spread_out(first, stride, token, tokens):
    """Where four tokens are; the last stands in for those that are not there, and gets the same numbers again."""
    return (
        first + stride * token,
        first + stride * min(token + 1, tokens - 1),
        first + stride * min(token + 2, tokens - 1),
        first + stride * min(token + 3, tokens - 1),
    )


@inlined
def four_rows(step, values, settings, parts, shape, row, x, out, kind, item):
    """Four outputs of a token."""
    a, b, c, d = v.zeros(), v.zeros(), v.zeros(), v.zeros()
    blocks = shape[BLOCKS]
    share = 4 * shape[ROW_BYTES] // blocks
    for block in range(blocks):
        bring_near(parts, shape, row, block, share)
        a = step(values, settings, parts, shape, row, block, x, a)
        b = step(values, settings, parts, shape, row + 1, block, x, b)
        c = step(values, settings, parts, shape, row + 2, block, x, c)
        d = step(values, settings, parts, shape, row + 3, block, x, d)
    m.put_four(out + item * row, kind, v.four_totals(a, b, c, d))


@inlined
def one_row(step, values, settings, parts, shape, row, x, out, kind, item):
    """One output of a token."""
    a = v.zeros()
    for block in range(shape[BLOCKS]):
        a = step(values, settings, parts, shape, row, block, x, a)
    put(out + item * row, kind, v.total(a))


@inlined
def four_tokens(steps, values, settings, parts, shape, row, xs, outs, kind, item):
    """One output of four tokens."""
    sums = v.zeros(), v.zeros(), v.zeros(), v.zeros()
    blocks = shape[BLOCKS]
    share = shape[ROW_BYTES] // blocks
    for block in range(blocks):
        bring_near(parts, shape, row, block, share)
        sums = steps(values, settings, parts, shape, row, block, xs, sums)
    put(outs[0] + item * row, kind, v.total(sums[0]))
    put(outs[1] + item * row, kind, v.total(sums[1]))
    put(outs[2] + item * row, kind, v.total(sums[2]))
    put(outs[3] + item * row, kind, v.total(sums[3]))


@inlined
def multiply(args, step, steps, values, settings):
    """Take tiles of rows until none is left: `step` takes a block of one token's inputs, `steps` of four tokens'."""
    shape = shape_of(args)
    tiles, per_job, rows = shape[TILES], shape[TILES_PER_JOB], shape[ROWS_PER_TILE]
    outputs, kind = shape[OUTPUTS], shape[OUT_TYPE]
    item = 4 if kind == 0 else 2
    while True:
        tile = m.take_next(args)
        if tile >= tiles:
            break
        job = job_at(args, tile // per_job)
        parts, tokens = parts_of(job), m.int64_at(job + 8 * TOKENS)
        x, out = m.int64_at(job + 8 * X), m.int64_at(job + 8 * OUT)
        row = tile % per_job * rows
        last = min(row + rows, outputs)
        while tokens == 1 and row + 4 <= last:
            four_rows(step, values, settings, parts, shape, row, x, out, kind, item)
            row += 4
        while row < last:
            if tokens == 1:
                one_row(step, values, settings, parts, shape, row, x, out, kind, item)
            else:
                for token in range(0, tokens, 4):
                    xs = spread_out(x, shape[X_BYTES], token, tokens)
                    outs = spread_out(out, item * outputs, token, tokens)
                    four_tokens(steps, values, settings, parts, shape, row, xs, outs, kind, item)
            row += 1


# Any format: 32 weights at a time, as `values` gives them


@inlined
def step_32(values, settings, parts, shape, row, block, x, sums):
    """Sums with the products of 32 inputs added."""
    first, last = values(settings, parts, shape, row, block)
    sums = v.multiply_add(first, m.load_float32(x + 128 * block), sums)
    return v.multiply_add(last, m.load_float32(x + 128 * block + 64), sums)


@inlined
def add_32(first, last, x, sums):
    """Sums with the products of 32 weights added."""
    return v.multiply_add(last, m.load_float32(x + 64), v.multiply_add(first, m.load_float32(x), sums))


@inlined
def steps_32(values, settings, parts, shape, row, block, xs, sums):
    """The same of four tokens."""
    first, last = values(settings, parts, shape, row, block)
    at = 128 * block
    return (
        add_32(first, last, xs[0] + at, sums[0]),
        add_32(first, last, xs[1] + at, sums[1]),
        add_32(first, last, xs[2] + at, sums[2]),
        add_32(first, last, xs[3] + at, sums[3]),
    )


@inlined
def step_typed(values, settings, parts, shape, row, block, x, sums):
    """Sums with the products of 32 inputs added, of weights rounded to the type that the first setting says."""
    first, last = values(settings, parts, shape, row, block)
    return add_32(as_type(first, settings[0]), as_type(last, settings[0]), x + 128 * block, sums)


@inlined
def steps_typed(values, settings, parts, shape, row, block, xs, sums):
    """The same of four tokens."""
    found = values(settings, parts, shape, row, block)
    first, last, at = as_type(found[0], settings[0]), as_type(found[1], settings[0]), 128 * block
    return (
        add_32(first, last, xs[0] + at, sums[0]),
        add_32(first, last, xs[1] + at, sums[1]),
        add_32(first, last, xs[2] + at, sums[2]),
        add_32(first, last, xs[3] + at, sums[3]),
    )


class RowKernels(NamedTuple):
    """The compiled kernels of a matrix's format, and how they want their inputs."""

    product: int
    expand: int
    arrange: int
    block: int  # inputs of a block
    pairs: bool  # whether inputs stay bfloat16
    sums: bool  # whether the sums of a block's lanes lie behind the inputs

    def blocks(self, inputs: int) -> int:
        """The blocks of so many inputs."""
        return -(-inputs // self.block)

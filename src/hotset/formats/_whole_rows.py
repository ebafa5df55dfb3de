# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Whole matrices and inputs: the numbers of one are written out, those of the other put in order."""

from __future__ import annotations

from functools import cache

from hotset.compiling import keep_callback
from hotset.formats import _vector_memory as m
from hotset.formats import _vectors as v
from hotset.formats._rows import (
    BLOCKS,
    INPUTS,
    OUT,
    OUT_TYPE,
    OUTPUTS,
    RAW,
    ROWS_PER_TILE,
    SUMS_AT,
    TILES,
    TOKENS,
    X_BYTES,
    X,
    inlined,
    job_at,
    number_at,
    parts_of,
    shape_of,
)


@inlined
def store(address, kind, numbers):
    """Store 16 numbers in the type of the output."""
    if kind == 1:
        m.store_bfloat16(address, numbers)
    elif kind == 2:
        m.store_float16(address, numbers)
    else:
        m.store_float32(address, numbers)


@inlined
def expand(args, values, settings, in_turn):
    """Take tiles of rows until none is left, and write the numbers of each; `in_turn`: even inputs first, then odd."""
    shape = shape_of(args)
    tiles, rows, kind = shape[TILES], shape[ROWS_PER_TILE], shape[OUT_TYPE]
    item = 4 if kind == 0 else 2
    job, width = job_at(args, 0), shape[INPUTS]
    parts, out = parts_of(job), m.int64_at(job + 8 * OUT)
    while True:
        tile = m.take_next(args)
        if tile >= tiles:
            break
        for row in range(tile * rows, min(tile * rows + rows, shape[OUTPUTS])):
            for block in range(width // 32):
                first, last = values(settings, parts, shape, row, block)
                at = out + item * (row * width + 32 * block)
                if in_turn:
                    first, last = v.first_in_turn(first, last), v.last_in_turn(first, last)
                store(at, kind, first)
                store(at + 16 * item, kind, last)


@inlined
def one_by_one(raw, out, kind, block, shares, pairs, known):
    """Put a block's inputs in order; the first of them may be known already, and become zero."""
    item = 4 if kind == 0 else 2
    for place in range(block):
        which = place % (block // shares) * shares + place // (block // shares)
        value = number_at(raw + item * which, kind) if which >= known else m.float_of(0)
        if pairs:
            m.put_bfloat16(out + 2 * place, value)
        else:
            m.put_float32(out + 4 * place, value)


@inlined
def put_in_order(raw, out, kind, block, shares, pairs, known):
    """The same, by vectors where that is possible."""
    if pairs and block == 128 and known == 0:
        m.take_apart(raw, out)
    elif pairs and block == 32:
        m.copy_words(raw, out, shares)
    elif block == 32 and kind == 1:
        first, last = m.load_bfloat16(raw), m.load_bfloat16(raw + 32)
        if shares == 2:
            first, last = v.even_places(first, last), v.odd_places(first, last)
        m.store_float32(out, first)
        m.store_float32(out + 64, last)
    else:
        one_by_one(raw, out, kind, block, shares, pairs, known)


@inlined
def arrange(args, block, shares, pairs, sums):
    """Put each block of a token's inputs as so many shares, of every so manyth, one after another; a tile is a job."""
    shape = shape_of(args)
    tiles, kind, width = shape[TILES], shape[OUT_TYPE], shape[INPUTS]
    item, put_item = 4 if kind == 0 else 2, 2 if pairs else 4
    while True:
        tile = m.take_next(args)
        if tile >= tiles:
            break
        job = job_at(args, tile)
        for token in range(m.int64_at(job + 8 * TOKENS)):
            raw = m.int64_at(job + 8 * RAW) + token * width * item
            x = m.int64_at(job + 8 * X) + token * shape[X_BYTES]
            for number in range(shape[BLOCKS]):
                begin = min(block * number, width - block)
                known = block * number - begin  # inputs that the block before has had
                at = x + put_item * block * number
                put_in_order(raw + item * begin, at, kind, block, shares, pairs, known)
                if sums:
                    for lane in range(16):
                        whole = m.float_of(0)
                        for which in range(8 * lane, 8 * lane + 8):
                            if which >= known:
                                whole += number_at(raw + item * (begin + which), kind)
                        m.put_float32(x + shape[SUMS_AT] + 64 * number + 4 * lane, whole)


@cache
def arranged(block: int, shares: int, pairs: bool, sums: bool) -> int:
    """The kernel that puts inputs in order."""

    def kernel(args):
        arrange(args, block, shares, pairs, sums)

    return keep_callback(kernel)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
# ruff: noqa: RUF005, SIM108 - Triton's language has no other way to say these
"""What a thread of the kernels by units loads and multiplies: 16 bytes of codes, what scales them, and their inputs.

The input lies so that threads next to each other load 16 bytes next to each other: by chunks, then pieces of 16 bytes
of each unit, then threads. Codes and scales are two matrices, or lie together in blocks, as in GGUF files.
"""

from __future__ import annotations

import triton
import triton.language as tl

_WORDS = tl.constexpr("ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];")
_QUARTERS = tl.constexpr("=f,=f,=f,=f,l")
_BYTE = tl.constexpr("ld.global.nc.u8 $0, [$1];")
_SHORT = tl.constexpr("ld.global.nc.u16 $0, [$1];")
_WORD = tl.constexpr("ld.global.nc.b32 $0, [$1];")
_SHORTS = tl.constexpr(
    "{\n.reg .b16 h0, h1, h2, h3, h4, h5, h6, h7;\n"
    + "\n".join(f"ld.global.nc.u16 h{number}, [$4 + {2 * number}];" for number in range(8))
    + "\n"
    + "\n".join(f"mov.b32 ${number}, {{h{2 * number}, h{2 * number + 1}}};" for number in range(4))
    + "\n}"
)
Q4_0, Q8_0, Q4_K, Q6_K = (tl.constexpr(number) for number in range(1, 5))
"""Blocks that units are part of, by the number in a shape; 0 is none."""


@triton.jit
def place_in_unit(number, order: tl.constexpr):
    """Where an input lies among those of its unit: the numbers of a pair of codes next to each other."""
    if order == 1:  # nibbles n and n + 4 of a word
        return (number // 8) * 8 + (number % 4) * 2 + (number // 4) % 2
    elif order == 2:  # noqa: RET505 - bytes n and n + 2 of a word; Triton wants all arms of a choice
        return (number // 4) * 4 + (number % 2) * 2 + (number // 2) % 2
    elif order >= 3:  # low nibbles of 16 bytes, then their high ones, by whatever way to 32 inputs
        own = (number % 16) * 2 + (number // 16) % 2
        return (own // 8) * 8 + (own % 4) * 2 + (own // 4) % 2
    else:
        return number


@triton.jit
def in_turns(number, order: tl.constexpr):
    """The inputs of blocks in the order of their units: 16 of low nibbles, then the 16 of the high ones."""
    if order == 4:  # of 64 inputs the second 32 are high nibbles
        return (number // 64) * 64 + (number // 16 % 2) * 32 + (number // 32 % 2) * 16 + number % 16
    elif order == 5:  # noqa: RET505 - of 128 inputs the second 64 are
        return (number // 128) * 128 + (number // 16 % 4) * 32 + (number // 64 % 2) * 16 + number % 16
    else:
        return number


@triton.jit
def place_of(number, unit: tl.constexpr, order: tl.constexpr, lanes: tl.constexpr):
    """Where an input lies for threads that load four float32 at a time, so many of them side by side."""
    number = in_turns(number, order)
    at, own = number // unit, place_in_unit(number % unit, order)
    return (((at // lanes) * (unit // 4) + own // 4) * lanes + at % lanes) * 4 + own % 4


@triton.jit
def _words(address):
    """16 bytes of codes to every thread, past the first cache."""
    return tl.inline_asm_elementwise(
        _WORDS, "=r,=r,=r,=r,l", [address], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
    )


@triton.jit
def _shorts(address):
    """The same where they begin at any whole two bytes."""
    return tl.inline_asm_elementwise(
        _SHORTS, "=r,=r,=r,=r,l", [address], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
    )


@triton.jit
def _small(address, size: tl.constexpr):
    """One number of up to four bytes to every thread."""
    load: tl.constexpr = _BYTE if size == 1 else _SHORT if size == 2 else _WORD
    return tl.inline_asm_elementwise(load, "=r,l", [address], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _four(address):
    """Four float32 to every thread."""
    return tl.inline_asm_elementwise(
        "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];", _QUARTERS, [address],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def inputs_of(address, unit: tl.constexpr, lanes: tl.constexpr):
    """The inputs of a unit: pieces of 16 bytes, as far apart as the threads of a row are wide."""
    found = _four(address)
    for piece in tl.static_range(1, unit // 4):
        found = found + _four(address + piece * lanes * 16)
    return found


@triton.jit
def load_codes(matrix, rows, units, k: tl.constexpr, shape: tl.constexpr):
    """Words of some units of some rows, and what scales them: as many tensors as the last number of `shape` says.

    `matrix` has the addresses of the parts. `shape` is that of `UnitProduct`; 0 outputs or inputs are all of them.
    """
    if shape[7]:
        return _of_blocks(matrix[0], rows, units, k, shape)
    else:  # noqa: RET505 - Triton wants both arms of a choice at compile time
        return _of_planes(matrix, rows, units, k, shape)


@triton.jit
def _of_planes(matrix, rows, units, k: tl.constexpr, shape: tl.constexpr):
    """Words, scale, and what goes with it."""
    unit: tl.constexpr = shape[0]
    row_bytes: tl.constexpr = k // unit * 16
    groups: tl.constexpr = (k + shape[3] - 1) // shape[3] if shape[3] else 1
    found = _words(matrix[0] + rows.to(tl.int64) * row_bytes + units * 16)
    if shape[2] == 0:
        scale = rows * 0
    else:
        scale = (rows // shape[2]) * groups
    if shape[3]:
        scale = scale + (units * unit) // shape[3]
    else:
        scale = scale + units * 0
    factor = _small(matrix[1] + scale.to(tl.int64) * shape[1], shape[1])
    if shape[4] == 1:
        zero = _small(matrix[2] + scale.to(tl.int64), 1)
    elif shape[4] == 2:
        zero = _small(matrix[2] + (rows // shape[6] + units * 0).to(tl.int64) * 4, 4)
    else:
        zero = factor
    return found + (factor, zero)


@triton.jit
def _of_blocks(begin, rows, units, k: tl.constexpr, shape: tl.constexpr):
    """Words and the block's scales as they are stored; of Q6_K the words of the upper bits, too."""
    kind: tl.constexpr = shape[7]
    if kind == Q4_K:
        at = begin + rows.to(tl.int64) * (k // 256 * 144) + (units // 8) * 144
        return _words(at + 16 + units % 8 * 16) + _words(at)
    elif kind == Q6_K:  # noqa: RET505 - Triton wants all arms of a choice at compile time
        at = begin + rows.to(tl.int64) * (k // 256 * 210) + (units // 8) * 210
        upper = _shorts(at + 128 + units % 8 // 4 * 32 + units % 2 * 16)
        scale = at + 192 + units % 8 // 4 * 8 + units % 4
        return _shorts(at + units % 8 * 16) + upper + (_small(scale, 1), _small(scale + 4, 1), _small(at + 208, 2))
    elif kind == Q8_0:
        at = begin + rows.to(tl.int64) * (k // 32 * 34) + (units // 2) * 34
        return _shorts(at + 2 + units % 2 * 16) + (_small(at, 2),)
    else:
        at = begin + rows.to(tl.int64) * (k // 32 * 18) + units * 18
        return _shorts(at + 2) + (_small(at, 2),)


@triton.jit
def _half(bits):
    """A float16 in the lower bits, as float32."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _least_and_factors(head, own):
    """Of the two times 16 codes of a unit of Q4_K: factors, and what is added, as float32."""
    last = own % 8 >= 4
    scales = tl.where(last, (head[3] & 0x0F0F0F0F) | ((head[1] >> 2) & 0x30303030), head[1] & 0x3F3F3F3F)
    least = tl.where(last, ((head[3] >> 4) & 0x0F0F0F0F) | ((head[2] >> 2) & 0x30303030), head[2] & 0x3F3F3F3F)
    shift = own // 2 % 2 * 16
    scales, least = scales >> shift, least >> shift
    whole, below = _half(head[0]), -_half(head[0] >> 16)
    return (
        whole * (scales & 63).to(tl.float32), below * (least & 63).to(tl.float32),
        whole * ((scales >> 8) & 63).to(tl.float32), below * ((least >> 8) & 63).to(tl.float32),
    )  # fmt: skip


@triton.jit
def _upper_and_factors(found, own):
    """Of the two times 16 codes of a unit of Q6_K: the words of their upper bits, in place, and factors."""
    shift = own // 2 % 2 * 2
    whole = _half(found[6])
    return (
        found[0] >> shift, found[1] >> shift, found[2] >> shift, found[3] >> shift,
        whole * ((found[4] ^ 128) - 128).to(tl.float32), whole * ((found[5] ^ 128) - 128).to(tl.float32),
    )  # fmt: skip


@triton.jit
def plus(
    total, codes, number: tl.constexpr, inputs, own, shape: tl.constexpr, multiply: tl.constexpr,
    constraints: tl.constexpr,
):  # fmt: skip
    """A sum and the products of one unit, of those that were loaded; `own` are the numbers of the threads."""
    first: tl.constexpr = shape[8] * number
    words = codes[first : first + 4]
    if shape[7] == Q4_K:
        given = words + inputs + _least_and_factors(codes[first + 4 : first + 8], own)
    elif shape[7] == Q6_K:
        given = words + inputs + _upper_and_factors(codes[first + 4 : first + 11], own)
    elif shape[4]:
        given = words + inputs + codes[first + 4 : first + 6]
    else:
        given = words + inputs + codes[first + 4 : first + 5]
    return total + tl.inline_asm_elementwise(multiply, constraints, given, dtype=tl.float32, is_pure=True, pack=1)

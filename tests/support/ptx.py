"""The PTX that the kernels by units are made of, run by numpy: Triton's interpreter runs none.

Only what they use is known; whatever else there is raises. A register holds 32 bits, as unsigned integers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

Bits = Any


def patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter run inline PTX."""

    def create_inline_asm(
        _: Any, text: str, constraints: str, values: list[Any], types: list[Any], __: bool, pack: int
    ) -> Any:
        assert pack == 1
        return Results(run(text, constraints.split(","), [value.data for value in values]), types)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", create_inline_asm)


class Results:
    """What a block of PTX has left in its outputs."""

    def __init__(self, found: list[Any], types: list[Any]) -> None:
        scalars = [kind.scalar for kind in types]
        self._found = [interpreter.TensorHandle(*pair) for pair in zip(found, scalars, strict=True)]

    def get_result(self, number: int) -> Any:
        return self._found[number]


def run(text: str, constraints: list[str], given: list[Any]) -> list[Any]:
    """The outputs of a block, given its inputs."""
    outputs = [kind for kind in constraints if kind.startswith("=")]
    machine = Machine()
    for number, value in enumerate(given):
        wide = value.dtype.itemsize == 8
        machine.registers[f"${len(outputs) + number}"] = value if wide else np.ascontiguousarray(value).view(np.uint32)
    with np.errstate(all="ignore"):
        for operation, operands in instructions(text):
            machine.step(operation, operands)
    kinds = {"=f": np.float32, "=r": np.int32}
    return [machine.registers[f"${number}"].view(kinds[kind]) for number, kind in enumerate(outputs)]


@cache
def instructions(text: str) -> list[tuple[str, list[str]]]:
    """What a block says, each with its operands; kernels run the same few blocks again and again."""
    found = []
    for line in map(str.strip, text.strip().strip("{}").split(";")):
        if line and not line.startswith(".reg"):
            operation, _, rest = line.partition(" ")
            operands = re.findall(r"\s*(\{[^}]*\}|\[[^]]*\]|[^,]+)", rest)
            found.append((operation, [word.strip() for word in operands if word.strip()]))
    return found


@cache
def constant(operand: str) -> Bits:
    """A number that is written in an instruction."""
    return np.uint32(int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0) & 0xFFFFFFFF)


class Machine:
    """Registers, and what instructions do with them."""

    def __init__(self) -> None:
        self.registers: dict[str, Bits] = {}

    def step(self, operation: str, operands: list[str]) -> None:
        """One instruction."""
        if operation.startswith("ld.global"):
            self._load(operation, operands)
        elif operation == "mov.b32" and operands[0].startswith("{"):
            low, high = operands[0].strip("{}").replace(" ", "").split(",")
            word = self._value(operands[1])
            self.registers[low], self.registers[high] = word & np.uint32(0xFFFF), word >> np.uint32(16)
        elif operation == "mov.b32" and operands[1].startswith("{"):
            low, high = (self.registers[name] for name in operands[1].strip("{}").replace(" ", "").split(","))
            self.registers[operands[0]] = low | (high << np.uint32(16))
        else:
            self.registers[operands[0]] = OPERATIONS[operation](*(self._value(each) for each in operands[1:]))

    def _value(self, operand: str) -> Bits:
        return self.registers[operand] if operand in self.registers else constant(operand)

    def _load(self, operation: str, operands: list[str]) -> None:
        name, _, offset = operands[1].strip("[]").partition(" + ")
        address = self.registers[name].astype(np.uint64) + np.uint64(offset or 0)
        kind = {"u8": np.uint8, "u16": np.uint16}.get(operation.rpartition(".")[2], np.uint32)
        for number, name in enumerate(operands[0].strip("{}").replace(" ", "").split(",")):
            found = _load(address + np.uint64(4 * number), kind)
            self.registers[name] = found.astype(np.uint32)


def _load(address: Any, kind: Any) -> Any:
    address = np.ascontiguousarray(address)
    mask = np.ones(address.shape, bool)
    return interpreter._interpreter.load(address, mask, np.zeros(address.shape, kind), np.dtype(kind))


def floats(bits: Bits) -> Any:
    return np.asarray(bits, np.uint32).view(np.float32)


def back(numbers: Any) -> Bits:
    return np.asarray(numbers, np.float32).view(np.uint32)


def half(bits: Bits) -> Any:
    return np.asarray(bits).astype(np.uint16).view(np.float16)


def by_halves(function: Callable[..., Any]) -> Callable[..., Bits]:
    """An instruction on both float16 of a register, rounded once."""

    def run_both(*operands: Bits) -> Bits:
        found = []
        for shift in (0, 16):
            numbers = [half((np.asarray(each) >> np.uint32(shift)) & np.uint32(0xFFFF)) for each in operands]
            result = function(*(number.astype(np.float64) for number in numbers)).astype(np.float16)
            found.append(np.asarray(result).view(np.uint16).astype(np.uint32))
        return found[0] | (found[1] << np.uint32(16))

    return run_both


def permuted(first: Bits, second: Bits, places: Bits) -> Bits:
    """prmt: four bytes of eight."""
    both = np.asarray(first, np.uint64) | (np.asarray(second, np.uint64) << np.uint64(32))
    result = np.zeros_like(both)
    for byte in range(4):
        place = (int(places) >> (4 * byte)) & 7
        result |= ((both >> np.uint64(8 * place)) & np.uint64(255)) << np.uint64(8 * byte)
    return result.astype(np.uint32)


def logic(first: Bits, second: Bits, third: Bits, table: Bits) -> Bits:
    """lop3: any function of three bits; only (a & b) | c and (~a & b) | c are used."""
    assert int(table) in (0xEA, 0xAE)
    return ((first if int(table) == 0xEA else ~np.asarray(first)) & second) | third


def as_bf16(numbers: Any) -> Bits:
    """float32 rounded to the bits of a bfloat16."""
    found = torch.from_numpy(np.array(numbers, np.float32)).bfloat16().view(torch.int16).numpy()
    return np.asarray(found.view(np.uint16).astype(np.uint32))


def by_wide_halves(a: Bits, b: Bits, c: Bits) -> Bits:
    """fma on both bfloat16 of a register; what is used here is exact in float32 before it is rounded."""
    found = [as_bf16(x * y + z) for x, y, z in zip(*(wide_halves(each) for each in (a, b, c)), strict=True)]
    return found[0] | (found[1] << np.uint32(16))


def wide_halves(bits: Bits) -> tuple[Any, Any]:
    word = np.asarray(bits, np.uint32)
    return floats(word << np.uint32(16)), floats(word & np.uint32(0xFFFF0000))


def as_f16(numbers: Any) -> Bits:
    return np.asarray(np.asarray(numbers, np.float32).astype(np.float16).view(np.uint16).astype(np.uint32))


def e4m3(bits: Bits) -> Bits:
    """Two E4M3 numbers as float16."""
    codes = torch.from_numpy(np.ascontiguousarray(np.asarray(bits, np.uint32)).view(np.uint8).copy())
    both = codes.view(torch.float8_e4m3fn).to(torch.float16).view(torch.int16).numpy().view(np.uint16)
    both = both.reshape(*np.shape(bits), 4)[..., :2].astype(np.uint32)
    return both[..., 0] | (both[..., 1] << np.uint32(16))


def fused(a: Any, b: Any, c: Any) -> Bits:
    """a b + c in float32, rounded once: the product of two float32 is exact in float64."""
    return back((floats(a).astype(np.float64) * floats(b) + floats(c)).astype(np.float32))


OPERATIONS: dict[str, Callable[..., Bits]] = {
    "mov.b32": lambda a: a, "mov.f32": lambda a: a,
    "shl.b32": lambda a, b: a << b, "shr.b32": lambda a, b: a >> b, "shr.u32": lambda a, b: a >> b,
    "and.b32": lambda a, b: a & b, "or.b32": lambda a, b: a | b, "xor.b32": lambda a, b: a ^ b,
    "add.u32": lambda a, b: a + b,
    "max.u32": np.maximum, "lop3.b32": logic, "prmt.b32": permuted,
    "setp.eq.u32": lambda a, b: np.asarray(a == b).astype(np.uint32),
    "selp.b32": lambda a, b, c: np.where(np.asarray(c) != 0, a, b).astype(np.uint32),
    "cvt.f32.f16": lambda a: back(half(a)), "cvt.u16.u32": lambda a: a & np.uint32(0xFFFF),
    "cvt.rn.f16x2.e4m3x2": e4m3, "fma.rn.bf16x2": by_wide_halves,
    "cvt.rn.bf16x2.f32": lambda high, low: (as_bf16(floats(high)) << np.uint32(16)) | as_bf16(floats(low)),
    "cvt.rn.f16x2.f32": lambda high, low: (as_f16(floats(high)) << np.uint32(16)) | as_f16(floats(low)),
    "div.rn.f32": lambda a, b: back(floats(a) / floats(b)),
    "add.rn.f16x2": by_halves(lambda a, b: a + b), "fma.rn.f16x2": by_halves(lambda a, b, c: a * b + c),
    "mul.rn.f32": lambda a, b: back(floats(a) * floats(b)), "add.rn.f32": lambda a, b: back(floats(a) + floats(b)),
    "fma.rn.f32": fused,
}  # fmt: skip

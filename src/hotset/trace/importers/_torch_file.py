"""Reading a file of `torch.save` without running it: no pickle, no torch.

Such a file is a zip archive: a pickle, which is a program, and the bytes of the tensors beside it. The instructions of
that program are looked at one by one, and the few that build dictionaries, lists, tuples, numbers, text and tensors
are followed; nothing is imported and nothing is called, whatever it names. Any other instruction refuses the file.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.errors import TraceError
from hotset.trace.importers._archive import FAULTS, fill, refuse_bomb

_PROGRAM = "/data.pkl"
_MAX_PROGRAM_BYTES = 1 << 30
_TYPES = {
    "torch IntStorage": "<i4", "torch LongStorage": "<i8", "torch ShortStorage": "<i2", "torch CharStorage": "i1",
    "torch ByteStorage": "u1", "torch BoolStorage": "?", "torch FloatStorage": "<f4", "torch DoubleStorage": "<f8",
    "torch HalfStorage": "<f2",
}  # fmt: skip
_TENSOR, _HOOKS = "torch._utils _rebuild_tensor_v2", "collections OrderedDict"
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Name(NamedTuple):
    """Something that the program names; it is never looked up."""

    text: str


class _Storage(NamedTuple):
    """The bytes of tensors: a member of the archive."""

    dtype: str
    key: str
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file, not read yet."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """What reading it takes: the tensor, or all of its storage where that is larger."""
        return max(math.prod(self.shape), self.storage.length) * np.dtype(self.storage.dtype).itemsize


class _Mark:
    """Where a run of values on the stack begins."""


class _Machine:
    """Follows the instructions that build plain values."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.rules: dict[str, Callable[[Any], None]] = {
            "MARK": lambda _: self.stack.append(_Mark()),
            "EMPTY_DICT": lambda _: self.stack.append({}),
            "EMPTY_LIST": lambda _: self.stack.append([]),
            "TUPLE": lambda _: self.stack.append(tuple(self.run())),
            "APPEND": lambda _: self.extend([self.stack.pop()]),
            "APPENDS": lambda _: self.extend(self.run()),
            "SETITEM": lambda _: self.update([self.stack.pop(-2), self.stack.pop()]),
            "SETITEMS": lambda _: self.update(self.run()),
            "GLOBAL": lambda text: self.stack.append(_Name(text)),
            "BINPERSID": lambda _: self.stack.append(_storage(self.stack.pop())),
            "REDUCE": lambda _: self.stack.append(_made(self.stack.pop(-2), self.stack.pop())),
            "BINPUT": self.remember,
            "LONG_BINPUT": self.remember,
            "MEMOIZE": lambda _: self.remember(len(self.memo)),
            "BINGET": lambda place: self.stack.append(self.memo[place]),
            "LONG_BINGET": lambda place: self.stack.append(self.memo[place]),
            "PROTO": lambda _: None,
            "FRAME": lambda _: None,
        }

    def follow(self, name: str, argument: Any) -> None:
        """Do what one instruction says, or refuse it."""
        if name in _VALUES:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            count = _TUPLES[name]
            if count > len(self.stack):
                raise TraceError("its program takes what is not there")
            values = [self.stack.pop() for _ in range(count)]
            self.stack.append(tuple(reversed(values)))
        elif name in self.rules:
            self.rules[name](argument)
        else:
            raise TraceError(f"it would have Python do {name}, which no recording needs: it is not read")

    def remember(self, place: int) -> None:
        """Keep the value on top for later."""
        self.memo[place] = self.stack[-1]

    def run(self) -> list[Any]:
        """The values above the last mark."""
        values: list[Any] = []
        while not isinstance(value := self.stack.pop(), _Mark):
            values.append(value)
        return values[::-1]

    def extend(self, values: list[Any]) -> None:
        """Append to the list on top."""
        if type(self.stack[-1]) is not list:
            raise TraceError("its program appends to what is no list")
        self.stack[-1].extend(values)

    def update(self, values: list[Any]) -> None:
        """Fill the dictionary on top."""
        keys = values[::2]
        if type(self.stack[-1]) is not dict or len(values) % 2 or not all(type(key) in (str, int) for key in keys):
            raise TraceError("its program fills what is no dictionary of names")
        self.stack[-1].update(zip(keys, values[1::2], strict=True))


def _storage(words: Any) -> _Storage:
    match words:
        case ("storage", _Name(text=kind), str(key), str(), int(length)) if kind in _TYPES and length >= 0:
            return _Storage(_TYPES[kind], key, length)
    raise TraceError("it refers to bytes that are no tensor of plain numbers")


def _made(maker: Any, words: Any) -> Any:
    """What a call would have made; only tensors are, and the empty dictionary of hooks that goes with each."""
    match maker, words:
        case _Name(text=text), () if text == _HOOKS:
            return {}
        case _Name(text=text), (_Storage() as storage, int(offset), tuple(shape), tuple(strides), *_) if (
            text == _TENSOR
        ):
            sides = (offset, *shape, *strides)
            if len(shape) == len(strides) <= 8 and all(type(side) is int and 0 <= side < 1 << 48 for side in sides):
                return StoredTensor(storage, offset, shape, strides)
    name = maker.text if isinstance(maker, _Name) else "something"
    raise TraceError(f"it would have Python call {name[:80]!r}: it is not read")


class TorchFile:
    """An open file of `torch.save`: its value, with tensors that are read when asked for."""

    def __init__(self, path: Path) -> None:
        try:
            self._archive = zipfile.ZipFile(path)
            programs = [name for name in self._archive.namelist() if name.endswith(_PROGRAM)]
            if len(programs) != 1:
                raise TraceError("it is not a file of torch.save, or one of torch before 1.6: save it again")
            self._folder = programs[0].removesuffix(_PROGRAM)
            refuse_bomb(self._archive.infolist(), path.stat().st_size)
            self._check_order()
            self.value = self._run(programs[0])
        except (*FAULTS, AttributeError, TypeError, MemoryError, RecursionError) as error:
            raise TraceError(f"it is not a file of torch.save, or it is damaged: {str(error)[:200]}") from None

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def _check_order(self) -> None:
        member = self._archive.NameToInfo.get(f"{self._folder}/byteorder")
        if member is not None and member.file_size <= 16 and self._archive.read(member) != b"little":
            raise TraceError("its numbers are big-endian: save it again on a usual machine")

    def _run(self, name: str) -> Any:
        if self._archive.getinfo(name).file_size > _MAX_PROGRAM_BYTES:
            raise TraceError("its program is larger than that of any recording")
        machine = _Machine()
        for opcode, argument, _ in pickletools.genops(self._archive.read(name)):
            if opcode.name == "STOP":
                return machine.stack.pop()
            machine.follow(opcode.name, argument)
        raise TraceError("its program ends early: the file is cut off")

    def read(self, tensor: StoredTensor) -> npt.NDArray[Any]:
        """The numbers of a tensor that lies in its storage without gaps."""
        length, whole = math.prod(tensor.shape), np.dtype(tensor.storage.dtype).itemsize
        wanted = [math.prod(tensor.shape[place + 1 :]) for place in range(len(tensor.shape))]
        sides = zip(tensor.shape, tensor.strides, wanted, strict=True)
        if length and any(side > 1 and stride != want for side, stride, want in sides):
            raise TraceError("a tensor of it does not lie in one piece: save a contiguous copy")
        try:
            member = self._archive.getinfo(f"{self._folder}/data/{tensor.storage.key}")
            if tensor.offset + length > tensor.storage.length or tensor.storage.length * whole != member.file_size:
                raise TraceError("a tensor of it is larger than its bytes: the file is damaged or cut off")
            raw = np.empty(member.file_size, np.uint8)
            with self._archive.open(member) as file:
                fill(file, raw, member.filename)
        except FAULTS as error:
            raise TraceError(f"the bytes of a tensor cannot be read: {str(error)[:200]}") from None
        array: npt.NDArray[Any] = raw.view(tensor.storage.dtype)[tensor.offset : tensor.offset + length]
        return array.reshape(tensor.shape)

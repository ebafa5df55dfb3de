"""How a weight matrix is encoded: one weight format per file, found by the file's name.

A module of this package that defines `FORMAT` is a format; nothing else has to be edited to add one. `register` adds
one that lies elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple

from hotset.checks import shown, text
from hotset.errors import FormatError
from hotset.formats.base import (
    MAX_PARTS,
    Encoded,
    FormatPart,
    StoredModule,
    TileLoader,
    WeightFormat,
    element_type,
)
from hotset.formats.dense import Dense
from hotset.store import Matrix, Part, SlotLayout

__all__ = [
    "Encoded", "FormatPart", "StoredModule", "TileLoader", "Weight", "WeightFormat", "element_type", "find",
    "laid_out", "methods", "names", "parse", "register", "weight_of",
]  # fmt: skip

MAX_LETTERS = 200
_LARGEST = 1 << 30  # of a number among a format's options
_ON_OFF = {"on": True, "off": False}
_registered: dict[str, type[WeightFormat]] = {}


def names() -> list[str]:
    """All formats, by name, without importing them."""
    return sorted({*_files(), *_registered})


@cache
def _files() -> frozenset[str]:
    found = (module.name for module in iter_modules(__path__))
    return frozenset(name for name in found if name != "base" and not name.startswith("_"))


def methods() -> set[str]:
    """The `quant_method` of all checkpoints that some format reads."""
    return {method for name in names() for method in _class(name).methods}


def register(format_class: type[WeightFormat]) -> Callable[[], None]:
    """Make a format known that is no file of this package; returns what takes it back."""
    name = format_class.name
    if not name.isidentifier() or name in names():
        raise FormatError(f"a weight format cannot be called {shown(name)}: it is no plain word, or taken")
    _registered[name] = format_class

    def undo() -> None:
        _registered.pop(name, None)

    return undo


def parse(spec: str) -> WeightFormat:
    """Make a format from text: a name, then options, as in "dense:dtype=float32"."""
    if len(text(spec, "a weight format", FormatError)) > MAX_LETTERS:
        raise FormatError(f"{shown(spec)} is too long for the name of a weight format")
    name, _, rest = spec.partition(":")
    chosen = _class(name)
    return chosen(**dict(_option(chosen, part) for part in rest.split(",") if part))


def find(module: StoredModule) -> list[Encoded]:
    """The matrices of a checkpoint's module that are in some format; others are plain numbers, or in none of ours."""
    found = [one for name in names() for one in _class(name).detect(module)]
    taken = [word for one in found for word in one.tensors]
    if len(set(taken)) != len(taken):
        listed = " and ".join(sorted({one.format.name for one in found}))
        raise FormatError(f"{module.tensors[taken[0]].name} may be {listed}: hotset cannot tell which")
    return found


class Weight(NamedTuple):
    """One matrix of a slot layout."""

    format: WeightFormat
    outputs: int
    inputs: int
    parts: tuple[Part, ...]


def weight_of(layout: SlotLayout, name: str, *, transposed: bool = False) -> Weight:
    """A matrix of a layout by its name; one of plain numbers may lie transposed, as (inputs, outputs)."""
    matrix = layout.matrix(name)
    if matrix is None:
        part = layout.part(name)
        outputs, inputs = reversed(part.shape) if transposed else part.shape
        return Weight(Dense(part.dtype, transposed), outputs, inputs, (part,))
    chosen, parts = parse(matrix.format), tuple(layout.part(each) for each in matrix.parts)
    expected = [(part.shape, part.dtype) for part in chosen.parts(matrix.outputs, matrix.inputs)]
    if len(parts) > MAX_PARTS or [(part.shape, part.dtype) for part in parts] != expected:
        raise FormatError(f"the parts of {shown(name)} are not those of a matrix in {chosen.spec}")
    return Weight(chosen, matrix.outputs, matrix.inputs, parts)


def laid_out(name: str, chosen: WeightFormat, outputs: int, inputs: int) -> tuple[tuple[Part, ...], Matrix | None]:
    """The parts of a slot layout that a matrix takes, not yet placed, and what the layout says of it."""
    parts = tuple(
        Part(f"{name}:{part.role}" if part.role else name, part.shape, part.dtype)
        for part in chosen.parts(outputs, inputs)
    )
    if isinstance(chosen, Dense):
        return parts, None
    return parts, Matrix(name, outputs, inputs, chosen.spec, tuple(part.name for part in parts))


def _class(name: str) -> type[WeightFormat]:
    if name not in names():
        raise FormatError(f"no weight format is called {shown(name)}; there are {', '.join(names())}")
    found: type[WeightFormat] = _registered.get(name) or import_module(f"{__name__}.{name}").FORMAT
    return found


def _option(chosen: type[WeightFormat], part: str) -> tuple[str, Any]:
    key, equals, word = part.partition("=")
    defaults = {f.name: f.default for f in fields(chosen) if f.default is not MISSING}
    if not equals or key not in defaults:
        raise FormatError(f"{chosen.name} has no option {shown(key)}; it has {', '.join(defaults)} (write name=value)")
    return key, _convert(chosen, key, word, type(defaults[key]))


def _convert(chosen: type[WeightFormat], key: str, word: str, kind: type) -> Any:
    if kind is str:
        return word
    if kind is bool and word in _ON_OFF:
        return _ON_OFF[word]
    if kind is int and word.isascii() and word.isdecimal() and int(word) <= _LARGEST:
        return int(word)
    raise FormatError(f"{chosen.name}: {key} cannot be {shown(word)}")

"""The shape of a Mixture-of-Experts model, and memory budgets written as people write them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from hotset.checks import number, put, whole
from hotset.checks import text as checked
from hotset.errors import BudgetError, HotsetError

MAX_LAYERS = 4096
MAX_EXPERTS = 32767
MAX_GRID = 1 << 20
MAX_SLOTS = 1 << 60

_MAX_DIGITS = 18
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_SLOTS = re.compile(r"(\d{1,18})\s*slots?", re.IGNORECASE)
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_NUMBER = re.compile(r"\d{1,18}(?:\.\d+)?")
_LEAST_MEMORY_BYTES = 1 << 20
_BARE = re.compile(r"\d{1,3}(?:\.\d+)?")


class ExpertKey(NamedTuple):
    """One expert of the model: its MoE layer, counted from 0 over MoE layers only, and its number there."""

    layer: int
    expert: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """How many MoE layers a model has, how many experts each, and how many of them a token uses."""

    layers: int
    experts: int
    top_k: int
    expert_bytes: int | None = None

    def __post_init__(self) -> None:
        put(self, layers=whole(self.layers, "the MoE layers of a model", 1, MAX_LAYERS))
        put(self, experts=whole(self.experts, "the experts of a layer", 1, MAX_EXPERTS))
        if self.layers * self.experts > MAX_GRID:
            raise HotsetError(
                f"{self.layers} x {self.experts} experts is more than {MAX_GRID:,}, the most hotset handles"
            )
        put(self, top_k=whole(self.top_k, "top_k", 1, self.experts))
        if self.expert_bytes is not None:
            put(self, expert_bytes=whole(self.expert_bytes, "expert_bytes", 1, (1 << 60) - 1))

    @property
    def total_experts(self) -> int:
        """All experts of all layers."""
        return self.layers * self.experts

    @property
    def token_cycle(self) -> int:
        """The experts that one token uses on its way through all layers."""
        return self.layers * self.top_k


@dataclass(frozen=True, slots=True)
class Budget:
    """A memory budget as it was asked for: bytes, a fraction of all experts, or a number of slots."""

    size_bytes: int | None = None
    fraction: float | None = None
    slots: int | None = None

    def __post_init__(self) -> None:
        if self.size_bytes is not None:
            put(self, size_bytes=whole(self.size_bytes, "the bytes of a budget", 0, 1 << 60, BudgetError))
        if self.fraction is not None:
            put(self, fraction=number(self.fraction, "the share of a budget", 0, 1, BudgetError))
        if self.slots is not None:
            put(self, slots=whole(self.slots, "the slots of a budget", 0, MAX_SLOTS, BudgetError))

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read "8GiB", "25%" or "1536 slots"; of a number alone, up to 100, it is asked whether it is a share."""
        word = checked(text, "a budget", BudgetError).strip()
        if match := _SLOTS.fullmatch(word):
            if len(match[1]) > _MAX_DIGITS:
                raise BudgetError(f"a budget of a number with {len(match[1])} digits of slots is beyond any memory")
            return cls(slots=int(match[1]))
        if match := _PERCENT.fullmatch(word):
            return cls(fraction=_percent(float(match[1]), text))
        if is_bare_share(word):
            raise BudgetError(
                f'"{word}" is {word} % of the experts, or {word} bytes? Write "{word}%", or "{word}B" for bytes'
            )
        if _SIZE.fullmatch(word):
            return cls(size_bytes=parse_size(word))
        words = 'write a size ("8GiB"), a share ("25%") or "1536 slots"'
        raise BudgetError(f'cannot read the budget "{text:.60}": {words}')

    def slots_for(self, shape: ModelShape, staging: int = 0) -> int:
        """The slots that this budget buys for the cache, never more than the model has experts.

        Bytes are a promise about all memory, so they pay for the staging, too; a share or a number of slots speaks of
        the cache alone.
        """
        return min(self._slots(shape, staging), shape.total_experts)

    def _slots(self, shape: ModelShape, staging: int) -> int:
        if self.slots is not None:
            return self.slots
        if self.fraction is not None:
            return math.floor(self.fraction * shape.total_experts + 1e-9)
        if self.size_bytes is None:
            raise BudgetError('an empty budget: give bytes, a fraction or slots, or use Budget.parse("25%")')
        if shape.expert_bytes is None:
            raise BudgetError(
                "a budget in bytes needs the size of an expert, and this trace does not state it: "
                'pass --expert-bytes, or give the budget as a share ("25%") or in slots'
            )
        return max(self.size_bytes // shape.expert_bytes - staging, 0)

    def __str__(self) -> str:
        if self.slots is not None:
            return f"{self.slots} slots"
        if self.fraction is not None:
            return f"{100 * self.fraction:g}%"
        return format_size(self.size_bytes or 0)


def is_bare_share(text: str) -> bool:
    """Whether a budget is a number without a unit that could be a share: 1 to 100."""
    word = text.strip()
    return bool(_BARE.fullmatch(word)) and 0 < float(word) <= 100


def is_bare_size(text: str) -> bool:
    """Whether a size of memory is a number without a unit, and too small to be meant in bytes; 0 is none."""
    word = text.strip()
    return bool(_NUMBER.fullmatch(word)) and 0 < float(word) < _LEAST_MEMORY_BYTES


def parse_memory(text: str) -> int:
    """Read a size of memory as `parse_size` does; of a small number alone it is asked what it counts."""
    if is_bare_size(text):
        word = text.strip()
        raise BudgetError(f'"{word}" is {word} GiB, or {word} bytes? Write "{word}GiB", or "{word}B" for bytes')
    return parse_size(text)


def parse_size(text: str) -> int:
    """Read a size in bytes: "8GiB" is binary, "8GB" decimal, a plain number bytes."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise BudgetError(f'cannot read the size "{text}": write a number and a unit, such as 8GiB, 500MB or 4096')
    units = _BINARY if match[3] else _UNITS
    value = float(match[1]) * units[match[2].lower()]
    if value >= 1 << 60:
        raise BudgetError(f'the size "{text}" is beyond any memory')
    return int(value)


def format_size(size_bytes: float) -> str:
    """Write a size for people, in binary units."""
    value, unit = float(size_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    digits = 0 if unit == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


def _percent(value: float, text: str) -> float:
    if not 0 < value <= 100:
        raise BudgetError(f'the budget "{text}" must be more than 0 % and at most 100 % of the experts')
    return value / 100

"""Plans: for every precision the split of memory, what to expect of it, and the command to run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.analysis.planner.commands import commands_for
from hotset.analysis.planner.hits import BOUND, Hits
from hotset.analysis.planner.intervals import interval
from hotset.analysis.planner.model import PlannedModel, Precision
from hotset.analysis.planner.prompts import PromptTimes
from hotset.analysis.planner.rates import Engine, Rates
from hotset.analysis.planner.tiers import Memory, Split, bytes_for, least_bytes, least_ram_bytes, least_slots, split
from hotset.analysis.planner.times import TokenTimes
from hotset.errors import BudgetError

MORE_BYTES = 8 << 30
PROMPT_TOKENS = 2048

RatesOf = Callable[[Engine], Rates]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One precision: where its experts lie, and what to expect."""

    precision: str
    engine: str
    policy: str
    expert_bytes: int
    slots: int
    resident: float
    fast_bytes: int  # of the memory that computes: for experts
    rest_bytes: int  # for everything else
    unused_bytes: int
    ram_bytes: int  # experts in RAM behind a GPU
    disk_bytes: int  # experts on disk alone
    hit_rate: float
    tokens_per_s: float
    low_tokens_per_s: float
    high_tokens_per_s: float
    prompt_s: float
    bound_hit_rate: float
    bound_tokens_per_s: float
    more_tokens_per_s: float
    commands: list[str] = field(default_factory=list)
    lossy: bool = False  # whether these numbers are made of others, by a pack

    @property
    def more_share(self) -> float:
        """What more memory brings, as a share of what is expected now."""
        return self.more_tokens_per_s / self.tokens_per_s - 1

    def as_dict(self) -> dict[str, Any]:
        """The row as plain values."""
        return asdict(self) | {"more_share": self.more_share}


@dataclass(frozen=True, slots=True)
class TargetRow:
    """The least memory with which a precision reaches a target; None where it cannot."""

    precision: str
    reached: bool
    memory_bytes: int | None
    resident: float | None
    tokens_per_s: float  # with that memory, or with everything resident
    bound_tokens_per_s: float
    commands: list[str] = field(default_factory=list)
    lossy: bool = False  # whether these numbers are made of others, by a pack

    def as_dict(self) -> dict[str, Any]:
        """The row as plain values."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Planner:
    """A model, a workload and a machine."""

    model: PlannedModel
    memory: Memory
    hits: Hits
    rates_of: RatesOf
    misses_spread: float = 0.0
    prompt_tokens: int = PROMPT_TOKENS
    more_bytes: int = MORE_BYTES
    context: int | None = None  # tokens, where they are not the usual

    def rows(self) -> list[PlanRow]:
        """One row for each precision that fits."""
        check_fits(self.model, self.memory)
        return [row for precision in self.model.precisions() if (row := self.row(precision)) is not None]

    def left_out(self) -> list[str]:
        """A line for each precision that does not fit."""
        return [
            f"{precision.name} does not fit: the least is {_needed(self.model, precision, self.memory)}"
            for precision in self.model.precisions()
            if split(self.model, precision, self.memory) is None
        ]

    def row(self, precision: Precision) -> PlanRow | None:
        """What to expect of a precision; None where it does not fit."""
        found = split(self.model, precision, self.memory)
        if found is None:
            return None
        times = self._times(precision, found)
        policy, token_s = self._best(times, found)
        low_s, high_s = interval(times, self.hits.curves[policy], found.slots, token_s, self.misses_spread)
        more = split(self.model, precision, self.memory.with_fast(self.memory.fast_bytes + self.more_bytes))
        more_s = token_s if more is None else min(self._best(self._times(precision, more), more)[1], token_s)
        bound = self.hits.curves[BOUND]
        return PlanRow(
            precision=precision.name,
            engine=str(found.engine),
            policy=policy,
            expert_bytes=precision.expert_bytes,
            slots=found.slots,
            resident=found.resident,
            fast_bytes=found.fast_bytes,
            rest_bytes=found.rest_bytes,
            unused_bytes=found.unused_bytes,
            ram_bytes=found.ram_bytes,
            disk_bytes=found.disk_bytes,
            hit_rate=self.hits.curves[policy].hit_rate(found.slots),
            tokens_per_s=1 / token_s,
            low_tokens_per_s=1 / high_s,
            high_tokens_per_s=1 / low_s,
            prompt_s=PromptTimes(times, self.hits.popularity).first_token_s(
                self.prompt_tokens, found.resident, self._far_share(policy, found)
            ),
            bound_hit_rate=bound.hit_rate(found.slots),
            bound_tokens_per_s=1 / self._floor_s(times, found),
            more_tokens_per_s=1 / more_s,
            commands=commands_for(self.model, precision, found, policy, self.context),
            lossy=precision.lossy,
        )

    def speeds(self, precision: Precision, sizes_bytes: Floats) -> Floats:
        """Tokens per second for amounts of the memory that computes; none where a model does not run."""
        found = [self._speed(precision, int(size)) for size in sizes_bytes]
        return np.array([math.nan if each is None else each for each in found])

    def target(self, precision: Precision, tokens_per_s: float) -> TargetRow:
        """The least of the memory that computes with which so many tokens per second are expected."""
        total = self.model.shape.total_experts
        candidates = np.arange(least_slots(self.model.shape), total + 1)
        whole = self._at(precision, total)
        times = self._times(precision, whole)
        ample_s = self._best(times, whole)[1]
        engine = self._engine(precision)
        token_s = self._by_slots(TokenTimes(self.model, precision, self.rates_of(engine)), candidates, engine)
        token_s[-1] = ample_s
        enough = np.flatnonzero(token_s <= (1 + 1e-9) / tokens_per_s)
        bound = 1 / times.floor_s(0.0)
        if not len(enough):
            return TargetRow(precision.name, False, None, None, 1 / ample_s, bound, lossy=precision.lossy)
        slots = int(candidates[enough[0]])
        needed = bytes_for(self.model, precision, slots, Engine.DEVICE if slots == total and engine is not Engine.CPU
                           else engine)  # fmt: skip
        reached = split(self.model, precision, self.memory.with_fast(needed))
        if reached is None:  # RAM behind a GPU is too small for all but the whole model
            reached, needed = whole, bytes_for(self.model, precision, total, Engine.DEVICE)
        policy, reached_s = self._best(self._times(precision, reached), reached)
        commands = commands_for(self.model, precision, reached, policy, self.context)
        resident = reached.resident
        return TargetRow(precision.name, True, needed, resident, 1 / reached_s, bound, commands, precision.lossy)

    def _speed(self, precision: Precision, size_bytes: int) -> float | None:
        found = split(self.model, precision, self.memory.with_fast(size_bytes))
        return None if found is None else 1 / self._best(self._times(precision, found), found)[1]

    def _at(self, precision: Precision, slots: int) -> Split:
        """The split with memory for so many slots."""
        engine = Engine.CPU if self.memory.gpu_bytes is None else Engine.DEVICE
        needed = bytes_for(self.model, precision, slots, engine)
        found = split(self.model, precision, self.memory.with_fast(needed))
        assert found is not None  # noqa: S101 - all experts fit
        return found

    def _engine(self, precision: Precision) -> Engine:
        """What computes where not everything is resident."""
        probe = split(self.model, precision, self.memory.with_fast(least_bytes(self.model, precision) * 2))
        if self.memory.gpu_bytes is None:
            return Engine.CPU
        return Engine.HOST if probe is None else probe.engine

    def _times(self, precision: Precision, found: Split) -> TokenTimes:
        return TokenTimes(self.model, precision, self.rates_of(found.engine))

    def _best(self, times: TokenTimes, found: Split) -> tuple[str, float]:
        return self.fastest(times, found.slots, found.ram_slots if found.is_short_of_ram else None)

    def fastest(self, times: TokenTimes, slots: int, ram_slots: int | None = None) -> tuple[str, float]:
        """The policy that is expected to be fastest, and a token's time by it; of near equals the default.

        `ram_slots` are those behind a GPU, where they do not hold all experts.
        """
        by_policy = {
            name: float(np.interp(slots, curve.slots, times.token_s(curve, far=self._far(name, ram_slots))))
            for name, curve in self.hits.curves.items()
            if name != BOUND
        }
        policy = min(by_policy, key=lambda name: round(by_policy[name], 9))
        return policy, min(by_policy.values())

    def _by_slots(self, times: TokenTimes, slots: npt.NDArray[np.int64], engine: Engine) -> Floats:
        """A token's time for every number of slots, by the best policy of each."""
        ram_slots = None
        if engine is Engine.HOST:
            small = split(self.model, times.precision, self.memory.with_fast(least_bytes(self.model, times.precision)))
            ram_slots = small.ram_slots if small is not None and small.is_short_of_ram else None
        lines = [
            np.interp(slots, curve.slots, times.token_s(curve, far=self._far(name, ram_slots)))
            for name, curve in self.hits.curves.items()
            if name != BOUND
        ]
        found: Floats = np.min(lines, axis=0)
        return found

    def _far(self, policy: str, ram_slots: int | None) -> Floats | None:
        return None if ram_slots is None else self.hits.far_misses(policy, ram_slots)

    def _far_share(self, policy: str, found: Split) -> float:
        """The share of the experts that neither a GPU nor RAM behind it holds."""
        if not found.is_short_of_ram:
            return 0.0
        return 1 - self.hits.held_slots(policy, found.slots, found.ram_slots) / found.total

    def _floor_s(self, times: TokenTimes, found: Split) -> float:
        """The least time of a token with the optimum's misses: from disk those of what both tiers hold at most."""
        bound = self.hits.curves[BOUND]
        missed = np.minimum.accumulate(bound.misses_per_token())
        both = found.slots + found.ram_slots
        near, far = (float(np.interp(slots, bound.slots, missed)) for slots in (found.slots, both))
        return times.floor_s(near, far if found.is_short_of_ram else 0.0)


def check_fits(model: PlannedModel, memory: Memory) -> None:
    """Refuse a machine on which no precision runs: known before anything is replayed."""
    precisions = model.precisions()
    if any(split(model, precision, memory) is not None for precision in precisions):
        return
    smallest = min(precisions, key=lambda precision: least_bytes(model, precision))
    remedy = "a smaller --context" if memory.gpu_bytes is None else "--gpu 0 (the CPU)"
    raise BudgetError(
        f"{model.title} does not fit in any precision: the least that works is {_needed(model, smallest, memory)}, "
        f"with {smallest.name}; give more, or plan for {remedy} or a smaller model"
    )


def _needed(model: PlannedModel, precision: Precision, memory: Memory) -> str:
    """The least of the memory that is short."""
    least, gpu = least_bytes(model, precision), memory.gpu_bytes is not None
    if gpu and memory.fast_bytes >= least:
        return f"{_mib(least_ram_bytes(model, precision))} of RAM behind the GPU"
    return f"{_mib(least)} of {'GPU memory' if gpu else 'RAM'}"


def _mib(size_bytes: int) -> str:
    return f"{math.ceil(size_bytes / (1 << 20))} MiB"

"""Experts fetched before they are asked for: they wait in rows of their own, so a wrong prediction evicts nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hotset.engine.batch import ExpertBatch
from hotset.engine.slots import Placement, SlotCache
from hotset.engine.step import Step
from hotset.prefetch import PrefetchPlan
from hotset.shape import ExpertKey
from hotset.trace import Phase
from hotset.transfer.mover import Prefetching
from hotset.transfer.reads import Load

IsNear = Callable[[ExpertKey], bool]
"""Whether an expert need not be prefetched: it is here, or on its way."""


@dataclass(slots=True)
class Prefetched:
    """One expert that was prefetched into a row, or is on its way there."""

    key: ExpertKey
    row: int
    transfer: Any  # Prefetching, of a kind that its source knows
    size_bytes: int
    step: int  # after an event of which it was sent for
    late: bool = False  # it was still on its way when it was asked for
    has_slot: bool = False  # its row is that of a slot now


@dataclass
class PrefetchCounts:
    """What came of the predictions, in experts and in bytes."""

    in_time: int = 0
    late: int = 0
    wasted: int = 0
    in_time_bytes: int = 0
    late_bytes: int = 0
    wasted_bytes: int = 0

    def add(self, now: PrefetchCounts, before: PrefetchCounts) -> None:
        """Add what others have counted since an earlier time."""
        for name in vars(now):
            setattr(self, name, getattr(self, name) + getattr(now, name) - getattr(before, name))

    def reset(self) -> None:
        """Count from here."""
        vars(self).update(vars(PrefetchCounts()))


class PrefetchSource(Protocol):
    """Where experts are prefetched from."""

    def has(self, layer: int, expert: int) -> bool:
        """Whether an expert can be prefetched."""

    def size_bytes(self, layer: int, expert: int) -> int:
        """What is moved for an expert."""

    def start(self, loads: Sequence[Load]) -> Sequence[Prefetching]:
        """Put experts on their way, in this order, behind all that events wait for; returns the transfer of each."""

    def promote(self, transfer: Any) -> None:
        """Say that an event waits for a transfer now."""

    def failed(self, transfer: Any, expert: int) -> bool:
        """Whether a transfer met a fault: it is fetched again on demand, which says so if it meets it, too."""


class Predictor(Protocol):
    """Decides which experts to prefetch: asked once per layer of a decode step, before its experts compute."""

    @property
    def needs_tokens(self) -> bool:
        """Whether it wants to know which tokens a step computes."""

    def choose(self, layer: int, event: ExpertBatch, step: Step, free_rows: int, is_near: IsNear) -> list[ExpertKey]:
        """What to fetch once a layer was routed: at most `free_rows` experts, none that is here or on its way."""

    def observe(self, layer: int, event: ExpertBatch, step: Step) -> None:
        """Learn from an event after which nothing is prefetched, as in a prompt."""

    def ask_device(self, layer: int, hidden: torch.Tensor, step: Step) -> torch.Tensor | None:
        """What the device has to say before the routing is known to the host: it comes along with that."""

    def note_step(self, step: Step, seconds: float) -> None:
        """Learn how long a whole step took."""

    def note_event(self, layer: int, step: Step, stall_s: float, in_time: int, late: int) -> None:
        """Learn how an event went: how long it stalled, and how many predictions for it came in time or late."""


class Prefetcher:
    """Predicts what the next layers ask for, and has it on its way by then; callers hold the engine's lock."""

    def __init__(
        self, plan: PrefetchPlan, cache: SlotCache, source: PrefetchSource, predictor: Predictor | None = None
    ) -> None:
        if plan.rows != len(cache.prefetch_rows):
            raise ValueError(f"the plan has {plan.rows} rows for prefetch, the cache {len(cache.prefetch_rows)}")
        self.counts = PrefetchCounts()
        self.plan, self.predictor = plan, predictor
        self._asks_for_tokens = True
        self._cache, self._source = cache, source
        self._held: dict[ExpertKey, Prefetched] = {}
        self._draining: list[Prefetched] = []  # cancelled, and perhaps still written to

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._held

    @property
    def needs_tokens(self) -> bool:
        """Whether the predictor wants to know which tokens a step computes."""
        return self._asks_for_tokens and self.predictor is not None and self.predictor.needs_tokens

    def ignore_tokens(self) -> None:
        """Predict without the tokens of a step: to ask a device for them is to wait for it."""
        self._asks_for_tokens = False

    def predict(self, step: Step, layer: int, hidden: torch.Tensor) -> torch.Tensor | None:
        """What the predictor wants to know of a layer's input, on its device, in decode."""
        if self.predictor is None or step.phase != Phase.DECODE:
            return None
        return self.predictor.ask_device(layer, hidden, step)

    def claim(self, step: Step, placement: Placement) -> dict[int, Prefetched]:
        """What was prefetched for an event and is needed: its row becomes that of its slot. The rest is cancelled."""
        claimed: dict[int, Prefetched] = {}
        if not self._held:
            return claimed
        wanted = dict(placement.loads[:, :2].tolist())
        for one in [held for held in self._held.values() if held.key.layer == placement.layer]:
            del self._held[one.key]
            expert = one.key.expert
            is_stale = not self.plan.wraps and one.step != step.number
            if is_stale or expert not in wanted or self._source.failed(one.transfer, expert):
                self._cancel(one)
                continue
            claimed[expert] = one
            self._count(one)
            if wanted[expert] >= 0:
                self._cache.claim(wanted[expert], one.row)
                one.has_slot = True
        if claimed:
            at = placement.experts.searchsorted(list(claimed))
            placement.rows[at] = [one.row for one in claimed.values()]
        return claimed

    def release(self, step: Step, layer: int, stalled_s: float, claimed: Mapping[int, Prefetched]) -> None:
        """Take back the rows of experts that were computed and have no slot, and tell the predictor how it went."""
        late = 0
        for one in claimed.values():
            late += one.late
            if not one.has_slot:
                self._cache.return_row(one.row)
        if self.predictor is not None and step.phase == Phase.DECODE:
            self.predictor.note_event(layer, step, stalled_s, len(claimed) - late, late)

    def issue(self, step: Step, layer: int, batch: ExpertBatch) -> None:
        """Start transfers for what the next layers will probably ask for; of prompts it only learns."""
        if self.predictor is None:
            return
        if step.phase != Phase.DECODE:
            self.predictor.observe(layer, batch, step)
            return
        keys = self.predictor.choose(layer, batch, step, self.free_rows, self._is_near)
        if keys:
            self._start(step, keys)

    def _start(self, step: Step, keys: Iterable[ExpertKey]) -> None:
        """Prefetch experts, in this order, as far as there are rows."""
        loads: list[Load] = []
        for key in dict.fromkeys(keys):  # one that is named twice takes one row
            if key in self._held or not self._source.has(*key):
                continue
            row = self._cache.take_row()
            if row is None:
                break
            loads.append(Load(*key, row))
        if loads:
            for load, transfer in zip(loads, self._source.start(loads), strict=True):
                key = ExpertKey(load.layer, load.expert)
                self._held[key] = Prefetched(key, load.row, transfer, self._source.size_bytes(*key), step.number)

    def note_step(self, step: Step, seconds: float) -> None:
        """Tell the predictor how long a decode step took."""
        if self.predictor is not None and step.phase == Phase.DECODE:
            self.predictor.note_step(step, seconds)

    @property
    def free_rows(self) -> int:
        """How many experts could be prefetched now."""
        if self._draining:
            self._drain()
        return len(self._cache.prefetch_rows)

    def clear(self) -> None:
        """Cancel everything, and wait until nothing is written to the rows any more."""
        for one in tuple(self._held.values()):
            self._cancel(one)
        self._held.clear()
        for one in self._draining:
            one.transfer.cancel_and_wait()
        self._drain()

    def reset(self) -> None:
        """Forget everything, after an interrupt and once nothing is written to rows any more: the cache has them."""
        while self._held:
            self._cancel(self._held.popitem()[1])
        self._draining = []

    def _is_near(self, key: ExpertKey) -> bool:
        """Whether an expert need not be prefetched: it is here, or on its way."""
        return self._cache.is_resident(key) or key in self._held

    def _count(self, one: Prefetched) -> None:
        one.late = not one.transfer.done
        if one.late:
            self.counts.late += 1
            self.counts.late_bytes += one.size_bytes
            self._source.promote(one.transfer)
        else:
            self.counts.in_time += 1
            self.counts.in_time_bytes += one.size_bytes

    def _cancel(self, one: Prefetched) -> None:
        one.transfer.cancel()
        self.counts.wasted += 1
        self.counts.wasted_bytes += one.size_bytes
        self._draining.append(one)

    def _drain(self) -> None:
        """Take back the rows of what was cancelled, once nothing is written to them."""
        done = [one for one in self._draining if one.transfer.done]
        if done:
            self._draining = [one for one in self._draining if one not in done]
            for one in done:
                self._cache.return_row(one.row)

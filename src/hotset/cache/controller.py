"""Serves events one by one: what the engine calls once per layer and pass, and the simulator in bulk."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.cache.counters import Counters
from hotset.cache.kernel import fill, kernels_of
from hotset.cache.pins import check_pins, count_pins, keys_of, per_group
from hotset.cache.plan import SlotPlan
from hotset.cache.residency import Residency
from hotset.cache.table import FOREVER, RESERVED, make_table
from hotset.cache.usage import make_usage
from hotset.checks import choice, instance, whole
from hotset.errors import BudgetError, HotsetError
from hotset.policies import Admit, Grid, Policy, restore_state, save_state
from hotset.shape import ExpertKey
from hotset.trace import Event, Phase
from hotset.trace.events import EventTable

_MAX_TOKENS = (1 << 31) - 1
_PARTS = 8  # parts in which the past of a profile is observed, so that a sliding window forgets it bit by bit
_NONE = np.zeros(0, np.int32)


class Load(NamedTuple):
    """One expert that had to be fetched: its slot, or none when it only passed through staging."""

    key: ExpertKey
    slot: int | None
    evicted: ExpertKey | None


class Served(NamedTuple):
    """What serving one event did."""

    hits: int
    loads: tuple[Load, ...]


class Replayed(NamedTuple):
    """What serving many events did."""

    counters: Counters
    misses: npt.NDArray[np.int32]  # [events]
    log: npt.NDArray[np.int32]  # [loads, 5]: layer, expert, slot, layer and expert evicted; -1 for none


class Controller:
    """A residency under one policy: looks events up as a whole, keeps the budget, never evicts what runs."""

    def __init__(self, plan: SlotPlan, policy: Policy, *, prefill: Admit = Admit.FREE) -> None:
        self.plan = instance(plan, SlotPlan, "the plan of a cache")
        self.policy = instance(policy, Policy, "the policy of a cache")
        self.prefill = choice(prefill, Admit, "the admission of prefill")
        self.state = policy.start(plan.shape)
        self.table = make_table(plan, floors=policy.admission is not Admit.LATE)
        self.usage = make_usage(plan.shape)
        self.residency = Residency(plan, self.table, self.victim)
        self.recalled_tokens = 0  # the tokens' worth of learning that came from a profile
        self._kernels = kernels_of(type(policy))
        self._ones = np.ones(plan.shape.experts, np.int32)
        self._no_routes = np.zeros((0, plan.shape.top_k), np.int32)

    def serve(self, event: Event) -> Served:
        """Serve one event and return what happened, for reading."""
        _check(self.plan, event)
        experts = np.array(event.experts, np.int32)
        counts = np.array(event.counts, np.int32)
        missing = self.route(event.layer, experts, counts, event.tokens, event.phase)
        rows = self.table.loads[:missing].tolist()
        return Served(len(experts) - missing, tuple(_load(event.layer, row) for row in rows))

    def route(
        self,
        layer: int,
        experts: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32] | None = None,
        tokens: int = 1,
        phase: Phase = Phase.DECODE,
        request: int = 0,
        routes: npt.NDArray[np.int32] | None = None,
        requests: npt.NDArray[np.int32] = _NONE,
    ) -> int:
        """Serve one event on the hot path and return how many rows of table.loads are new.

        The caller answers for the arguments: an existing layer, and existing experts, each once and rising.
        """
        if not self.policy.can_serve(self.state, len(experts)):
            raise HotsetError(f"{self.policy.name} needs the future: replay a recorded trace")
        if counts is None:
            counts = self._ones[: len(experts)]
        admit = self.policy.admission if phase == Phase.DECODE else self.prefill
        return self._kernels.serve(
            self.table, self.state, self.usage, layer, experts, counts, tokens, int(phase), request,
            self._no_routes if routes is None else routes, requests, int(admit),
        )  # fmt: skip

    def replay(self, events: EventTable, *, log: bool = False) -> Replayed:
        """Serve all events in order in compiled code; the counters are those of these events alone."""
        if (events.shape.layers, events.shape.experts) != (self.plan.shape.layers, self.plan.shape.experts):
            raise HotsetError("these events are of a model of another shape than this cache")
        events.check()
        self.state = self.policy.with_future(self.state, events)
        before = Counters(self.table.counters.copy())
        misses = np.zeros(len(events), np.int32)
        rows = np.zeros((events.accesses if log else 0, 5), np.int32)
        admits = np.array([self.prefill, self.policy.admission], np.int64)
        logged = self._kernels.replay(
            self.table, self.state, events.start, events.layer, events.tokens, events.phase, events.request,
            events.expert, events.count, *self._routed(events), admits, misses, rows,
        )  # fmt: skip
        return Replayed(Counters(self.table.counters.copy()) - before, misses, rows[:logged])

    def _routed(self, events: EventTable) -> tuple[npt.NDArray[Any], ...]:
        """Where each event's tokens are, what they chose and whose they are, and scratch for one event of them."""
        found = events.routed
        if not self.policy.needs_routes or found is None:
            none = np.zeros((0, self.plan.shape.layers, self.plan.shape.top_k), np.int16)
            return np.zeros((0, 2), np.int64), none, _NONE, self._no_routes, _NONE
        most = int(np.diff(found.bounds, axis=1).max(initial=0))
        return *found, np.zeros((most + 1, found.experts.shape[2]), np.int32), np.zeros(most + 1, np.int32)

    def counters(self) -> Counters:
        """A copy of the counters."""
        return Counters(self.table.counters.copy())

    def residents(self) -> list[ExpertKey]:
        """The experts that have a slot, by layer and expert."""
        return keys_of(self.table.slot_of >= 0)

    def preload(self, scores: Grid) -> int:
        """Assign empty slots to the highest-scored experts, best first; returns how many got one."""
        self.residency.changing()
        scores = self.plan.checked_grid(scores)
        order = np.argsort(-scores, axis=None, kind="stable")
        order = order[scores.reshape(-1)[order] > 0]
        layers, experts = np.divmod(order, self.plan.shape.experts)
        self.residency.changes += 1
        assigned = fill(self.table, layers.tolist(), experts.tolist())  # once for a cache: too short to be compiled
        self.residency.changes -= 1
        return assigned

    def victim(self, layer: int) -> int | None:
        """The slot that the next candidate of a layer without empty slots would take; None if none may be evicted."""
        slot = self._kernels.victim(self.table, self.state, layer, _NONE, self._no_routes)
        return None if slot < 0 else int(slot)

    def seed_from_rates(self, rates: Grid, tokens: int, recalled_tokens: int = 0) -> None:
        """Let the policy start as if a prompt of so many tokens had used the experts at these rates.

        `recalled_tokens` are those that its state was learnt from already.
        """
        self.recalled_tokens = recalled_tokens
        self.residency.changing()
        rates = self.plan.checked_grid(rates)
        hottest_last = np.argsort(np.argsort(rates, axis=1, kind="stable"), axis=1)
        fresh = self.table.last == 0  # among equals the hotter counts as used later, which is all that recency can know
        self.table.last[fresh] = (hottest_last - rates.shape[1])[fresh]
        parts = np.diff(np.linspace(0, tokens, min(tokens, _PARTS) + 1).astype(int)).tolist()
        for layer, row in enumerate(rates):
            experts = np.flatnonzero(row > 0).astype(np.int32)
            for part in parts if len(experts) else ():
                self._kernels.seed_from_rates(
                    self.table, self.state, layer, experts, row[experts] * part, part, self._no_routes, _NONE
                )

    def adopt(self, other: Controller) -> None:
        """Exchange policies, with all that they learnt, with another cache of the same plan; residency stays."""
        self.residency.changing()
        other.residency.changing()
        mine, theirs = ({name: vars(one)[name] for name in ("policy", "state", "_kernels")} for one in (self, other))
        # In one call: an interrupt in between would leave kernels with the state of another policy.
        deque(map(dict.update, (vars(self), vars(other)), (theirs, mine)), maxlen=0)

    def pin(self, keys: Iterable[ExpertKey], hold: int = FOREVER) -> None:
        """Keep these experts for good, taking empty slots for those not resident; refused whole if one finds none.

        A `hold` of WARM keeps them for now, and changes nothing about those that are kept for good.
        """
        self.residency.changing()
        grid = check_pins(self.plan, self.table, keys)
        homeless = per_group(self.table, (grid > 0) & (self.table.slot_of < 0)) - self.table.num_free
        if (homeless > 0).any():
            raise BudgetError(
                f"{homeless[homeless > 0].sum()} experts to pin find no empty slot: pin before anything runs, "
                "or pin what is resident"
            )
        self.preload(grid)
        self.residency.changes += 1
        self.table.last[(grid > 0) & (self.table.last != FOREVER)] = hold
        count_pins(self.table)
        self.residency.changes -= 1

    def unpin(self, keys: Iterable[ExpertKey], hold: int = FOREVER) -> None:
        """Let these experts be evicted again."""
        self.residency.changing()
        self.residency.changes += 1
        for key in {self.plan.checked_key(key) for key in keys} & set(self.pins(hold)):
            self.table.last[key] = RESERVED if key in self.residency.reserved else self.table.clock[0]
        count_pins(self.table)
        self.residency.changes -= 1

    def pins(self, hold: int = FOREVER) -> list[ExpertKey]:
        """The pinned experts, by layer and expert."""
        return keys_of(self.table.last == hold)

    def save(self) -> dict[str, npt.NDArray[Any]]:
        """What the policy has learnt, by name."""
        return save_state(self.state)

    def restore(self, saved: dict[str, npt.NDArray[Any]]) -> None:
        """Take up what a policy of the same kind and shape had learnt."""
        self.residency.changing()
        restore_state(self.state, saved)


def _check(plan: SlotPlan, event: Event) -> None:
    """Refuse an event that the compiled code could not serve."""
    if not isinstance(event.experts, tuple | list) or not isinstance(event.counts, tuple | list):
        raise HotsetError("the experts of an event and their counts are tuples of whole numbers")
    for expert in event.experts:
        plan.checked_key(ExpertKey(event.layer, expert))
    rising = all(lower < higher for lower, higher in pairwise(event.experts))
    if not (event.experts and rising and len(event.counts) == len(event.experts)):
        raise HotsetError("an event names at least one expert, each once and in rising order, and a count of each")
    choice(event.phase, Phase, "the phase of an event")
    for number in (event.tokens, *event.counts):
        whole(number, "the tokens of an event", 1, _MAX_TOKENS)


def _load(layer: int, row: list[int]) -> Load:
    expert, slot, evicted_layer, evicted_expert = row
    return Load(
        ExpertKey(layer, expert),
        None if slot < 0 else slot,
        None if evicted_expert < 0 else ExpertKey(evicted_layer, evicted_expert),
    )

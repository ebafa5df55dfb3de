"""Serves events one by one: what the engine calls once per layer and pass, and the simulator in bulk."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotset.cache.counters import Counters
from hotset.cache.kernel import kernels_of
from hotset.cache.lease import CacheLease
from hotset.cache.plan import Scope, SlotPlan
from hotset.cache.table import FOREVER, RESERVED, make_table
from hotset.cache.usage import make_usage
from hotset.checks import choice, instance, shown, whole
from hotset.errors import BudgetError, HotsetError
from hotset.policies import Admit, Grid, Policy, restore_state, save_state
from hotset.shape import ExpertKey
from hotset.trace import Event, Phase
from hotset.trace.events import EventTable

_MAX_TOKENS = (1 << 31) - 1
_PARTS = 8  # parts in which the past of a profile is observed, so that a sliding window forgets it bit by bit


class Load(NamedTuple):
    """One expert that had to be fetched: its slot, or none when it only passed through staging."""

    key: ExpertKey
    slot: int | None
    evicted: ExpertKey | None


class Served(NamedTuple):
    """What serving one event did."""

    hits: int
    loads: tuple[Load, ...]


class Reservation(NamedTuple):
    """An expert on its way to a slot that is held for it."""

    slot: int
    last: int  # when it was last used
    owner: object  # the batch that brings it


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
        self.reserved: dict[ExpertKey, Reservation] = {}  # experts on their way to slots reserved for them
        self.changes = 0  # of the table that have begun and not ended: more than 0 between calls after an interrupt
        self.recalled_tokens = 0  # the tokens' worth of learning that came from a profile
        self.version = 0  # counts what changes the cache other than events: a holder of a copy takes it anew
        self.lease = CacheLease()  # recalled before any change: events may run on a device
        self._kernels = kernels_of(type(policy))
        self._no_experts = np.zeros(0, np.int32)
        self._ones = np.ones(plan.shape.experts, np.int32)

    def serve(self, event: Event) -> Served:
        """Serve one event and say in plain words what happened."""
        self._check(event)
        experts = np.array(event.experts, np.int32)
        counts = np.array(event.counts, np.int32)
        missing = self.route(event.layer, experts, counts, event.tokens, event.phase)
        rows = self.table.loads[:missing].tolist()
        return Served(len(experts) - missing, tuple(_load(event.layer, row) for row in rows))

    def _check(self, event: Event) -> None:
        """Refuse an event that the compiled code could not serve."""
        if not isinstance(event.experts, tuple | list) or not isinstance(event.counts, tuple | list):
            raise HotsetError("the experts of an event and their counts are tuples of whole numbers")
        for expert in event.experts:
            self._known(ExpertKey(event.layer, expert))
        rising = all(lower < higher for lower, higher in pairwise(event.experts))
        if not (event.experts and rising and len(event.counts) == len(event.experts)):
            raise HotsetError("an event names at least one expert, each once and in rising order, and a count of each")
        choice(event.phase, Phase, "the phase of an event")
        for number in (event.tokens, *event.counts):
            whole(number, "the tokens of an event", 1, _MAX_TOKENS)

    def route(
        self,
        layer: int,
        experts: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32] | None = None,
        tokens: int = 1,
        phase: Phase = Phase.DECODE,
        request: int = 0,
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
            self.table, self.state, self.usage, layer, experts, counts, tokens, int(phase), request, int(admit)
        )

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
            events.expert, events.count, admits, misses, rows,
        )  # fmt: skip
        return Replayed(Counters(self.table.counters.copy()) - before, misses, rows[:logged])

    def counters(self) -> Counters:
        """A copy of the counters."""
        return Counters(self.table.counters.copy())

    def residents(self) -> list[ExpertKey]:
        """The experts that have a slot, by layer and expert."""
        return [ExpertKey(*key) for key in np.argwhere(self.table.slot_of >= 0).tolist()]

    def changing(self) -> None:
        """Say, before looking at what is to change, that the cache is about to be changed other than by an event."""
        self.version += 1
        self.lease.recall()

    def preload(self, scores: Grid) -> int:
        """Assign empty slots to the highest-scored experts, best first; returns how many got one."""
        self.changing()
        scores = self._grid(scores)
        order = np.argsort(-scores, axis=None, kind="stable")
        order = order[scores.reshape(-1)[order] > 0]
        layers, experts = np.divmod(order, self.plan.shape.experts)
        return self._kernels.fill(self.table, layers.astype(np.int32), experts.astype(np.int32))

    def drop(self, keys: Iterable[ExpertKey]) -> None:
        """Empty the slots of these experts: what was to be loaded there never arrived."""
        self.changing()
        self.changes += 1
        for layer, expert in map(self._known, keys):
            slot = int(self.table.slot_of[layer, expert])
            if slot < 0:
                continue
            self.table.slot_of[layer, expert] = -1
            self.table.resident[layer] -= 1
            self.vacate(layer, slot)
        self.changes -= 1

    def vacate(self, layer: int, slot: int) -> None:
        """Put a slot that holds no expert back among the empty ones."""
        self.changing()
        self.changes += 1
        group = int(self.table.group_of[layer])
        self.table.layer_in[slot] = self.table.expert_in[slot] = -1
        self.table.free[self.table.bounds[group] + self.table.num_free[group]] = slot
        self.table.num_free[group] += 1
        self.changes -= 1

    def rebuild(self) -> None:
        """Derive the table anew from what is resident and what is reserved, if an interrupt broke off a change of it.

        That much is changed by single assignments; all else in the table follows from it.
        """
        if not self.changes:
            return
        self.changing()
        table = self.table
        for key, held in tuple(self.reserved.items()):
            if table.slot_of[key] == held.slot:  # it was given its slot
                self.restore_last(key)
        self._derive_slots()
        table.resident[:] = (table.slot_of >= 0).sum(axis=1)
        for group, (first, last) in enumerate(pairwise(table.bounds.tolist())):
            empty = np.flatnonzero(table.layer_in[first:last] < 0)[::-1] + first
            table.free[first : first + len(empty)] = empty
            table.num_free[group] = len(empty)
        self._count_pins()
        self.changes = 0

    def _derive_slots(self) -> None:
        table = self.table
        assigned = np.full((2, len(table.layer_in)), -1, np.int32)
        layers, experts = np.nonzero(table.slot_of >= 0)
        assigned[:, table.slot_of[layers, experts]] = layers, experts
        for (layer, expert), held in self.reserved.items():
            assigned[:, held.slot] = layer, expert
        table.layer_in[:], table.expert_in[:] = assigned

    def restore_last(self, key: ExpertKey) -> None:
        """Let an expert count as used when it was before its slot was held; it is not on its way any more."""
        if self.table.last[key] != FOREVER:
            self.table.last[key] = self.reserved[key].last
        del self.reserved[key]

    def victim(self, layer: int) -> int | None:
        """The slot that the next candidate of a layer without empty slots would take; None if none may be evicted."""
        slot = self._kernels.victim(self.table, self.state, layer, self._no_experts, self._no_experts)
        return None if slot < 0 else int(slot)

    def seed_from_rates(self, rates: Grid, tokens: int) -> None:
        """Let the policy start as if a prompt of so many tokens had used the experts at these rates."""
        self.changing()
        rates = self._grid(rates)
        hottest_last = np.argsort(np.argsort(rates, axis=1, kind="stable"), axis=1)
        fresh = self.table.last == 0  # among equals the hotter counts as used later, which is all that recency can know
        self.table.last[fresh] = (hottest_last - rates.shape[1])[fresh]
        parts = np.diff(np.linspace(0, tokens, min(tokens, _PARTS) + 1).astype(int)).tolist()
        for layer, row in enumerate(rates):
            experts = np.flatnonzero(row > 0).astype(np.int32)
            for part in parts if len(experts) else ():
                self._kernels.seed_from_rates(self.table, self.state, layer, experts, row[experts] * part, part)

    def adopt(self, other: Controller) -> None:
        """Exchange policies, with all that they learnt, with another cache of the same plan; who is resident stays."""
        self.changing()
        other.changing()
        names = ("policy", "state", "_kernels")
        mine, theirs = ({name: vars(one)[name] for name in names} for one in (self, other))
        # In one call: an interrupt in between would leave kernels with the state of another policy.
        deque(map(dict.update, (vars(self), vars(other)), (theirs, mine)), maxlen=0)

    def pin(self, keys: Iterable[ExpertKey]) -> None:
        """Keep these experts for good, taking empty slots for those not resident; refused whole if one finds none."""
        self.changing()
        grid = self.check_pins(keys)
        homeless = self._per_group((grid > 0) & (self.table.slot_of < 0)) - self.table.num_free
        if (homeless > 0).any():
            raise BudgetError(
                f"{homeless[homeless > 0].sum()} experts to pin find no empty slot: pin before anything runs, "
                "or pin what is resident"
            )
        self.preload(grid)
        self.changes += 1
        self.table.last[grid > 0] = FOREVER
        self._count_pins()
        self.changes -= 1

    def unpin(self, keys: Iterable[ExpertKey]) -> None:
        """Let these experts be evicted again."""
        self.changing()
        self.changes += 1
        for key in {self._known(key) for key in keys} & set(self.pins()):
            self.table.last[key] = RESERVED if key in self.reserved else self.table.clock[0]
        self._count_pins()
        self.changes -= 1

    def pins(self) -> list[ExpertKey]:
        """The pinned experts, by layer and expert."""
        return [ExpertKey(*key) for key in np.argwhere(self.table.last == FOREVER).tolist()]

    def save(self) -> dict[str, npt.NDArray[Any]]:
        """What the policy has learnt, by name."""
        return save_state(self.state)

    def restore(self, saved: dict[str, npt.NDArray[Any]]) -> None:
        """Take up what a policy of the same kind and shape had learnt."""
        self.changing()
        restore_state(self.state, saved)

    def _grid(self, values: object) -> Grid:
        """One number for each expert of this cache's model."""
        shape = (self.plan.shape.layers, self.plan.shape.experts)
        if not isinstance(values, np.ndarray) or values.shape != shape or values.dtype.kind not in "biuf":
            raise HotsetError(f"a grid of numbers of shape {shape} is needed, not {shown(values)}")
        return np.asarray(values, np.float64)

    def _known(self, key: ExpertKey) -> ExpertKey:
        shape = self.plan.shape
        try:
            layer, expert = map(operator.index, key)
        except (TypeError, ValueError):
            raise HotsetError(f"an expert is named by the numbers of its layer and its own, not {shown(key)}") from None
        if not (0 <= layer < shape.layers and 0 <= expert < shape.experts):
            raise HotsetError(
                f"layer {layer}, expert {expert} does not exist: "
                f"the model has layers 0 to {shape.layers - 1} and experts 0 to {shape.experts - 1}"
            )
        return ExpertKey(layer, expert)

    def check_pins(self, keys: Iterable[ExpertKey]) -> Grid:
        """Refuse pins that leave a layer, or the pool, without room for one event; returns them as a grid."""
        grid = np.zeros((self.plan.shape.layers, self.plan.shape.experts))
        for key in keys:
            grid[self._known(key)] = 1.0
        pinned = self._per_group((self.table.last == FOREVER) | (grid > 0))
        room = np.diff(self.table.bounds) - self.plan.shape.top_k
        if (pinned > np.maximum(room, 0)).any():
            group = int(np.argmax(pinned - room))
            where = "the pool" if self.plan.scope is Scope.POOL else f"layer {group}"
            raise BudgetError(
                f"{pinned[group]} pins starve {where}: of its {room[group] + self.plan.shape.top_k} slots, "
                f"{self.plan.shape.top_k} must stay free for the running event; pin at most {max(room[group], 0)}"
            )
        return grid

    def _count_pins(self) -> None:
        self.table.num_pinned[:] = self._per_group(self.table.last == FOREVER)

    def _per_group(self, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        counts = np.zeros(len(self.table.num_free), np.int64)
        np.add.at(counts, self.table.group_of, mask.sum(axis=1))
        return counts


def _load(layer: int, row: list[int]) -> Load:
    expert, slot, evicted_layer, evicted_expert = row
    return Load(
        ExpertKey(layer, expert),
        None if slot < 0 else slot,
        None if evicted_expert < 0 else ExpertKey(evicted_layer, evicted_expert),
    )

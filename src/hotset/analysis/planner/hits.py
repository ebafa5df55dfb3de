"""How often experts are missing at every size of a cache: replays of one workload, kept request by request."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.analysis.planner.behind import BehindGpu
from hotset.analysis.planner.rates import Engine
from hotset.analysis.planner.tiers import staging_rows
from hotset.cache import Controller, SlotPlan
from hotset.errors import HotsetError
from hotset.policies import Policy, parse
from hotset.policies.belady import Belady
from hotset.shape import ModelShape
from hotset.trace import Phase, Trace
from hotset.trace.events import EventTable

POLICIES = ("blend", "lru")
"""What live models choose between; the optimum is always beside them."""
LEARNT = "nextuse"
"""Compared, too, where a CPU computes and routing is recorded: `auto` begins with it on a CPU, and it learns from the
order in which experts follow each other, which routing that is drawn does not have."""
BOUND = "belady"
FRACTIONS = (0.03, 0.0625, 0.09, 0.125, 0.1875, 0.25, 0.3125, 0.375, 0.5, 0.625, 0.75, 0.875)
MAX_ACCESSES = 1_500_000
"""Of a replayed trace: the first requests of a longer one are taken."""
_WARM_SHARE = 4  # the first quarter of the requests fills the cache, and is not counted

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class HitCurve:
    """Events of decode steps by how many of their experts are missing, for growing numbers of slots."""

    shape: ModelShape
    slots: npt.NDArray[np.int64]  # [sizes], rising; the last is all experts
    events: Floats  # [sizes, requests, top_k + 1]: events with so many missing
    tokens: Floats  # [requests], decode tokens that were counted

    def per_token(self, weights: Floats | None = None) -> Floats:
        """Events with so many missing per token, [sizes, top_k + 1]; requests may count more or less often."""
        own = np.ones(len(self.tokens)) if weights is None else weights
        mixed: Floats = np.einsum("srm,r->sm", self.events, own) / float(self.tokens @ own)
        return mixed

    def misses_per_token(self) -> Floats:
        """Missing experts of one token, over all layers, by size."""
        missing: Floats = self.per_token() @ np.arange(self.events.shape[2])
        return missing

    def hit_rate(self, slots: int) -> float:
        """The share of hits with so many slots, between sizes by a straight line; more slots never hit less."""
        asked = float((self.per_token()[0]).sum()) * self.shape.top_k
        misses = np.minimum.accumulate(self.misses_per_token())
        return 1.0 - float(np.interp(slots, self.slots, misses)) / asked

    def as_dict(self) -> dict[str, Any]:
        """The curve of all requests together as plain values, for JSON."""
        return {
            "layers": self.shape.layers, "experts": self.shape.experts, "top_k": self.shape.top_k,
            "slots": self.slots.tolist(), "events_per_token": self.per_token().round(6).tolist(),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, kept: dict[str, Any]) -> HitCurve:
        """A curve that was kept; it has one request, so that nothing can be said of how requests differ."""
        shape = ModelShape(int(kept["layers"]), int(kept["experts"]), int(kept["top_k"]))
        slots, events = np.array(kept["slots"], np.int64), np.array(kept["events_per_token"], float)[:, None, :]
        if events.shape != (len(slots), 1, shape.top_k + 1) or len(slots) < 2 or not np.isfinite(events).all():
            raise HotsetError("the kept curve of hits is damaged")
        return cls(shape, slots, events, np.ones(1))


@dataclass(frozen=True, eq=False)
class Hits:
    """The curves of all policies on one workload."""

    curves: dict[str, HitCurve]  # by policy, the bound among them
    popularity: Floats | None = None  # [experts]: the share of tokens that choose the expert of each rank
    behind: BehindGpu | None = None  # what is replayed for a machine whose RAM does not hold all experts

    def far_misses(self, policy: str, ram_slots: int) -> Floats:
        """Missing experts of a token that RAM with so many slots does not hold either, by the slots of the GPU.

        Without events to replay: those of one cache of RAM's size, and never more than are missing.
        """
        if self.behind is not None:
            return self.behind.misses(policy, ram_slots)
        curve = self.curves[policy]
        missing = curve.misses_per_token()
        return np.minimum(missing, np.interp(ram_slots, curve.slots, missing))

    def held_slots(self, policy: str, slots: int, ram_slots: int) -> float:
        """The slots of one cache that would miss as little as that of a GPU and that of RAM behind it together."""
        curve = self.curves[policy]
        far = float(np.interp(slots, curve.slots, self.far_misses(policy, ram_slots)))
        missing = np.minimum.accumulate(curve.misses_per_token())
        return float(np.interp(far, missing[::-1], curve.slots[::-1]))

    def best(self, slots: int) -> str:
        """The policy that hits most with so many slots; of equals, the default."""
        names = [name for name in self.curves if name != BOUND]
        return max(names, key=lambda name: (round(self.curves[name].hit_rate(slots), 3), -names.index(name)))


def sizes_of(shape: ModelShape) -> list[int]:
    """The numbers of slots that are replayed: from the fewest that work to all but one expert."""
    least, total = max(shape.layers, shape.top_k), shape.total_experts
    found = {max(int(fraction * total), least) for fraction in FRACTIONS}
    return sorted(size for size in {least, *found} if size < total)


def replay_hits(
    trace: Trace, policies: Sequence[str] = POLICIES, *, advance: Callable[[], None] = lambda: None
) -> Hits:
    """Replay a trace under each policy and the optimum at every size; each replay calls `advance`."""
    trace = shortened(trace)
    if not trace.count(Phase.DECODE):
        raise HotsetError("the trace has no decode tokens: record answers, not prompts alone")
    events, sizes = trace.events(), sizes_of(trace.shape)
    if not (events.phase == Phase.DECODE).any() or not (counted := _counted(events)).any():
        raise HotsetError("no answer in the trace used an expert: give one of a model that ran")
    chosen = [*(parse(name) for name in policies), Belady(phase="decode")]
    jobs = [(policy, size) for policy in chosen for size in sizes]

    def work(job: tuple[Policy, int]) -> Floats:
        found = _missing(events, *job)
        advance()
        return found

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:  # replays are compiled and let go of the lock
        found = list(pool.map(work, jobs))
    tokens = np.bincount(events.request[counted & (events.layer == events.layer[0])], minlength=trace.requests)
    slots = np.array([*sizes, trace.shape.total_experts], np.int64)
    curves = {}
    for place, policy in enumerate(chosen):
        own = found[place * len(sizes) : (place + 1) * len(sizes)]
        everything = np.zeros((trace.requests, trace.shape.top_k + 1))  # resident: nothing is ever missing
        everything[:, 0] = np.bincount(events.request[counted], minlength=trace.requests)
        curves[BOUND if policy.offline else policy.spec] = HitCurve(
            trace.shape, slots, np.stack([*own, everything]), tokens.astype(float)
        )
    behind = BehindGpu(events, counted, sizes, float(tokens.sum()))
    return Hits(curves, popularity_of(trace.experts, trace.shape.experts), behind)


def popularity_of(experts: npt.NDArray[np.int16], count: int) -> Floats:
    """The share of tokens that choose the expert of each rank, over the layers of a trace [tokens, layers, top_k]."""
    ranked = [
        np.sort(np.bincount(layer[layer >= 0], minlength=count) / len(experts))[::-1]
        for layer in experts.swapaxes(0, 1)
    ]
    found: Floats = np.mean(ranked, axis=0)
    return found


def policies_for(*, on_cpu: bool, recorded: bool) -> tuple[str, ...]:
    """The policies that a plan compares."""
    return (*POLICIES, LEARNT) if on_cpu and recorded else POLICIES


def count_replays(shape: ModelShape, policies: Sequence[str] = POLICIES) -> int:
    """How often `replay_hits` will call `advance`."""
    return (len(policies) + 1) * len(sizes_of(shape))


def shortened(trace: Trace) -> Trace:
    """The first requests of a trace that is longer than it takes to know its hits."""
    most = max(MAX_ACCESSES // trace.shape.token_cycle, 1)
    if trace.tokens <= most:
        return trace
    whole = int(np.searchsorted(np.maximum.accumulate(trace.request), trace.request[most]))
    return trace.take(slice(0, whole if whole >= most // 2 else most))


def _counted(events: EventTable) -> npt.NDArray[np.bool_]:
    """The decode events that count: those of later requests, for the first fill the cache."""
    requests = int(events.request.max()) + 1
    decode = events.phase == Phase.DECODE
    if requests >= _WARM_SHARE:
        later = events.request >= requests // _WARM_SHARE
    else:
        later = events.step >= np.quantile(events.step[decode], 1 / _WARM_SHARE)
    counted: npt.NDArray[np.bool_] = decode & later
    return counted


def _missing(events: EventTable, policy: Policy, slots: int) -> Floats:
    """Counted events of each request by how many of their experts are missing."""
    done = _controller(policy, events.shape, slots).replay(events)
    counted = _counted(events)
    table = np.zeros((int(events.request.max()) + 1, events.shape.top_k + 1))
    missing = np.minimum(done.misses[counted], events.shape.top_k)
    np.add.at(table, (events.request[counted], missing), 1)
    return table


def _controller(policy: Policy, shape: ModelShape, slots: int) -> Controller:
    """An empty cache with the rows of staging of a live one; the optimum is limited by none, as in the simulator."""
    if policy.offline:
        return Controller(SlotPlan(shape, slots), policy, prefill=policy.admission)
    return Controller(SlotPlan(shape, slots, staging=staging_rows(shape, Engine.CPU)), policy)

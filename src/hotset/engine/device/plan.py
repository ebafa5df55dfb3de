"""One kernel per event: look up a layer's experts, learn, choose victims, and say where every pair is computed.

It does what hotset.cache.kernel does on the host, for decode events under the layer scope, with the experts of a layer
as vectors. The host need not be asked: it replays the log of the events through its own cache when it likes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from hotset.cache.controller import Controller
from hotset.cache.plan import Scope
from hotset.cache.table import FOREVER
from hotset.engine import support
from hotset.engine.device.policies import find, names
from hotset.engine.device.table import DeviceTable
from hotset.errors import HotsetError
from hotset.policies import Admit, Policy

Tensor = torch.Tensor
Ints = npt.NDArray[np.int32]

MAX_PAIRS = 128
MAX_EXPERTS = 512

_FOREVER = tl.constexpr(int(FOREVER))
_ALWAYS, _SCORE = tl.constexpr(int(Admit.ALWAYS)), tl.constexpr(int(Admit.SCORE))
_LATE = tl.constexpr(int(Admit.LATE))


class Outputs(NamedTuple):
    """What one event leaves behind for the kernels that copy and compute."""

    loads: Tensor  # int32 [most loads, 4]: expert, slot or -1 when staged, layer and expert evicted or -1
    missing: Tensor  # int32 [1], rows of loads and job_row that are new
    job_row: Tensor  # int32 [most loads], the arena row that each load's bytes go to
    pair_row: Tensor  # int32 [pairs], the arena row that each pair is computed from, or -1
    pair_late: Tensor  # int8 [pairs], whether its expert is among the loads
    log: Tensor  # int16 [ring, layers, pairs], the experts of the last passes, or -1
    step: Tensor  # int64 [1], the number of the pass, which the caller counts up


@triton.jit(do_not_specialize=["layer", "staging_row"], do_not_specialize_on_alignment=["index"])
def plan_event(
    index, layer, table, state, out, row_of, staging_row, stop, staging,
    load_state: tl.constexpr, observe_and_score: tl.constexpr, variant: tl.constexpr, admit: tl.constexpr,
    layers: tl.constexpr, experts: tl.constexpr, lanes: tl.constexpr, pairs: tl.constexpr, width: tl.constexpr,
    ring: tl.constexpr, num_staging: tl.constexpr,
):  # fmt: skip
    """Serve one event of one layer; run by one program."""
    tl.atomic_add(stop, 1, sem="relaxed")  # prefetch for this event ends
    expert = tl.arange(0, lanes)
    inside = expert < experts
    asked = _read_event(index, layer, out, layers, experts, pairs, width, ring)
    found = load_state(state, layer, experts, lanes)
    slot_of = tl.load(table.slot_of + layer * experts + expert, mask=inside, other=-1)
    last = tl.load(table.last + layer * experts + expert, mask=inside, other=0)
    num_free = tl.load(table.num_free + layer).to(tl.int32)
    resident = tl.load(table.resident + layer)
    first_slot = tl.load(table.bounds + layer).to(tl.int32)
    slots = tl.load(table.bounds + layer + 1).to(tl.int32) - first_slot
    movable = slots - tl.load(table.num_pinned + layer).to(tl.int32)
    tick = tl.load(table.clock)
    passes = tl.load(table.passes + layer)
    rows = tl.load(row_of + slot_of, mask=slot_of >= 0, other=0)

    counts = tl.sum((asked[:, None] == expert[None, :]).to(tl.int32), axis=0)
    used = counts > 0
    missing = used & (slot_of < 0)
    both = tl.sum(used.to(tl.int32) + (missing.to(tl.int32) << 16), axis=0)
    num_used, num_missing = both & 0xFFFF, both >> 16
    tick += (num_used > 0).to(tl.int64)  # an event of sentinels alone is none
    passes += (num_used > 0).to(tl.int64)
    value = observe_and_score(
        state, found, layer, tick, passes, resident, slots, used, counts, slot_of, num_used, num_missing,
        experts, lanes, variant,
    )  # fmt: skip
    last = tl.where(used, tl.maximum(last, tick), last)

    scarce = num_missing > num_free
    if admit == _ALWAYS and layers > 1:
        scarce = scarce & (num_used > movable)
    rank = tl.where(scarce, value, 0.0)  # equals come by rising number
    slot_of, order, evicted, assigned, exchanged = _assign(
        table, layer, slot_of, value, rank, last, missing, tick, num_missing, num_free, first_slot,
        admit, experts, lanes,
    )  # fmt: skip
    rows, given, taken_from = _write_loads(
        table, out, row_of, staging_row, staging, layer, rows, missing, slot_of, order, evicted, assigned, exchanged,
        admit, lanes, num_staging,
    )  # fmt: skip

    taken = tl.minimum(num_missing, num_free)
    tl.debug_barrier()  # no thread may still be loading what is stored here
    tl.store(table.slot_of + layer * experts + expert, slot_of, mask=inside)
    tl.store(table.last + layer * experts + expert, last, mask=used)
    tl.store(table.num_free + layer, (num_free - taken).to(tl.int64))
    tl.store(table.resident + layer, resident + taken)
    tl.store(table.clock, tick)
    tl.store(table.passes + layer, passes)
    tl.store(out.missing, num_missing)
    if admit == _LATE:
        tl.store(taken_from, given, mask=exchanged >= 0)
        tl.store(row_of + slot_of, rows, mask=exchanged >= 0)
    _write_pairs(out, asked, expert, rows, missing, pairs, width)


@triton.jit
def _read_event(
    index, layer, out,
    layers: tl.constexpr, experts: tl.constexpr, pairs: tl.constexpr, width: tl.constexpr, ring: tl.constexpr,
):  # fmt: skip
    """The expert of each pair, or -1; written to the log, too."""
    pair = tl.arange(0, width)
    asked = tl.load(index + pair, mask=pair < pairs, other=-1)
    asked = tl.where((asked >= 0) & (asked < experts), asked, -1).to(tl.int32)
    row = (tl.load(out.step) % ring) * layers + layer
    tl.store(out.log + row * pairs + pair, asked.to(tl.int16), mask=pair < pairs)
    return asked


@triton.jit
def _assign(
    table, layer, slot_of, value, rank, last, missing, tick, num_missing, num_free, first_slot,
    admit: tl.constexpr, experts: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """Give the missing experts slots, one after the other: empty ones, then those of victims.

    Returns the slot of each expert now, and of the missing their order, their victims, how many got a slot, and which
    of them, by number, got that of an expert of the event. The table's own slot_of stays as it was meanwhile: a victim
    had its slot when the event began.
    """
    expert = tl.arange(0, lanes)
    evictable = (slot_of >= 0) & (last < tick)
    exchanged = tl.full((lanes,), -1, tl.int32)
    if admit == _LATE:
        own = (slot_of >= 0) & (last == tick)
        most = tl.load(table.swaps).to(tl.int32)
        evictable = evictable | (own & (most > 0))
        swaps = 0
    turn = tl.where(evictable, last, 0) * lanes + expert  # of equals the older is evicted first, then the lower
    order = tl.full((lanes,), -1, tl.int32)
    evicted = tl.full((lanes,), -1, tl.int32)
    assigned = 0
    row = 0
    while row < num_missing:
        waiting = tl.where(missing & (order < 0), rank, float("-inf"))
        best, candidate = tl.max(waiting, axis=0, return_indices=True, return_indices_tie_break_left=True)
        lowest = tl.min(tl.where(evictable, value, float("inf")), axis=0)
        first = tl.min(tl.where(evictable & (value == lowest), turn, _FOREVER), axis=0)
        victim = (first & (lanes - 1)).to(tl.int32)
        evicts = (first != _FOREVER) & (row >= num_free)
        if admit == _SCORE:
            evicts = evicts & (best >= lowest)
        elif admit == _LATE:
            evicts = evicts & (best > lowest)
        elif admit != _ALWAYS:
            evicts = row < 0  # only while slots are empty
        slot = tl.load(table.free + first_slot + num_free - 1 - row, mask=row < num_free, other=-1)
        slot = tl.maximum(slot, tl.load(table.slot_of + layer * experts + victim, mask=evicts, other=-1))

        is_victim = evicts & (expert == victim)
        is_candidate = expert == candidate
        evictable = evictable & (is_victim == 0)
        slot_of = tl.where(is_victim, -1, tl.where(is_candidate, slot, slot_of))
        evicted = tl.where(is_candidate & evicts, victim, evicted)
        order = tl.where(is_candidate, row, order)
        assigned += tl.where(slot >= 0, 1, 0)
        if admit == _LATE:
            is_own = evicts & (first >= tick * lanes)  # it is among those that were used last: by this event
            exchanged = tl.where(is_candidate & is_own, swaps, exchanged)
            swaps += is_own.to(tl.int32)
            evictable = evictable & ((own == 0) | (swaps < most))
        row += 1
    return slot_of, order, evicted, assigned, exchanged


@triton.jit
def _write_loads(
    table, out, row_of, staging_row, staging, layer, rows, missing, slot_of, order, evicted, assigned, exchanged,
    admit: tl.constexpr, lanes: tl.constexpr, num_staging: tl.constexpr,
):  # fmt: skip
    """Write what is to be loaded, where its bytes go and what is evicted; returns the row of each expert used.

    An expert that was given the slot of one of its own event, which has yet to compute, goes to a row of staging: from
    the end of the list, since experts without a slot take those at its beginning. The row that is staging's from then
    on, and where in the list it belongs, come second and third.
    """
    expert = tl.arange(0, lanes)
    has_slot = missing & (slot_of >= 0)
    goes_to = tl.load(row_of + slot_of, mask=has_slot, other=0)
    given, taken_from = goes_to, row_of
    if num_staging > 0:
        free = tl.load(staging + order - assigned, mask=missing & (slot_of < 0), other=0)
    else:
        free = staging_row + order - assigned
    if admit == _LATE:
        taken_from = staging + (num_staging - 1 - exchanged)
        goes_to = tl.where(exchanged >= 0, tl.load(taken_from, mask=exchanged >= 0, other=0), goes_to)
    goes_to = tl.where(has_slot, goes_to, free)  # those without a slot come last
    place = out.loads + order * 4
    tl.store(place, expert, mask=missing)
    tl.store(place + 1, slot_of, mask=missing)
    tl.store(place + 2, tl.where(evicted >= 0, layer, -1), mask=missing)
    tl.store(place + 3, evicted, mask=missing)
    tl.store(out.job_row + order, goes_to, mask=missing)
    tl.store(table.expert_in + slot_of, expert, mask=has_slot)
    tl.store(table.layer_in + slot_of, tl.zeros((lanes,), tl.int32) + layer, mask=has_slot)
    return tl.where(missing, goes_to, rows), given, taken_from


@triton.jit
def _write_pairs(out, asked, expert, rows, missing, pairs: tl.constexpr, width: tl.constexpr):
    """Say of each pair where it is computed, and whether its bytes are still to come."""
    pair = tl.arange(0, width)
    told = rows * 2 + missing.to(tl.int32)  # both in one number, so that one sum finds them
    told = tl.sum(tl.where(asked[:, None] == expert[None, :], told[None, :], 0), axis=1)
    tl.store(out.pair_row + pair, tl.where(asked >= 0, told >> 1, -1), mask=pair < pairs)
    tl.store(out.pair_late + pair, (told & 1).to(tl.int8), mask=pair < pairs)


class Plan:
    """Plans the decode events of one cache on its device; calling it launches one kernel and waits for nothing.

    `pairs` is the number of tokens times top_k of every event; `row_of` (int32 [slots], on the device) says which row
    of the arena each slot lies in, and staged experts go to the rows from `staging_row` on, up to `most_loads` of them,
    or to those that `staging` lists (int32, on the device). Admission `late` needs a list: an expert that its own event
    evicts is computed from its row, and that row takes the place in the list of the one that its successor came to. The
    buffers in `out` are overwritten by every event. An index of sentinels alone changes nothing but them.
    """

    def __init__(
        self,
        controller: Controller,
        table: DeviceTable,
        pairs: int,
        row_of: Tensor,
        staging_row: int,
        *,
        ring: int = 64,
        stop: Tensor | None = None,
        staging: Tensor | None = None,
    ) -> None:
        reason = self.supports(controller.policy, controller.plan.scope)
        shape = controller.plan.shape
        if reason is None and not (1 <= pairs <= MAX_PAIRS and shape.experts <= MAX_EXPERTS):
            reason = (
                f"{pairs} pairs of {shape.experts} experts: the most are {MAX_PAIRS} pairs of {MAX_EXPERTS} experts"
            )
        if reason is not None:
            raise HotsetError(f"this cache cannot be planned on the device: {reason}")
        self.table, self.row_of, self.staging_row, self.staging = table, row_of, staging_row, staging
        self._stop = torch.zeros(1, dtype=torch.int64, device=table.device) if stop is None else stop
        self.most_loads = min(pairs, shape.experts)
        if controller.policy.admission is Admit.LATE and (staging is None or len(staging) < self.most_loads):
            raise HotsetError(f"an event may need {self.most_loads} rows of staging: list as many")
        self.out = _buffers(self.most_loads, pairs, shape.layers, ring, table.device)
        policy = find(controller.policy.name)
        self._state = policy.tensors(table.state)
        self._follow = policy.follower and policy.follower(table.table, self._state, shape, pairs // shape.top_k)
        self._told: Ints | None = None  # whose the tokens are, as the device was told last
        lanes, width = max(triton.next_power_of_2(shape.experts), 16), max(triton.next_power_of_2(pairs), 2)
        # One warp needs no barriers to add up, as long as it can hold the pairs by the experts in its registers.
        self.num_warps = max(policy.least_warps, min(lanes * width // 1024, 8))
        self._constants = {
            "load_state": policy.load_state,
            "observe_and_score": policy.observe_and_score,
            "variant": policy.variant(controller.policy, table.state),
            "admit": int(controller.policy.admission),
            "layers": shape.layers,
            "experts": shape.experts,
            "lanes": lanes,
            "pairs": pairs,
            "width": width,
            "ring": ring,
            "num_staging": 0 if staging is None else len(staging),
        }

    @staticmethod
    def supports(policy: Policy, scope: Scope) -> str | None:
        """Why a policy cannot be planned on the device, or None if it can."""
        if policy.name not in names():
            others = [name for name in names() if support.LATE_HAS_RUN or find(name).follower is None]
            return f"{policy.name} runs on the host only; on the device there are {', '.join(others)}"
        if scope is not Scope.LAYER:
            return "slots shared by all layers are chosen among on the host only"
        if not support.LATE_HAS_RUN and (policy.admission is Admit.LATE or find(policy.name).follower is not None):
            return f"{policy.name} with admit={policy.admission.name.lower()} has not been run on a GPU yet"
        return find(policy.name).refuses(policy)

    @property
    def follows_requests(self) -> bool:
        """Whether the policy asks whose each token is."""
        return self._follow is not None

    def tell(self, requests: Ints) -> None:
        """Say whose the tokens of the next events are, for a policy that asks."""
        if self._follow is not None and not (self._told is not None and np.array_equal(requests, self._told)):
            self._follow.requests.copy_(torch.from_numpy(requests))
            self._told = requests

    def __call__(self, layer: int, index: Tensor) -> None:
        """Plan one event: index (int64) names each pair's expert, or one that does not exist."""
        if self._follow is not None:
            self._follow(layer, index)
        launch: Any = plan_event[(1,)]
        launch(
            index, layer, self.table.table, self._state, self.out, self.row_of, self.staging_row, self._stop,
            self.staging, **self._constants,
            num_warps=self.num_warps, enable_fp_fusion=False,
        )  # fmt: skip


def _buffers(most_loads: int, pairs: int, layers: int, ring: int, device: torch.device) -> Outputs:
    def filled(shape: tuple[int, ...], kind: torch.dtype, value: int = -1) -> Tensor:
        return torch.full(shape, value, dtype=kind, device=device)

    return Outputs(
        loads=filled((most_loads, 4), torch.int32),
        missing=filled((1,), torch.int32, 0),
        job_row=filled((most_loads,), torch.int32),
        pair_row=filled((pairs,), torch.int32),
        pair_late=filled((pairs,), torch.int8, 0),
        log=filled((ring, layers, pairs), torch.int16),
        step=filled((1,), torch.int64, 0),
    )

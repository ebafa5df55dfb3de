"""Segmented LRU, on the device, with its frequency hint or without."""

from __future__ import annotations

import triton
import triton.language as tl

from hotset.engine.device.policies import DevicePolicy
from hotset.engine.device.policies.decay import add_uses
from hotset.policies import slru as host

_ABOVE = tl.constexpr(host.ABOVE)


@triton.jit
def load_state(state, layer, experts: tl.constexpr, lanes: tl.constexpr):
    """Since when each expert is in its segment, whether that is the protected one, and the decayed uses."""
    expert = tl.arange(0, lanes)
    place, inside = layer * experts + expert, expert < experts
    since = tl.load(state.since + place, mask=inside, other=0.0)
    protected = tl.load(state.protected + place, mask=inside, other=0) != 0
    level = tl.load(state.level + place, mask=inside, other=0.0)
    return since, protected, level, tl.load(state.options), tl.load(state.options + 2)


@triton.jit
def observe_and_score(
    state, found, layer, tick, passes, resident, slots, used, counts, slot_of, num_used, num_missing,
    experts: tl.constexpr, lanes: tl.constexpr, variant: tl.constexpr,
):  # fmt: skip
    """Promote what was hit, put what must be loaded on probation, and score by recency within the segments."""
    expert = tl.arange(0, lanes)
    place, inside, resident = layer * experts + expert, expert < experts, slot_of >= 0
    since, before, level, share, half_life = found
    now = tick.to(tl.float64)
    since = tl.where(used, now, since)
    protected = tl.where(used, resident, before)
    promoted = tl.max((used & resident & (before == 0)).to(tl.int32), axis=0)
    if promoted > 0:
        room = (share * slots.to(tl.float64)).to(tl.int32)
        since, protected = _demote(since, protected, resident, now, room, lanes)
    today = passes.to(tl.float64) / half_life
    if variant == 1:
        level = add_uses(level, today, used, counts)
    tl.debug_barrier()
    tl.store(state.since + place, since, mask=inside)
    tl.store(state.protected + place, protected, mask=inside)
    if variant == 1:
        tl.store(state.level + place, level, mask=used)
        score = tl.where(protected, since + _ABOVE, level - today)
    else:
        score = tl.where(protected, since + _ABOVE, since)
    return score


@triton.jit
def _demote(since, protected, resident, now, room, lanes: tl.constexpr):
    """Bring the protected segment to size: the least recent go back on probation, to its most recent end."""
    expert = tl.arange(0, lanes)
    held = tl.sum((protected & resident).to(tl.int32), axis=0)
    while held > room:
        may_fall = protected & resident
        oldest = tl.min(tl.where(may_fall, since, float("inf")), axis=0)
        falls = tl.min(tl.where(may_fall & (since == oldest), expert, lanes), axis=0)
        protected = protected & (expert != falls)
        since = tl.where(expert == falls, now, since)
        held -= 1
    return since, protected


DEVICE = DevicePolicy(load_state, observe_and_score, variant=lambda policy, _: int(policy.hint))

"""Exponentially decayed counts of one half-life, on the device."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from hotset.engine.device.policies import DevicePolicy


@triton.jit
def load_state(state, layer, experts: tl.constexpr, lanes: tl.constexpr):
    """The decayed count of each expert, and the half-life."""
    expert = tl.arange(0, lanes)
    level = tl.load(state.level + layer * experts + expert, mask=expert < experts, other=0.0)
    return level, tl.load(state.half_life)


@triton.jit
def observe_and_score(
    state, found, layer, tick, passes, resident, slots, used, counts, slot_of, num_used, num_missing,
    experts: tl.constexpr, lanes: tl.constexpr, variant: tl.constexpr,
):  # fmt: skip
    """Add this event's tokens at today's weight; score by the decayed count on a logarithmic scale."""
    level, half_life = found
    now = passes.to(tl.float64) / half_life
    level = add_uses(level, now, used, counts)
    tl.debug_barrier()
    tl.store(state.level + layer * experts + tl.arange(0, lanes), level, mask=used)
    return level - now


@triton.jit
def add_uses(level, now, used, counts):
    """A decayed count with this event's tokens, on a base-2 logarithm carried forward to time zero."""
    kept = tl.exp2(tl.where(used, level - now, 0.0))
    return tl.where(used, now + tl.log2(kept + counts.to(tl.float64)), level)


def _refuses(policy: Any) -> str | None:
    if policy.half_life == "auto":
        return "decay with half_life=auto compares eight half-lives at every event, which only the host does"
    return None


DEVICE = DevicePolicy(load_state, observe_and_score, refuses=_refuses)

"""Least recently used, on the device."""

from __future__ import annotations

import triton
import triton.language as tl

from hotset.engine.device.policies import DevicePolicy


@triton.jit
def load_state(state, layer, experts: tl.constexpr, lanes: tl.constexpr):
    """When each expert was last used."""
    expert = tl.arange(0, lanes)
    return tl.load(state.last + layer * experts + expert, mask=expert < experts, other=0.0)


@triton.jit
def observe_and_score(
    state, found, layer, tick, passes, resident, slots, used, counts, slot_of, num_used, num_missing,
    experts: tl.constexpr, lanes: tl.constexpr, variant: tl.constexpr,
):  # fmt: skip
    """Note the time of use, and score by it."""
    expert = tl.arange(0, lanes)
    last = tl.where(used, tick.to(tl.float64), found)
    tl.debug_barrier()
    tl.store(state.last + layer * experts + expert, last, mask=used)
    return last


DEVICE = DevicePolicy(load_state, observe_and_score)

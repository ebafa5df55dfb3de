"""Frequency over age, on the device."""

from __future__ import annotations

import triton
import triton.language as tl

from hotset.engine.device.policies import DevicePolicy


@triton.jit
def load_state(state, layer, experts: tl.constexpr, lanes: tl.constexpr):
    """The uses of each expert, and the layer's time of the last one."""
    expert = tl.arange(0, lanes)
    place = layer * experts + expert
    uses = tl.load(state.uses + place, mask=expert < experts, other=0.0)
    last = tl.load(state.last + place, mask=expert < experts, other=0.0)
    return uses, last


@triton.jit
def observe_and_score(
    state, found, layer, tick, passes, resident, slots, used, counts, slot_of, num_used, num_missing,
    experts: tl.constexpr, lanes: tl.constexpr, variant: tl.constexpr,
):  # fmt: skip
    """Count uses and note the layer's own time; score by uses over age."""
    place = layer * experts + tl.arange(0, lanes)
    uses, last = found
    uses += counts.to(tl.float64)
    now = passes.to(tl.float64)
    last = tl.where(used, now, last)
    tl.debug_barrier()
    tl.store(state.uses + place, uses, mask=used)
    tl.store(state.last + place, last, mask=used)
    return uses / (now - last + 1.0)


DEVICE = DevicePolicy(load_state, observe_and_score)

"""Least frequently used, on the device; with history off, a count ends with its expert's eviction."""

from __future__ import annotations

import triton
import triton.language as tl

from hotset.engine.device.policies import DevicePolicy


@triton.jit
def load_state(state, layer, experts: tl.constexpr, lanes: tl.constexpr):
    """How often each expert was used."""
    expert = tl.arange(0, lanes)
    return tl.load(state.uses + layer * experts + expert, mask=expert < experts, other=0.0)


@triton.jit
def observe_and_score(
    state, found, layer, tick, passes, resident, slots, used, counts, slot_of, num_used, num_missing,
    experts: tl.constexpr, lanes: tl.constexpr, variant: tl.constexpr,
):  # fmt: skip
    """Count the tokens that used each expert."""
    expert = tl.arange(0, lanes)
    uses = found
    if variant == 0:
        uses = tl.where(used & (slot_of < 0), 0.0, uses)
    uses += counts.to(tl.float64)
    tl.debug_barrier()
    tl.store(state.uses + layer * experts + expert, uses, mask=used)
    return uses


DEVICE = DevicePolicy(load_state, observe_and_score, variant=lambda policy, _: int(policy.history))

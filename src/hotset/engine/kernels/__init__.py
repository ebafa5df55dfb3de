"""How some experts of an event are computed from rows of memory: per expert, grouped, or in two Triton launches."""

from __future__ import annotations

from hotset.engine.arena import Arena
from hotset.engine.kernels.base import ExpertKernels
from hotset.engine.kernels.grouped import GroupedKernels
from hotset.engine.kernels.spec import ExpertSpec
from hotset.store import SlotLayout

__all__ = ["ExpertKernels", "ExpertSpec", "gpu_kernels"]


def gpu_kernels(arena: Arena, layout: SlotLayout, spec: ExpertSpec, top_k: int) -> ExpertKernels:
    """The kernels of one layer on a GPU: few tokens by Triton where it is there and can, all others grouped."""
    many = GroupedKernels(arena, layout, spec)
    return with_triton(arena, layout, spec, top_k, many) if arena.memory.is_cuda else many


def with_triton(arena: Arena, layout: SlotLayout, spec: ExpertSpec, top_k: int, many: ExpertKernels) -> ExpertKernels:
    """The given kernels, with few tokens by Triton where it is there and can."""
    try:
        from hotset.engine.kernels.few_tokens import FewTokenKernels
        from hotset.engine.kernels.triton_experts import UnsupportedExpertsError
    except ImportError:  # there is no Triton for this system
        return many
    try:
        return FewTokenKernels(arena, layout, spec, top_k, many)
    except UnsupportedExpertsError:
        return many

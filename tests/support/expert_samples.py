"""Experts of tiny models in slots, random routings, and what the engine's other path makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tiny_models as tiny
import torch

from hotset.engine.arena import Arena, poison
from hotset.engine.batch import ExpertBatch
from hotset.engine.kernels.cpu import RowExperts
from hotset.engine.kernels.spec import ExpertSpec
from hotset.models.find_layers import find_moe_layers
from hotset.store import Part, SlotLayout
from hotset.store.layout import PAGE_BYTES, round_up

Tensor = torch.Tensor
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Sample:
    """The experts of one layer, each in a slot of its own with a poisoned one behind it."""

    arena: Arena
    layout: SlotLayout
    spec: ExpertSpec
    experts: int
    width: int
    dtype: torch.dtype

    def slot(self, expert: Any) -> Any:
        """Where an expert lies."""
        return 2 * expert


@dataclass
class Routing:
    """One call: its input, the experts of each token (those at or past the number there are belong to others)."""

    x: Tensor
    index: Tensor
    weights: Tensor

    def rows(self, sample: Sample) -> Tensor:
        """The slot of every pair, below zero for experts of others."""
        flat = self.index.reshape(-1)
        return torch.where(flat < sample.experts, sample.slot(flat), -1).to(torch.int32).to(DEVICE)


def spec_of(family: str, **changes: Any) -> tuple[ExpertSpec, dict[str, tuple[int, ...]]]:
    """What an expert of a family computes, and the shapes of its tensors."""
    moe_layer = find_moe_layers(tiny.make(family, **changes))[-1]
    return moe_layer.spec, {part.name: part.shape for part in moe_layer.parts}


def sample_of(spec: ExpertSpec, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, experts: int = 8) -> Sample:
    """Random experts of these shapes."""
    name = str(dtype).removeprefix("torch.")
    layout = SlotLayout.of([Part(key, shape, name) for key, shape in shapes.items()])
    arena = Arena.on_device(2 * experts, round_up(layout.used_bytes, PAGE_BYTES), DEVICE)
    poison(arena)
    random = torch.Generator().manual_seed(3)
    for part in layout.parts:
        spread = 1.5 / part.shape[-1] ** 0.5 if len(part.shape) > 1 else 0.5
        values = torch.randn((experts, *part.shape), generator=random) * spread
        arena.view(part)[::2] = values.to(dtype).to(DEVICE)
    up = layout.part(spec.up)
    return Sample(arena, layout, spec, experts, up.shape[0 if spec.up_transposed else -1], dtype)


def routing_of(sample: Sample, tokens: int, top_k: int, *, sentinels: int = 0, exact: bool = True) -> Routing:
    """A random routing; with sentinels, tokens may also choose from so many experts that are not here."""
    random = torch.Generator().manual_seed(100 * tokens + top_k)
    index = torch.rand((tokens, sample.experts + sentinels), generator=random).argsort(-1)[:, :top_k]
    x = torch.randn((tokens, sample.width), generator=random).to(sample.dtype)
    weights = torch.rand((tokens, top_k), generator=random) + 0.1
    weights = weights / weights.sum(-1, keepdim=True)
    return Routing(x.to(DEVICE), index, (weights if exact else weights.to(sample.dtype)).to(DEVICE))


@torch.no_grad()
def expected(sample: Sample, routing: Routing) -> Tensor:
    """What the host-driven path computes: experts in their slots, weighted, and summed as an event does."""
    event = ExpertBatch(routing.x, routing.index.to(DEVICE), routing.weights, sample.experts)
    if not len(event.experts):
        return torch.zeros_like(routing.x)
    pairs, ends = event.places(None)
    places = torch.from_numpy(np.ascontiguousarray(pairs)).to(DEVICE)
    slots = [sample.slot(int(expert)) for expert in event.experts]
    experts = RowExperts(sample.arena, sample.layout, sample.spec)
    event.output.scatter(places, experts(event.rows(places), slots, ends))
    return event.combine()

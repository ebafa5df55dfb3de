"""Experts of any shape in any weight format, with random codes, for benchmarks that need no checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hotset import formats
from hotset.engine.kernels.spec import ExpertSpec
from hotset.formats import WeightFormat
from hotset.store import Part, SlotLayout

SHORT = {
    "dense": "dense", "mxfp4": "mxfp4", "nvfp4": "nvfp4:matrices=2", "fp8": "fp8", "int4": "integer:short=on",
    "int8": "integer:bits=8", "int4w": "integer", "int4z": "integer:zeros=bytes,group=128,scales=float16",
}  # fmt: skip
"""What the benchmarks call formats: those that hotset makes, and the usual ones of checkpoints."""


def packed_layout(layout: SlotLayout, spec: ExpertSpec, name: str) -> SlotLayout:
    """A layout of plain numbers with both matrices in a format instead, by its short name or in its own words."""
    words = SHORT.get(name, name)
    if words == "dense":
        return layout
    parts: list[Part] = []
    matrices = []
    for part in layout.parts:
        if part.name not in (spec.up, spec.down):
            parts.append(part)
            continue
        weight = formats.weight_of(layout, part.name, transposed=spec.is_transposed(part.name))
        chosen = formats.parse(words + ("," if ":" in words else ":") + f"dtype={part.dtype}")
        own, matrix = formats.laid_out(part.name, chosen, weight.outputs, weight.inputs)
        parts += own
        matrices += [] if matrix is None else [matrix]
    return SlotLayout.of(parts, matrices)


def fill_slot(layout: SlotLayout, slot: torch.Tensor, seed: int = 0, std: float = 0.02) -> None:
    """One expert: random codes, scales such that weights have about this deviation, and plain numbers of it."""
    random = torch.Generator(slot.device).manual_seed(seed)
    roles = {
        name: (formats.parse(matrix.format), part.role)
        for matrix in layout.matrices
        for name, part in zip(
            matrix.parts, formats.parse(matrix.format).parts(matrix.outputs, matrix.inputs), strict=True
        )
    }
    for part in layout.parts:
        kind = formats.element_type(part.dtype)
        where = slot[part.offset : part.offset + part.size_bytes].view(kind).view(part.shape)
        if part.name not in roles:
            where.copy_(torch.randn(part.shape, generator=random, device=slot.device) * std)
        else:
            where.copy_(random_part(*roles[part.name], part.shape, random, std))


def random_part(
    chosen: WeightFormat, role: str, shape: Sequence[int], random: torch.Generator, std: float
) -> torch.Tensor:
    """The numbers of one part of a matrix, before they are rounded to its type."""

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, tuple(shape), generator=random, device=random.device)

    options: Any = chosen
    if role == "codes":
        return integers(0, 256)
    if chosen.name == "gguf":  # bytes that are no large float16 wherever they lie
        return integers(0, 0x20)
    if role == "values":  # E4M3 of both signs, the largest and what is no number apart
        return integers(0, 0x60) + 128 * integers(0, 2)
    if role == "zeros":
        return integers(0, 16)
    if role == "global":
        return torch.full(tuple(shape), std / 2)
    if role == "scales" and chosen.name == "mxfp4":
        return integers(119, 121)  # 2^-8 and 2^-7
    if role == "scales" and chosen.name == "nvfp4":
        return integers(0x28, 0x38)
    if role != "scales":
        raise SystemExit(f"there is nothing random for {role} of {chosen.name}")
    spread = {"integer": 1 << getattr(options, "bits", 4) - 1, "fp8": 8.0}[chosen.name]
    return (torch.rand(tuple(shape), generator=random, device=random.device) + 0.5) * (2 * std / spread)

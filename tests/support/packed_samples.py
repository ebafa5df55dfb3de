"""Experts of tiny models in weight formats: random parts of a matrix, and samples with their matrices packed."""

from __future__ import annotations

from typing import Any

import expert_samples as samples
import gguf_models
import torch

from hotset import formats
from hotset.engine.arena import Arena, poison
from hotset.formats import WeightFormat
from hotset.store import Part, SlotLayout
from hotset.store.layout import PAGE_BYTES, round_up

DEVICE = samples.DEVICE


def random_parts(chosen: WeightFormat, outputs: int, inputs: int, seed: int, *, wild: bool) -> list[Any]:
    """The parts of some matrix: of any codes and scales, or of such that its numbers are neither large nor none."""
    random = torch.Generator().manual_seed(seed)
    found = []
    if chosen.name == "gguf" and not wild:
        blocks = gguf_models.random_blocks(chosen.kind, (outputs, inputs), seed)  # type: ignore[attr-defined]
        return [torch.from_numpy(blocks).to(DEVICE)]
    for part in chosen.parts(outputs, inputs):
        kind = formats.element_type(part.dtype)
        if part.role == "groups":
            groups = torch.arange(inputs) // chosen.group  # type: ignore[attr-defined]
            data = torch.stack([groups[torch.randperm(inputs, generator=random)] for _ in range(part.shape[0])])
        elif wild and part.dtype == "uint8":
            data = torch.randint(256, part.shape, generator=random)
        elif part.dtype == "uint8":
            e8m0, e4m3 = (118, 123), (0x28, 0x38)
            last = {"values": (0, 0x60), "codes": (0, 256), "zeros": (0, 16)}
            low, high = last.get(part.role, e4m3 if chosen.name == "nvfp4" else e8m0)
            data = torch.randint(low, high, part.shape, generator=random)
        else:
            data = (torch.rand(part.shape, generator=random) + 0.5) / (16 if part.role == "scales" else 4)
            if chosen.name == "integer":
                data = data / (1 << (chosen.bits - 1))  # type: ignore[attr-defined]
        found.append(data.to(kind).to(DEVICE))
    return found


def encoded_sample(sample: samples.Sample, chosen: WeightFormat) -> samples.Sample:
    """The same experts with random matrices in a format, which the dense sample is given as well."""
    spec, layout = sample.spec, sample.layout
    parts: list[Part] = []
    matrices = []
    for part in layout.parts:
        if part.name not in (spec.up, spec.down):
            parts.append(part)
            continue
        weight = formats.weight_of(layout, part.name, transposed=spec.is_transposed(part.name))
        own, matrix = formats.laid_out(part.name, chosen, weight.outputs, weight.inputs)
        parts += own
        matrices.append(matrix)
    encoded = SlotLayout.of(parts, [matrix for matrix in matrices if matrix is not None])
    arena = Arena.on_device(2 * sample.experts, round_up(encoded.used_bytes, PAGE_BYTES), samples.DEVICE)
    poison(arena)
    for part in layout.parts:
        values = sample.arena.view(part)[::2]
        if part.name not in (spec.up, spec.down):
            arena.view(encoded.part(part.name))[::2] = values
            continue
        weight = formats.weight_of(encoded, part.name)
        for expert in range(sample.experts):
            made = random_parts(chosen, weight.outputs, weight.inputs, expert, wild=False)
            for own, data in zip(weight.parts, made, strict=True):
                arena.view(own)[2 * expert] = data
            rows = values[expert].T if spec.is_transposed(part.name) else values[expert]
            chosen.decode(made, rows)
    return samples.Sample(arena, encoded, spec, sample.experts, sample.width, sample.dtype)

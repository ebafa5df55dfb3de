"""Experts of tiny models in weight formats: random parts of a matrix, and samples with their matrices packed."""

from __future__ import annotations

from typing import Any

import expert_samples as samples
import numpy as np
import pytest
import torch
import triton.language as tl
from random_blocks import random_blocks

from hotset import formats
from hotset.engine.arena import Arena, poison
from hotset.formats import WeightFormat
from hotset.formats.gguf import KEPT
from hotset.store import Part, SlotLayout
from hotset.store.gguf import BLOCKS
from hotset.store.layout import PAGE_BYTES, round_up

DEVICE = samples.DEVICE
SPECS = [
    "fp8:block_n=16,block_k=32", "fp8:block_n=24,block_k=24,scales=bfloat16", "fp8:block_n=0,block_k=0",
    "fp8:block_n=1,block_k=32,scales=e8m0", "fp8:block_n=16,block_k=32,values=e5m2",
    "mxfp4", "nvfp4:matrices=2", "nvfp4:matrices=2,divides=on",
    "integer", "integer:bits=8,scales=float16", "integer:bits=8,group=0,scales=float32",
    "integer:group=16,zeros=bytes,scales=float16", "integer:group=16,ordered=2",
    "integer:bits=8,group=16,zeros=bytes,ordered=2",
    *(f"gguf:kind={kind}" for kind in KEPT),
]  # fmt: skip
OF_256 = [kind for kind in KEPT if BLOCKS[kind].weights == 256]


def random_parts(chosen: WeightFormat, outputs: int, inputs: int, seed: int, *, wild: bool) -> list[Any]:
    """The parts of some matrix: of any codes and scales, or of such that its numbers are neither large nor none."""
    random = torch.Generator().manual_seed(seed)
    found = []
    if chosen.name == "gguf" and not wild:
        blocks = random_blocks(chosen.kind, (outputs, inputs), seed)  # type: ignore[attr-defined]
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


def both(family: str, spec: str) -> tuple[samples.Sample, samples.Sample]:
    """Experts of a family as plain numbers in float32, and in a format."""
    size = 256 if spec.partition("kind=")[2] in OF_256 else 32
    sizes = {"hidden_size": max(64, size), "intermediate_size": size, "moe_intermediate_size": size}
    if family == "gpt_oss":
        del sizes["moe_intermediate_size"]
    dense = samples.sample_of(*samples.spec_of(family, **sizes), torch.float32)
    words = spec + ("," if ":" in spec else ":") + "dtype=float32"
    return dense, encoded_sample(dense, formats.parse(words))


def round_as_devices_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter round to bfloat16 as devices do: it cuts off, and widens subnormal numbers to others."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    cast = interpreter.InterpreterBuilder.cast_impl

    def rounded(self: Any, source: Any, target: Any) -> Any:
        if (source.dtype.scalar, target.scalar) == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle((source.data.astype(np.uint32) << 16).view(np.float32), target.scalar)
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, target)
        bits = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16).numpy()
        return interpreter.TensorHandle(bits.view(np.uint16), target.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", rounded)

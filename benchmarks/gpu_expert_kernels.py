"""How close the two expert kernels come to the memory's bandwidth, beside torch on gathered weights.

python benchmarks/gpu_expert_kernels.py [shape ...] [--formats dense mxfp4 int4 fp8 int8] [--out FOLDER]

Every figure is the time on the device alone: calls on ever other slots, in one CUDA graph. The arena is far larger than
the device's cache, so that weights come from memory, as they do when a model decodes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hotset.engine.arena import Arena
from hotset.engine.kernels.pairs import Pairs
from hotset.engine.kernels.spec import ExpertSpec
from hotset.engine.kernels.triton_experts import Phase, TritonExperts
from hotset.store import Part, SlotLayout
from hotset.store.layout import PAGE_BYTES, round_up
from packed_experts import fill_slot, packed_layout

from common import publish

DEVICE = torch.device("cuda")
BATCHES = (1, 4, 8)
ARENA_BYTES = 3 << 30
CALLS, ROUNDS = 20, 5
ALPHA, LIMIT = 1.702, 7.0


class Shape(NamedTuple):
    """The experts of one layer of a published model."""

    width: int
    inner: int
    top_k: int
    experts: int
    like_gpt_oss: bool = False


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 8, 128),
    "gpt-oss-20b": Shape(2880, 2880, 4, 32, like_gpt_oss=True),
    "deepseek-v2-lite": Shape(2048, 1408, 6, 64),
}


def usual_gate(both: torch.Tensor) -> torch.Tensor:
    """Most families' gate."""
    gate, up = both.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def clamped_gate(both: torch.Tensor) -> torch.Tensor:
    """The gate of gpt-oss."""
    gate, up = both[..., ::2].clamp(max=LIMIT), both[..., 1::2].clamp(min=-LIMIT, max=LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * ALPHA))


def spec_of(shape: Shape) -> tuple[ExpertSpec, SlotLayout]:
    """What an expert of this shape computes, and how it lies in a slot."""
    h, i = shape.width, shape.inner
    if not shape.like_gpt_oss:
        parts = [Part("up", (2 * i, h), "bfloat16"), Part("down", (h, i), "bfloat16")]
        return ExpertSpec("up", "down", usual_gate), SlotLayout.of(parts)
    parts = [
        Part("up", (h, 2 * i), "bfloat16"), Part("up_bias", (2 * i,), "bfloat16"),
        Part("down", (i, h), "bfloat16"), Part("down_bias", (h,), "bfloat16"),
    ]  # fmt: skip
    return ExpertSpec("up", "down", clamped_gate, "up_bias", "down_bias", True, True), SlotLayout.of(parts)


def device_us(work: Callable[[], None]) -> float:
    """Microseconds of some work on the device, replayed as a graph; the best of some rounds."""
    work()
    torch.cuda.synchronize()
    graph, make = torch.cuda.CUDAGraph(), torch.cuda.Event
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(1 + ROUNDS):
        began, ended = make(enable_timing=True), make(enable_timing=True)
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(1000 * began.elapsed_time(ended))
    return min(times[1:])


def copy_gb_per_s() -> float:
    """What the device's memory does when it is copied, both ways counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return 2 * source.numel() / device_us(copy) / 1000


class Bench:
    """Random experts of one shape in an arena, and random calls."""

    def __init__(self, shape: Shape, weight_format: str) -> None:
        self.shape = shape
        self.spec, plain = spec_of(shape)
        self.layout = packed_layout(plain, self.spec, weight_format)
        slot_bytes = round_up(self.layout.used_bytes, PAGE_BYTES)
        self.arena = Arena.on_device(ARENA_BYTES // slot_bytes, slot_bytes, DEVICE)
        rows = self.arena.memory.view(self.arena.slots, -1)
        fill_slot(self.layout, rows[0])
        rows[1:] = rows[0]

    def routings(self, tokens: int) -> list[torch.Tensor]:
        """For every call the rows of all pairs: each layer's experts lie anywhere, and tokens choose among them."""
        random = torch.Generator().manual_seed(tokens)
        rows = []
        for _ in range(CALLS):
            layer = torch.randperm(self.arena.slots, generator=random)[: min(self.shape.experts, self.arena.slots)]
            chosen = torch.rand((tokens, len(layer)), generator=random).argsort(-1)[:, : self.shape.top_k]
            rows.append(layer[chosen].reshape(-1).to(torch.int32).to(DEVICE))
        return rows

    def row(self, tokens: int, peak: float) -> dict[str, Any]:
        """The figures of one number of tokens."""
        shape = self.shape
        kernels = TritonExperts(self.arena, self.layout, self.spec, top_k=shape.top_k)
        began = time.perf_counter()
        kernels.warm_up(tokens)
        tuning_s = time.perf_counter() - began
        rows = self.routings(tokens)
        x = torch.randn((tokens, shape.width), dtype=torch.bfloat16, device=DEVICE)
        weights = torch.rand((tokens, shape.top_k), device=DEVICE)
        out = torch.empty_like(x)

        products, choices, scratch = kernels.products, kernels.choices(tokens), kernels.scratch

        def up() -> None:
            for one in rows:
                products.multiply_up(x, Pairs(one, None), choices, scratch)

        def down() -> None:
            for one in rows:
                products.multiply_down(Pairs(one, None), weights, out, choices, scratch)

        def both() -> None:
            for one in rows:
                kernels(x, one, None, weights, out)

        def in_two_phases() -> None:
            for one in rows:  # as when nothing is missing: what the second phase costs by itself
                kernels(x, one, None, weights, out, Phase.EARLY)
                kernels(x, one, None, weights, out, Phase.LATE)

        calls = {"up": up, "down": down, "both": both, "two_phases": in_two_phases}
        times = {name: device_us(work) / CALLS for name, work in calls.items()}
        if not self.layout.matrices:
            times["torch"] = self.torch_us(x, rows, weights)
        different = sum(len(one.unique()) for one in rows) / CALLS
        sizes = {name: different * self.matrix_bytes(name) for name in ("up", "down")}
        sizes["both"] = sizes["up"] + sizes["down"]
        speeds = {name: size / times[name] / 1000 for name, size in sizes.items()}
        return {
            "tokens": tokens, "different_experts": different, "us": times, "gb_per_s": speeds,
            "share_of_copy": {name: speed / peak for name, speed in speeds.items()},
            "choices": [list(choice) for choice in choices],
            "tuning_s": tuning_s,
        }  # fmt: skip

    def matrix_bytes(self, name: str) -> int:
        """The bytes of a matrix, scales included."""
        return sum(part.size_bytes for part in self.layout.parts if part.name.partition(":")[0] == name)

    def torch_us(self, x: torch.Tensor, rows: list[torch.Tensor], weights: torch.Tensor) -> float:
        """The same in torch: weights gathered for every pair, then batched products."""
        views = {part.name: self.arena.view(part) for part in self.layout.parts}
        transposed, top_k = self.spec.up_transposed, self.shape.top_k
        given = x.repeat_interleave(top_k, dim=0).unsqueeze(1)

        def product(left: torch.Tensor, name: str, which: torch.Tensor) -> torch.Tensor:
            matrices = views[name][which]
            result = torch.bmm(left, matrices if transposed else matrices.transpose(1, 2))
            return result + views[f"{name}_bias"][which].unsqueeze(1) if f"{name}_bias" in views else result

        def work() -> None:
            for one in rows:
                raw = product(self.spec.activation(product(given, "up", one)), "down", one)
                (raw.squeeze(1) * weights.reshape(-1, 1)).view(len(x), top_k, -1).sum(dim=1).to(x.dtype)

        return device_us(work) / CALLS


def table(name: str, rows: list[dict[str, Any]]) -> None:
    """Print what was measured."""
    print(f"{name:24} tokens  experts   up us  down us  both us  in two  torch us  both GB/s   up %  down %  both %")
    for row in rows:
        us, share = row["us"], row["share_of_copy"]
        shares = "  ".join(f"{100 * share[kernel]:6.0f}" for kernel in ("up", "down", "both"))
        print(
            f"{'':24} {row['tokens']:6}  {row['different_experts']:7.1f}  {us['up']:6.1f}  {us['down']:7.1f}  "
            f"{us['both']:7.1f}  {us['two_phases']:6.1f}  {us.get('torch', 0.0):8.1f}  {row['gb_per_s']['both']:9.0f}  "
            f"{shares}   {row['choices']}",
            flush=True,
        )


def measure(names: list[str], formats: list[str]) -> dict[str, Any]:
    """All figures."""
    peak = copy_gb_per_s()
    print(f"{torch.cuda.get_device_name()}: a copy within its memory moves {peak:.0f} GB/s, of which % are shares")
    shapes: dict[str, Any] = {}
    for name, weight_format in product(names, formats):
        bench = Bench(SHAPES[name], weight_format)
        rows = [bench.row(tokens, peak) for tokens in BATCHES]
        table(f"{name} {weight_format}", rows)
        key = name if weight_format == "dense" else f"{name} {weight_format}"
        shapes[key] = {"shape": SHAPES[name]._asdict(), "format": weight_format, "rows": rows}
        del bench
        torch.cuda.empty_cache()
    return {
        "unit": "microseconds on the device per call of one layer's experts; GB/s of the weights that are read once",
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_gb_per_s": peak, "shapes": shapes,
    }  # fmt: skip


def main() -> None:
    """Measure the shapes named, print and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--formats", nargs="*", default=["dense"], help="dense, mxfp4, int4, int8, fp8, ...")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    with torch.no_grad():
        figures = measure(args.shapes, args.formats)
    if args.out:
        (args.out / "gpu_expert_kernels.json").write_text(json.dumps(figures, indent=1) + "\n")
    else:
        publish("gpu_expert_kernels", figures)


if __name__ == "__main__":
    main()

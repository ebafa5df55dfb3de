"""Milliseconds per token on a GPU with 100, 50, 25 and 12.5 % of the experts on it, beside stock and the link's floor.

python benchmarks/gpu_engine.py gpt-oss-20b qwen3-30b-a3b [--no-accelerate] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotset import policies
from hotset.cache.controller import Controller
from hotset.cache.plan import SlotPlan
from hotset.engine.arena import page_lock
from hotset.engine.build import gpu_engine
from hotset.engine.engine import Engine
from hotset.engine.guard import Guard
from hotset.engine.slots import SlotCache
from hotset.engine.tiers import RamTier
from hotset.models.attach import layout_of
from hotset.models.budget import default_staging, shape_of
from hotset.models.connect import connect_engine
from hotset.models.deferred import remember_shapes
from hotset.models.find_layers import find_moe_layers
from hotset.models.placeholders import install_placeholders
from hotset.store import Catalog, LayerSource
from hotset.trace import Trace
from hotset.trace.synth import SynthConfig, synthesise
from packed_experts import fill_slot, packed_layout

from common import gpt_oss, publish
from gpu_shapes import SHAPES, Decoder, ForcedRouting, Shape, empty_model, materialise

SHARES = (1.0, 0.5, 0.25, 0.125)
WARM, TIMED = 160, 80
DEVICE = "cuda"


def routing_of(shape: Shape) -> Trace:
    """The routing to force: one long stretch of decode tokens."""
    if shape.name == "gpt-oss-20b":
        real = gpt_oss()
        if real is None:
            raise SystemExit("the recorded routing of gpt-oss-20b is not beside the checkout")
        return real.take(slice(0, 4 * (WARM + TIMED)))
    c = shape.options
    return synthesise(
        SynthConfig(
            layers=c["num_hidden_layers"], experts=c["num_experts"], top_k=c["num_experts_per_tok"],
            requests=8, prompt_tokens=0, new_tokens=128,
        )
    )  # fmt: skip


def timed(decoder: Decoder, warm: int, tokens: int) -> float:
    """Milliseconds per token after some to warm up."""
    decoder.step(warm)
    torch.cuda.synchronize()
    began = time.perf_counter()
    decoder.step(tokens)
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - began) / tokens


def stock_ms(shape: Shape, trace: Trace) -> dict[str, float]:
    """Stock transformers with everything on the GPU, by experts implementation."""
    model = materialise(empty_model(shape), DEVICE)
    forced = ForcedRouting(model, trace, DEVICE)
    figures = {}
    for name in ("grouped_mm", "batched_mm"):
        model.set_experts_implementation(name)
        figures[name] = timed(Decoder(model, DEVICE), 20, TIMED)
    forced.remove()
    return figures


def accelerate_ms(shape: Shape, trace: Trace) -> float:
    """Accelerate's offload of all weights to the host, which moves every expert of a layer for every token."""
    from accelerate import cpu_offload

    model = materialise(empty_model(shape), "cpu")
    cpu_offload(model, execution_device=torch.device(DEVICE, 0))
    forced = ForcedRouting(model, trace, DEVICE)
    figure = timed(Decoder(model, DEVICE), 1, 2)
    forced.remove()
    return figure


class Bench:
    """One shape's experts in pinned host memory, and engines of several sizes over them."""

    def __init__(self, shape: Shape, policy: str, weight_format: str = "dense") -> None:
        self.policy = policy
        self.model = empty_model(shape)
        self.moe_layers = find_moe_layers(self.model)
        remember_shapes(self.model, {name for moe_layer in self.moe_layers for name in moe_layer.parameters()})
        layers = [
            LayerSource(packed_layout(layout_of(self.model, each), each.spec, weight_format), [()] * each.experts)
            for each in self.moe_layers
        ]
        self.catalog = Catalog((), tuple(layers))
        self.shape = shape_of(self.moe_layers, self.catalog)
        install_placeholders(self.model, self.moe_layers)
        materialise(self.model, DEVICE)
        plan, policy = SlotPlan(self.shape, self.shape.total_experts), policies.parse("lru")
        self.host = RamTier(self.catalog, plan, policy, Guard(SlotCache(Controller(plan, policy))))
        self.host.controller.preload(np.ones((self.shape.layers, self.shape.experts)))
        self._fill()
        page_lock(self.host.arena, DEVICE)

    def _fill(self) -> None:
        rows = self.host.arena.memory.view(self.host.arena.slots, -1)
        one = torch.zeros(rows.shape[1], dtype=torch.uint8)
        fill_slot(self.catalog.layers[0].layout, one)  # all layers are alike
        with ThreadPoolExecutor(8) as threads:  # a page that is touched for the first time costs more than its bytes
            list(threads.map(lambda row: row.copy_(one), rows))

    def engine(self, share: float) -> Engine:
        """An engine with this share of the experts on the GPU."""
        slots = max(int(share * self.shape.total_experts), 1)
        plan = SlotPlan(self.shape, slots, staging=default_staging(self.shape, on_gpu=True))
        engine = gpu_engine(
            Controller(plan, policies.parse(self.policy)), self.catalog, [each.spec for each in self.moe_layers],
            torch.device(DEVICE, 0), self.host.controller.plan, self.host.controller.policy, tier=self.host,
            pinned=True,
        )  # fmt: skip
        if share == 1.0:
            engine.controller.table.slot_of[:] = self.host.controller.table.slot_of
            engine.controller.table.num_free[:] = 0
            engine.offload.arena.memory[: self.host.arena.size_bytes].copy_(self.host.arena.memory)
        return engine

    def link_gb_per_s(self, engine: Engine) -> float:
        """What the link does with copies of one expert each, as the engine makes them."""
        size, copies = self.catalog.slot_bytes, 40
        pool = self.host.arena.memory.view(self.host.arena.slots, -1)
        target = engine.offload.arena.memory.view(engine.offload.arena.slots, -1)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for i in range(copies):
            target[i % len(target)].copy_(pool[i % len(pool)], non_blocking=True)
        torch.cuda.synchronize()
        return copies * size / (time.perf_counter() - began) / 1e9

    def row(self, share: float, trace: Trace) -> dict[str, Any]:
        """The figures of one size."""
        engine = self.engine(share)
        handle = connect_engine(self.model, self.moe_layers, engine)
        forced = ForcedRouting(self.model, trace, DEVICE)
        decoder = Decoder(self.model, DEVICE)
        decoder.step(WARM if share < 1 else 20)
        handle.reset_stats()
        ms = timed(decoder, 0, TIMED)
        stats = handle.stats()
        link = self.link_gb_per_s(engine) if share < 1 else None
        forced.remove()
        handle.release()
        del engine, handle
        gc.collect()
        torch.cuda.empty_cache()
        missed = stats["loaded_bytes"] / TIMED
        return {
            "share": share, "ms_per_token": ms, "hit_rate": stats["hit_rate"], "missed_mb_per_token": missed / 1e6,
            "link_gb_per_s": link, "link_floor_ms": missed / link / 1e6 if link else 0.0,
            "waited_ms": 1000 * stats["stall_s"] / TIMED, "resident_bytes": stats["memory"]["slots"],
        }  # fmt: skip


def measure(shape: Shape, policy: str, accelerate: bool) -> dict[str, Any]:
    """All figures of one shape."""
    trace = routing_of(shape)
    result: dict[str, Any] = {"routing": shape.routing, "policy": policy, "warm_tokens": WARM, "timed_tokens": TIMED}
    result["stock_resident_ms"] = stock_ms(shape, trace)
    gc.collect()
    torch.cuda.empty_cache()
    print(shape.name, result, flush=True)
    if accelerate:
        result["accelerate_offload_ms"] = accelerate_ms(shape, trace)
        gc.collect()
        torch.cuda.empty_cache()
        print("accelerate", result["accelerate_offload_ms"], flush=True)
    bench = Bench(shape, policy)
    result["expert_bytes"] = bench.catalog.slot_bytes
    result["rows"] = []
    for share in SHARES:
        row = bench.row(share, trace)
        result["rows"].append(row)
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    stock = min(result["stock_resident_ms"].values())
    resident = result["rows"][0]["ms_per_token"]
    for row in result["rows"]:
        row["over_stock_plus_floor"] = row["ms_per_token"] / (stock + row["link_floor_ms"])
        row["over_own_plus_floor"] = row["ms_per_token"] / (resident + row["link_floor_ms"])
    bench.host.close()
    return result


def main() -> None:
    """Measure the shapes named and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--policy", default="blend")
    parser.add_argument("--no-accelerate", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for name in args.shapes:
        figures = measure(SHAPES[name], args.policy, not args.no_accelerate)
        figures["gpu"] = torch.cuda.get_device_name()
        figures["torch"] = torch.__version__
        if args.out:
            (args.out / f"gpu_engine_{name}.json").write_text(json.dumps(figures, indent=1) + "\n")
        else:
            publish(f"gpu_engine_{name}", figures)


if __name__ == "__main__":
    main()

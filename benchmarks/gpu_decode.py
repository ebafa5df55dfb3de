"""Milliseconds per token with decode steps as one CUDA graph: all, half and a quarter resident, and beside it others.

Three settings: gpt-oss-20b's shape with its recorded routing, Qwen3-30B-A3B's shape with synthetic routing, both with
random weights; and the inflated reference model, free-running. Everything of a setting runs in one process.

python benchmarks/gpu_decode.py [gpt-oss-20b] [qwen3-30b-a3b] [reference] [--routing FILE] [--beside stock accelerate]
    [--format mxfp4|int4|int8|fp8|...] [--rows 1.0 0.5 0.5p]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_engine import Bench, accelerate_ms, routing_of
from gpu_free import free_running
from gpu_static import ForcedPredictions, StaticDecoder
from gpu_timeline import STEPS, timeline
from hotset import policies
from hotset.cache.controller import Controller
from hotset.cache.plan import SlotPlan
from hotset.engine.build import gpu_engine
from hotset.engine.host.forecasting import ForecastPredictor
from hotset.forecasts import parse as parse_forecast
from hotset.models.connect import connect_engine
from hotset.models.decode_graph import DecodeGraphs
from hotset.models.routers import Routers
from hotset.prefetch import prefetch_rows
from hotset.trace import Trace

from common import publish
from gpu_shapes import SHAPES, Shape, empty_model, materialise

WARM, TIMED, BY_HOST = 140, 60, 8
RUNS = 3
"""Stretches of timed tokens, one after another; the median counts, and the rest is its spread."""
ROWS = ("1.0", "0.5", "0.5p", "0.25", "0.25p")
"""Shares of the experts that are resident; with a p: with prefetch."""
RIGHT = (0.9, 0.85)
"""How often a prediction one and two layers ahead names the right expert."""


def stock_compiled_ms(shape: Shape, trace: Trace) -> float:
    """Stock transformers with everything on the GPU, a static cache, compiled with graphs of its own."""
    model = materialise(empty_model(shape, "batched_mm"), "cuda")
    compiled = torch.compile(model.forward, mode="reduce-overhead", fullgraph=False, dynamic=False)
    decoder = StaticDecoder(model, trace, compiled)
    decoder.step(8)
    found = statistics.median(decoder.ms(20) for _ in range(3))
    decoder.close()
    del model, decoder, compiled
    free()
    return found


def free() -> None:
    """Give memory back before the next model."""
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()


class Trial:
    """One engine at one size, with or without prefetch; ends with the block."""

    def __init__(self, bench: Bench, share: float, trace: Trace, *, prefetch: bool) -> None:
        self.bench, self.share, self.prefetch = bench, share, prefetch
        shape, device = bench.shape, torch.device("cuda", 0)
        ahead = prefetch_rows("device", shape) if prefetch else 0  # the cache gives them up
        plan = SlotPlan(shape, int(share * shape.total_experts) - ahead, staging=shape.top_k, prefetch_rows=ahead)
        controller = Controller(plan, policies.parse(bench.policy))
        specs = [moe_layer.spec for moe_layer in bench.moe_layers]
        self.engine = gpu_engine(
            controller, bench.catalog, specs, device, bench.host.controller.plan, bench.host.controller.policy,
            tier=bench.host, pinned=True,
            by_device=True, predict=self._predict if prefetch else None,
        )  # fmt: skip
        if share == 1.0:
            self._fill()
        self.handle = connect_engine(bench.model, bench.moe_layers, self.engine)
        graphs = DecodeGraphs(
            bench.model, self.engine.device_decode, self.handle.tracker, self.handle.static_caches, demanded=True
        )
        self.undo = graphs.install()
        self.decoder = StaticDecoder(bench.model, trace)
        if prefetch:
            routers = Routers.of(bench.model, self.handle.moe_layers)
            assert routers is not None  # noqa: S101 - both shapes have plain routers
            self.forced = ForcedPredictions(routers, trace, self.decoder.routing, RIGHT)
            prefetcher, slot_of = self.engine.offload.prefetcher, controller.table.slot_of
            prefetcher.predictor = ForecastPredictor(
                parse_forecast("gate"), shape, prefetcher.plan, gate=routers.predict, slot_of=slot_of
            )

    def _predict(self, layer: int, hidden: torch.Tensor, targets: int) -> list[torch.Tensor]:
        return self.forced(layer, hidden, targets)

    def _fill(self) -> None:
        bench, slot_of = self.bench, self.engine.controller.table.slot_of
        self.engine.controller.preload(np.ones(slot_of.shape))
        rows, host = (arena.memory.view(arena.slots, -1) for arena in (self.engine.offload.arena, bench.host.arena))
        for key, slot in np.ndenumerate(slot_of):
            rows[slot].copy_(host[bench.host.controller.table.slot_of[key]], non_blocking=True)

    def row(self, link_gb_per_s: float) -> dict[str, Any]:
        """What was measured, and the same by the host, going on from there."""
        self.decoder.step(WARM if self.share < 1 else 20)
        self.handle.reset_stats()
        runs, loaded = [], [0]
        for _ in range(RUNS):
            runs.append(self.decoder.ms(TIMED))
            loaded.append(self.handle.stats()["loaded_bytes"])
        stats = self.handle.stats()
        missed = stats["loaded_bytes"] / (RUNS * TIMED)
        row = {
            "share": self.share, "prefetch": "auto" if self.prefetch else "off",
            "ms_per_token": statistics.median(runs),
            "ms_runs": runs, "spread": (max(runs) - min(runs)) / statistics.median(runs),
            "hit_rate": stats["decode"]["hit_rate"], "missed_mb_per_token": missed / 1e6,
            "stall_ms_per_token": 1e3 * stats["stall_s"] / (RUNS * TIMED),
            "link_floor_ms": missed / link_gb_per_s / 1e6,
            "link_floor_ms_runs": [
                (last - first) / TIMED / link_gb_per_s / 1e6 for first, last in pairwise(loaded)
            ],
            "table_differences": self.engine.device_decode.steps.differences(),
            "guesses": self._predictions(stats), "timeline": self._timeline(link_gb_per_s),
        }  # fmt: skip
        self.undo()
        row["by_host_ms_per_token"] = None if self.prefetch else self.decoder.ms(BY_HOST)
        return row

    def _predictions(self, stats: dict[str, Any]) -> dict[str, Any] | None:
        if not self.prefetch:
            return None
        found = stats["prefetch"]
        sent = found["in_time"] + found["late"] + found["wasted"]
        names = ("decision", "reason", "in_time", "late", "wasted", "in_time_bytes", "late_bytes", "wasted_bytes")
        return {name: found[name] for name in names} | {"right": 1 - found["wasted"] / max(sent, 1)}

    def _timeline(self, link_gb_per_s: float) -> dict[str, Any]:
        shape, bench = self.bench.shape, self.bench
        read = shape.layers * shape.top_k * bench.catalog.layers[0].layout.used_bytes
        other = sum(p.nbytes for name, p in bench.model.named_parameters() if p.dim() == 2 and "embed" not in name)
        self.handle.reset_stats()
        found = timeline(self.decoder.step, read, other)
        stats, copies_ms = self.handle.stats(), found["ms_by_class"]["demand copies"]
        found["missed_mb"] = stats["loaded_bytes"] / STEPS / 1e6
        if self.share < 1 and not self.prefetch:  # prefetch brings part of what is missed
            found["share_of_link"] = found["missed_mb"] / copies_ms / link_gb_per_s
        return found

    def close(self) -> None:
        """Give everything back."""
        self.decoder.close()
        self.handle.release()
        del self.engine, self.handle, self.decoder
        gc.collect()
        torch.cuda.empty_cache()


def link_of(bench: Bench) -> float:
    """The best of several measurements: a floor must not be too high."""
    trial = SlotPlan(bench.shape, bench.shape.total_experts // 8)
    engine = gpu_engine(
        Controller(trial, policies.parse("lru")), bench.catalog, [moe_layer.spec for moe_layer in bench.moe_layers],
        torch.device("cuda", 0), bench.host.controller.plan, bench.host.controller.policy, tier=bench.host, pinned=True,
    )  # fmt: skip
    return max(bench.link_gb_per_s(engine) for _ in range(5))


def published_shape(
    name: str, trace: Trace, others: set[str], save: Callable[[dict[str, Any]], None], weight_format: str,
    rows: Sequence[str],
) -> None:  # fmt: skip
    """All figures of a shape with random weights and forced routing, saved as they come."""
    shape = SHAPES[name]
    result: dict[str, Any] = {"routing": shape.routing, "guesses_right": RIGHT, "format": weight_format}
    result |= {"warm_tokens": WARM, "timed_tokens": TIMED}
    if "stock" in others:
        result["stock_compiled_ms"] = stock_compiled_ms(shape, trace)
        print(f"{name}: stock, static cache, compiled: {result['stock_compiled_ms']:.3f} ms", flush=True)
    if "accelerate" in others:
        result["accelerate_offload_ms"] = accelerate_ms(shape, trace)
        print(f"  accelerate, all offloaded: {result['accelerate_offload_ms']:.0f} ms", flush=True)
        free()
    bench = Bench(shape, "blend", weight_format)
    link = link_of(bench)
    result |= {"expert_bytes": bench.catalog.slot_bytes, "link_gb_per_s": link, "rows": []}
    result["guess_rows"] = prefetch_rows("device", bench.shape)
    print(f"{name} in {weight_format}: {bench.catalog.slot_bytes / 1e6:.2f} MB per expert", flush=True)
    for words in rows:
        trial = Trial(bench, float(words.rstrip("p")), trace, prefetch=words.endswith("p"))
        row = trial.row(link)
        result["rows"].append(judged(row, result["rows"]))
        trial.close()
        show(row)
        save(result)
    bench.host.close()
    free()


def judged(row: dict[str, Any], earlier: list[dict[str, Any]]) -> dict[str, Any]:
    """Beside what is possible: the resident step and the link's floor, one after the other or at once."""
    resident_ms = earlier[0]["ms_per_token"] if earlier else row["ms_per_token"]
    floor_ms = row["link_floor_ms"]
    row["over_resident_plus_floor"] = row["ms_per_token"] / (resident_ms + floor_ms)
    if row["prefetch"] == "auto":
        row["aim_ms"] = 1.25 * max(resident_ms, floor_ms) + 1
        same = [each for each in earlier if each["share"] == row["share"]]
        row["over_demand_only"] = row["ms_per_token"] / same[-1]["ms_per_token"] if same else None
    return row


def show(row: dict[str, Any]) -> None:
    """A line for people."""
    aim = f", aim {row['aim_ms']:.2f}" if "aim_ms" in row else ""
    if row.get("over_demand_only"):
        aim += f", {row['over_demand_only']:.3f} of demand"
    right = f", predictions {100 * row['guesses']['right']:.0f} % right, {row['guesses']['decision']}" if aim else ""
    host = f", by the host {row['by_host_ms_per_token']:.1f} ms" if row["by_host_ms_per_token"] else ""
    print(
        f"  {100 * row['share']:5.1f} %, prefetch {row['prefetch']:4}: {row['ms_per_token']:7.3f} ms "
        f"(+- {50 * row['spread']:.1f} %), experts {row['timeline']['ms_by_class']['experts']:.3f} ms, hits "
        f"{100 * row['hit_rate']:.1f} %, floor {row['link_floor_ms']:.2f} ms, "
        f"{row['over_resident_plus_floor']:.3f} of resident + floor{aim}{right}{host}",
        flush=True,
    )


def main() -> None:
    """Measure what is named and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", nargs="*", default=[*SHAPES, "reference"])
    parser.add_argument("--routing", type=Path, help="the trace of gpt-oss-20b, where it is not beside the checkout")
    parser.add_argument("--beside", nargs="*", default=["stock", "accelerate"], help="what else is measured")
    parser.add_argument("--format", default="dense", help="of the experts: mxfp4, int4, int8, fp8, or a format's words")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), help="shares of the experts; with a p: with prefetch")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    suffix = "" if options.format == "dense" else f"_{options.format.replace(':', '_')}"
    for name in options.settings:
        save = partial(keep, f"gpu_decode_{name}{suffix}", options.out)
        if name == "reference":
            free_running("stock" in options.beside, save)
            continue
        own = options.routing is not None and name == "gpt-oss-20b"
        trace = Trace.load(options.routing) if own else routing_of(SHAPES[name])
        published_shape(name, trace, set(options.beside), save, options.format, options.rows)


def keep(name: str, folder: Path | None, figures: dict[str, Any]) -> None:
    """Write what is known so far."""
    figures = figures | {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    if folder is None:
        publish(name, figures)
    else:
        (folder / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Prefetch on a live engine: the inflated reference model, free-running, and what the simulator says of it.

Off, gate, best, auto and an oracle take turns in one process, at three cache sizes. The oracle knows what a recorded
run routed. The simulator gets that recording, the link's measured speed and the measured time of a pass without stalls.

python benchmarks/prefetch.py --device cuda
python benchmarks/prefetch.py --device cpu --folder DIR      DIR holds, or will hold, 4.4 GB packed
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer
from transformers.utils import logging

import hotset
from hotset import reference
from hotset.cache import Controller, SlotPlan
from hotset.engine.batch import ExpertBatch
from hotset.engine.host.prefetcher import IsNear
from hotset.engine.step import Step
from hotset.policies import parse
from hotset.prefetch import plan_prefetch
from hotset.shape import ExpertKey
from hotset.sim.link import Link
from hotset.sim.prefetch import simulate_prefetch
from hotset.trace import Phase, Trace
from hotset.transfer import ReadTransfer
from hotset.transfer.reads import Load

from common import publish

PROMPT = "La storia della città di Roma comincia"
KINDS = ("off", "gate", "best", "auto", "oracle")
SIZES = ("50%", "25%", "12.5%")
WIDTH = 5632


class Oracle:
    """Knows what a recorded run routed, for a run that repeats it."""

    def __init__(self, trace: Trace) -> None:
        self.layers, self.first = trace.shape.layers, 0
        self.rows = {int(step): trace.experts[trace.step == step] for step in np.unique(trace.step)}

    def choose(self, layer: int, _: ExpertBatch, run: Step, room: int, is_near: IsNear) -> list[ExpertKey]:
        """The experts of the next layer, as they were."""
        step, target = run.number - 1 - self.first + (layer == self.layers - 1), (layer + 1) % self.layers
        experts = np.unique(self.rows[step][:, target]).tolist() if step in self.rows else []
        return [key for key in (ExpertKey(target, expert) for expert in experts) if not is_near(key)][:room]

    def observe(self, *_: Any) -> None:
        """Nothing to learn."""

    ask_device = note_step = note_event = observe


class Contender:
    """One way to prefetch, loaded and ready."""

    def __init__(self, folder: Path, memory: str, kind: str, device: str, known: Trace | None = None) -> None:
        self.kind, self.known, self.device = kind, known, device
        named = "gate" if kind == "oracle" else kind
        self.model = hotset.load(str(folder), memory=memory, device=device, prefetch=named)
        self.handle = self.model.hotset
        self.ms: list[float] = []
        self.stall_ms: list[float] = []
        self.text: Any = None

    def answer(self, ids: Any, tokens: int) -> None:
        """Write a text, and keep what a new token took and how long it stalled."""
        engine = self.handle.engine
        if self.known is not None:
            engine.offload.prefetcher.predictor = Oracle(self.known)
            engine.offload.prefetcher.predictor.first = self.handle.tracker.steps
        self.handle.reset_stats()
        self.text = self.model.generate(
            ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
        ).tolist()
        stats = self.handle.stats()  # waits for the device
        self.ms.append(1e3 * stats["pass_s"] / tokens)
        self.stall_ms.append(1e3 * stats["stall_s"] / tokens)

    def row(self, off: Contender) -> dict[str, Any]:
        """What is published, the first round left out: it warms up, and auto makes up its mind."""
        stats, ratios = self.handle.stats(), [m / o for m, o in zip(self.ms[1:], off.ms[1:], strict=True)]
        decode = stats["decode"]
        return {
            "prefetch": self.kind,
            "ms_per_token": statistics.median(self.ms[1:]),
            "against_off": statistics.median(ratios),
            "against_off_rounds": ratios,
            "stall_ms_per_token": statistics.median(self.stall_ms[1:]),
            "first_round_ms": self.ms[0],
            "hit_rate": decode["hit_rate"],
            "misses_per_token": decode["misses"] / max(decode["pass_tokens"], 1),
            "prefetch_hits": decode["prefetch_hits"],
            "late": decode["late"],
            "slots": stats["slots"],
            "text_as_off": self.text == off.text,
            "details": stats["prefetch"],
        }


def link_bytes_per_s(contender: Contender) -> float:
    """How fast experts come when nothing computes."""
    engine, random = contender.handle.engine, np.random.default_rng(0)
    size, shape = engine.offload.catalog.slot_bytes, engine.shape
    keys = [(int(random.integers(shape.layers)), int(random.integers(shape.experts))) for _ in range(64)]
    began = time.perf_counter()
    if contender.device == "cpu":
        staging = engine.cache.staging
        for layer, expert in keys:
            transfer = ReadTransfer()
            others = [(expert + 7 * i) % shape.experts for i in range(len(staging))]
            engine.offload.mover.readers.start(
                transfer, [Load(layer, e, row) for e, row in zip(others, staging, strict=True)]
            )
            left = len(staging)
            while left:
                left -= len(transfer.wait_any())
        return len(keys) * len(staging) * size / (time.perf_counter() - began)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for number, _ in enumerate(keys):
        row = engine.offload.arena.slots - 1 - number % 4
        engine.offload.mover._rows[row].copy_(engine.offload.mover._tier_rows[number], non_blocking=True)
    torch.cuda.synchronize()
    return len(keys) * size / (time.perf_counter() - began)


def predicted(trace: Trace, off: Contender, way: Contender, link: Link) -> dict[str, float]:
    """What the simulator makes of the same run, by the rules of the driver that served it."""
    plan = off.handle.engine.controller.plan
    cache = Controller(SlotPlan(plan.shape, plan.cached, plan.scope, plan.staging), parse("blend"))
    auto = way.kind == "auto"
    driver = way.handle.stats().get("driven_by", "cpu" if way.device == "cpu" else "host")
    rules = plan_prefetch(driver, plan.shape, trial=auto)
    found = simulate_prefetch(trace, cache, link, "gate" if auto else way.kind, rules)
    tokens = trace.count(Phase.DECODE)
    return {"stall_ms_per_token": 1e3 * found.stall_s / tokens, "ms_per_token": 1e3 * found.total_s / tokens}


def record(folder: Path, memory: str, device: str, ids: Any, tokens: int) -> Trace:
    """What one run routes, with what the next layers' routers would have said."""
    one = Contender(folder, memory, "off", device)
    with one.handle.trace(lookahead=2) as recorder:
        one.answer(ids, tokens)
    one.handle.close()
    return recorder.finish()


def compare(folder: Path, memory: str, device: str, ids: Any, options: argparse.Namespace) -> dict[str, Any]:
    """All kinds at one size, by turns."""
    trace = record(folder, memory, device, ids, options.tokens)
    known = {"oracle": trace}
    ways = [Contender(folder, memory, kind, device, known.get(kind)) for kind in KINDS]
    for _ in range(options.rounds + 1):
        for way in ways:
            way.answer(ids, options.tokens)
    off = ways[0]
    speed = link_bytes_per_s(off)
    compute_s = (statistics.median(off.ms[1:]) - statistics.median(off.stall_ms[1:])) / 1e3
    link = Link(speed, compute_s)
    rows = [way.row(off) | {"simulated": predicted(trace, off, way, link)} for way in ways]
    for way in ways:
        way.handle.close()
    return {"memory": memory, "link_bytes_per_s": speed, "compute_ms": 1e3 * compute_s, "rows": rows}


def show(found: dict[str, Any]) -> None:
    """A line per kind."""
    print(f"{found['memory']}: link {found['link_bytes_per_s'] / 1e9:.2f} GB/s, compute {found['compute_ms']:.2f} ms")
    for row in found["rows"]:
        simulated, why = row["simulated"], (row["details"] or {}).get("reason", "")
        print(
            f"  {row['prefetch']:7} {row['ms_per_token']:8.2f} ms ({row['against_off']:.3f} of off), stall "
            f"{row['stall_ms_per_token']:7.2f}; simulated {simulated['ms_per_token']:8.2f}, stall "
            f"{simulated['stall_ms_per_token']:7.2f}; same text {row['text_as_off']}; {why}",
            flush=True,
        )


def main() -> None:
    """Measure all kinds by turns at three sizes and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sizes", default=",".join(SIZES))
    options = parser.parse_args()
    logging.disable_progress_bar()
    if options.device == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    ids = AutoTokenizer.from_pretrained(reference.path())(PROMPT, return_tensors="pt").input_ids.to(options.device)
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = folder if (folder / "config.json").exists() else reference.inflate(WIDTH, folder / "model")
        found = []
        for memory in options.sizes.split(","):
            found.append(compare(path, memory, options.device, ids, options))
            show(found[-1])
    name = "cpu" if options.device == "cpu" else "gpu"
    device = torch.cuda.get_device_name() if name == "gpu" else "cpu"
    publish(f"{name}_prefetch", {"device": device, "tokens": options.tokens, "rounds": options.rounds, "sizes": found})


if __name__ == "__main__":
    main()

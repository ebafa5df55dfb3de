"""What the planner says of the GPU settings that were measured and committed, from a calibration of that machine.

Taken as calibration, and not judged: the memory bandwidth of an H200 (4.8 TB/s), the link of each run, and the figures
in `hotset.analysis.planner.rates`: time per layer, other weights and bfloat16 experts of Qwen3-30B-A3B with all experts
resident, kernels of the formats alone, and what kernels read of host memory beside the copy engine.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hotset.analysis.planner.hits import Hits, replay_hits
from hotset.analysis.planner.intervals import interval
from hotset.analysis.planner.model import PlannedModel, Precision
from hotset.analysis.planner.planning import Planner
from hotset.analysis.planner.prompts import PromptTimes
from hotset.analysis.planner.rates import Engine, gpu_rates
from hotset.analysis.planner.shapes import parse_shape
from hotset.analysis.planner.tiers import Memory
from hotset.analysis.planner.times import TokenTimes
from hotset.analysis.planner.workload import generic, synthetic
from hotset.reference import DOMAINS
from hotset.reference import trace as trace_of
from hotset.trace import Trace
from hotset.trace.importers import import_trace
from hotset.trace.synth import SynthConfig, synthesise

from common import RESULTS, ROOT

H200_BYTES_PER_S = 4.8e12
FILES = {
    "gpu_decode_gpt-oss-20b": ("gpt-oss-20b", "bfloat16"),
    "gpu_decode_gpt-oss-20b_mxfp4": ("gpt-oss-20b", "mxfp4"),
    "gpu_decode_gpt-oss-20b_fp8": ("gpt-oss-20b", "fp8"),
    "gpu_decode_qwen3-30b-a3b": ("qwen3-30b-a3b", "bfloat16"),
    "gpu_decode_qwen3-30b-a3b_int4": ("qwen3-30b-a3b", "int4"),
}
CALIBRATION = ("gpu_decode_qwen3-30b-a3b", 1.0)
"""The one row that rates were taken from."""
PREFILL, PREFILL_LAYERS = "gpu_prefill_gpt-oss-20b", 12


def routing(name: str) -> Trace | None:
    """The routing that was forced: the public trace of gpt-oss-20b, or the synthetic one of gpu_engine.py."""
    if name == "qwen3-30b-a3b":
        return synthesise(SynthConfig(layers=48, experts=128, top_k=8, requests=8, prompt_tokens=0, new_tokens=128))
    places = (folder / "shared" / "traces" / "gpt-oss-20b.npz" for folder in (ROOT, *ROOT.parents))
    found = next((place for place in places if place.exists()), None)
    return None if found is None else import_trace(found, experts=32)


def decode_settings() -> list[dict[str, Any]]:
    """One row for each measured setting: what is expected, what was measured, and whether it is judged."""
    hits: dict[str, Hits | None] = {}
    for name in dict.fromkeys(name for name, _ in FILES.values()):
        trace = routing(name)
        hits[name] = None if trace is None else replay_hits(trace, ("blend",))
        if trace is None:
            print(f"{name}: its recorded routing is not beside the checkout, so its settings are left out", flush=True)
    rows = []
    for file, (name, precision) in FILES.items():
        known, document = hits[name], json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))
        if known is None:
            continue
        model = parse_shape(name, 512)
        size = document["expert_bytes"]
        chosen = Precision(precision, size)
        rows += [_setting(file, model, chosen, known, document, row) for row in document["rows"]]
    return rows


def _setting(
    file: str, model: PlannedModel, precision: Precision, hits: Hits, document: dict[str, Any], row: dict[str, Any]
) -> dict[str, Any]:
    rates = gpu_rates(H200_BYTES_PER_S, 1e9 * document["link_gb_per_s"], 3e9, host=False)
    planner = Planner(model, Memory(1 << 40, 1 << 37), hits, lambda _: rates)
    slots = int(row["share"] * model.shape.total_experts)
    times = TokenTimes(model, precision, rates)
    policy, token_s = planner.fastest(times, slots)
    low_s, high_s = interval(times, hits.curves[policy], slots, token_s)
    return {
        "machine": "H200",
        "setting": f"{model.name}, {precision.name}, {100 * row['share']:g} %, prefetch {row['prefetch']}",
        "expected_tokens_per_s": 1 / token_s,
        "expected_low": 1 / high_s,
        "expected_high": 1 / low_s,
        "measured_tokens_per_s": 1e3 / row["ms_per_token"],
        "expected_hit_rate": hits.curves[policy].hit_rate(slots),
        "measured_hit_rate": row["hit_rate"],
        "judged": (file, row["share"]) != CALIBRATION,
    }


def workload_spread() -> dict[str, Any]:
    """Misses of the reference model's 14 domains, over those of the workloads that stand in for them."""
    shape = trace_of("it").shape
    slots = [int(share * shape.total_experts) for share in (0.125, 0.25, 0.5)]

    def misses(trace: Trace) -> list[float]:
        curve = replay_hits(trace, ("blend",)).curves["blend"]
        return [1 - curve.hit_rate(size) for size in slots]

    mixed, found = misses(generic(shape).trace), {}
    for domain in DOMAINS:
        own, scaled = misses(trace_of(domain)), misses(synthetic(domain, shape))
        found[domain] = {
            "over_generic": [real / other for real, other in zip(own, mixed, strict=True)],
            "over_like": [real / other for real, other in zip(own, scaled, strict=True)],
        }
    return {"slots": slots, "domains": found}


def prompt_settings() -> list[dict[str, Any]]:
    """The first token of prompts: gpt-oss-20b's shape with 12 of its layers."""
    path = RESULTS / f"{PREFILL}.json"
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    whole = parse_shape("gpt-oss-20b", 2048)
    share = PREFILL_LAYERS / whole.layers
    model = replace(whole, layers=PREFILL_LAYERS, all_layers=PREFILL_LAYERS, read_bytes=int(share * whole.read_bytes))
    rows = []
    rates = gpu_rates(H200_BYTES_PER_S, 54.8e9, 3e9, host=False)
    assert rates.engine is Engine.DEVICE  # noqa: S101 - prompts take the host's path on the same machine
    for row in document["rows_before"]:
        name = {"dense": "bfloat16"}.get(row["format"], row["format"])
        size = whole.own_bytes or {"bfloat16": 49786880, "mxfp4": 13238272}[name]
        times = TokenTimes(model, Precision(name, size), rates)
        rows.append({
            "machine": "H200",
            "setting": f"gpt-oss-20b, 12 layers, {name}, {100 * row['share']:g} %, {row['tokens']} tokens",
            "expected_s": PromptTimes(times).first_token_s(row["tokens"], row["share"]),
            "measured_s": row["ms"] / 1e3,
        })  # fmt: skip
    return rows

"""The inflated reference model by generate(), nothing forced: by the device, by the host, and stock."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hotset
from hotset import reference

WIDTH, TOKENS, ROUNDS = 5632, 128, 3
MEMORIES = ("511 slots", "25%", "50%")
"""One slot short of all stands for a resident model: where all experts fit, it runs as transformers made it."""
WAYS = {"demand": ("device", "off"), "auto": ("device", "auto"), "host": ("host", "off")}


def free_running(beside_stock: bool, save: Callable[[dict[str, Any]], None]) -> None:
    """All sizes, on an Italian prompt; saved as they come."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(reference.path())(
        "La storia della città di Roma", return_tensors="pt"
    ).input_ids
    with tempfile.TemporaryDirectory() as folder:
        path = reference.inflate(WIDTH, Path(folder) / "model")
        result: dict[str, Any] = {"width": WIDTH, "tokens": TOKENS, "rows": []}
        if beside_stock:
            result["stock_compiled_ms"] = stock(path, ids.cuda())
            print(f"reference: stock, static cache, compiled: {result['stock_compiled_ms']:.3f} ms", flush=True)
        for memory in MEMORIES:
            result["rows"].append(size(path, ids.cuda(), memory))
            save(result)


def stock(path: Path, ids: torch.Tensor) -> float:
    """Stock transformers with everything on the GPU: generate() compiles its forward for a static cache."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, experts_implementation="batched_mm")
    model = model.cuda().eval()
    answer(model, ids, cache_implementation="static")
    found = statistics.median(answer(model, ids, cache_implementation="static")[0] for _ in range(ROUNDS))
    del model
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    return found


def answer(model: Any, ids: torch.Tensor, **options: Any) -> tuple[float, list[int]]:
    """Milliseconds per token of one greedy answer, and the answer."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    text = model.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0, **options)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / TOKENS, text[0].tolist()


def size(path: Path, ids: torch.Tensor, memory: str) -> dict[str, Any]:
    """All ways at one size, in turns."""
    models = {
        way: hotset.load(str(path), memory=memory, device="cuda", engine=engine, prefetch=prefetch)
        for way, (engine, prefetch) in WAYS.items()
    }
    for model in models.values():
        settle(model)
        answer(model, ids)
        answer(model, ids)
        model.hotset.reset_stats()
    times: dict[str, list[float]] = {way: [] for way in models}
    texts: dict[str, list[int]] = {}
    for _ in range(ROUNDS):
        for way, model in models.items():
            ms, texts[way] = answer(model, ids)
            times[way].append(ms)
    row: dict[str, Any] = {"memory": memory, "guesses_change_nothing": texts["demand"] == texts["auto"]}
    row["text_of_the_host"] = texts["demand"] == texts["host"]  # sums are rounded elsewhere there, in bfloat16
    for way, model in models.items():
        stats = model.hotset.stats()
        prefetch = stats.get("prefetch") or {}
        row[way] = {
            "ms_per_token": statistics.median(times[way]), "graph_ms": 1e3 * stats["pass_s"] / stats["passes"],
            "hit_rate": stats["decode"]["hit_rate"], "driven_by": stats.get("driven_by"),
            "missed_mb_per_token": stats["loaded_bytes"] / (ROUNDS * TOKENS) / 1e6,
            "guesses": {name: prefetch.get(name) for name in ("decision", "reason", "in_time", "late", "wasted")},
        }  # fmt: skip
        model.hotset.close()
    print(row, flush=True)
    del models
    gc.collect()
    torch.cuda.empty_cache()
    return row


def settle(model: Any) -> None:
    """Wait until the RAM tier holds all experts, so that the device can drive."""
    decode = model.hotset.engine.device_decode
    if decode is not None:
        decode.filler.wait(120)

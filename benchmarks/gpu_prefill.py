"""Time to first token on a GPU, packed experts beside dense ones: prompts of 16 to 2,048 tokens, all and some resident.

python benchmarks/gpu_prefill.py [gpt-oss-20b] [--formats dense mxfp4] [--layers 12] [--shares 1.0 0.25] [--out FOLDER]

The shape is a published one with random weights and as many of its layers as asked for; the routers choose for
themselves. Everything runs in one process, one format after another.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpu_engine import DEVICE, Bench
from hotset.models.connect import connect_engine

from common import publish
from gpu_shapes import SHAPES, Shape

LENGTHS = (16, 64, 256, 1024, 2048)
RUNS = 3


@torch.no_grad()
def first_token_ms(model: Any, length: int, seed: int) -> float:
    """From a prompt to its first token."""
    from transformers import DynamicCache

    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(1000, (1, length), generator=random).to(DEVICE)
    cache = DynamicCache(config=model.config)
    torch.cuda.synchronize()
    began = time.perf_counter()
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1).item()
    return 1e3 * (time.perf_counter() - began)


def measured(bench: Bench, share: float, weight_format: str, lengths: list[int]) -> list[dict[str, Any]]:
    """The rows of one format at one size: each length once to warm up, then three times."""
    engine, rows = bench.engine(share), []
    handle = connect_engine(bench.model, bench.moe_layers, engine)
    for length in lengths:
        first_token_ms(bench.model, length, 0)
        handle.reset_stats()
        runs = [first_token_ms(bench.model, length, 1 + run) for run in range(RUNS)]
        missed = handle.stats()["loaded_bytes"] / RUNS / 1e6
        middle = statistics.median(runs)
        row = {"format": weight_format, "share": share, "tokens": length, "ms": middle, "ms_runs": runs}
        rows.append(row | {"spread": (max(runs) - min(runs)) / middle, "missed_mb": missed})
        times = ", ".join(f"{run:.1f}" for run in runs)
        print(f"{weight_format} {share:.2f} {length:5}: {middle:8.1f} ms ({times}), missed {missed:.0f} MB", flush=True)
    handle.release()
    del engine, handle
    gc.collect()
    torch.cuda.empty_cache()
    return rows


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every row beside the dense one of the same length and size."""
    dense = {(row["share"], row["tokens"]): row["ms"] for row in rows if row["format"] == "dense"}
    for row in rows:
        other = dense.get((row["share"], row["tokens"]))
        row["over_dense"] = None if other is None else row["ms"] / other
    return rows


def shortened(shape: Shape, layers: int | None) -> Shape:
    """The shape with so many layers."""
    return shape if layers is None else replace(shape, options=shape.options | {"num_hidden_layers": layers})


def main() -> None:
    """Measure what is named and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", nargs="?", default="gpt-oss-20b", choices=SHAPES)
    parser.add_argument("--formats", nargs="*", default=["dense", "mxfp4"])
    parser.add_argument("--layers", type=int, help="of the model, where not all are wanted")
    parser.add_argument("--shares", nargs="*", type=float, default=[1.0, 0.25])
    parser.add_argument("--lengths", nargs="*", type=int, default=list(LENGTHS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shape, rows = shortened(SHAPES[options.shape], options.layers), []
    for weight_format in options.formats:
        bench = Bench(shape, "blend", weight_format)
        for share in options.shares:
            rows += measured(bench, share, weight_format, options.lengths)
            save(options.shape, shape, rows, options.out)
        bench.host.close()
        del bench
        gc.collect()
        torch.cuda.empty_cache()
    for row in rows:
        if row["over_dense"] is not None and row["format"] != "dense":
            words = f"{row['format']} {row['share']:.2f} {row['tokens']:5}"
            print(f"{words}: {row['ms']:8.1f} ms, {row['over_dense']:.2f} of dense")


def save(name: str, shape: Shape, rows: list[dict[str, Any]], folder: Path | None) -> None:
    """Write what is known so far."""
    found = {
        "shape": name, "layers": shape.options["num_hidden_layers"], "runs": RUNS,
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": compared(rows),
    }  # fmt: skip
    if folder is None:
        publish(f"gpu_prefill_{name}", found)
    else:
        (folder / f"gpu_prefill_{name}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

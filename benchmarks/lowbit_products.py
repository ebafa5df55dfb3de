"""One token's product with a packed matrix on a CPU, by format, beside bfloat16 and torch's own product of 4 bits.

Matrices are taken in turn out of more memory than any cache holds, and kinds alternate, so that what else the machine
does meets all of them alike. Figures are microseconds: the tenth percentile of all calls, since others only ever add.

python benchmarks/lowbit_products.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hotset import formats
from hotset.engine.arena import Arena
from hotset.engine.kernels import packed
from hotset.engine.kernels.packed import PackedLinear
from hotset.formats import laid_out
from hotset.formats._vector_types import features
from hotset.store import SlotLayout

from common import publish

SHAPES = ((1536, 2048), (2048, 768), (5760, 2880), (11264, 256), (256, 5632))
SPECS = {
    "int4": "integer:short=on",
    "int4, scales of any digits": "integer",
    "int4, groups of 128, zero points": "integer:group=128,scales=float16,zeros=bytes",
    "int8": "integer:bits=8",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
    "fp8": "fp8",
}
POOL_BYTES = 160 << 20
"""Of each kind: several times what the last cache holds."""
Call = Callable[[int], object]


def linear_of(spec: str, dtype: str, outputs: int, inputs: int) -> PackedLinear:
    """Matrices of any codes, with scales of a usual size."""
    chosen = formats.parse(f"{spec}{',' if ':' in spec else ':'}dtype={dtype}")
    parts, matrix = laid_out("w", chosen, outputs, inputs)
    layout = SlotLayout.of(parts, [] if matrix is None else [matrix])
    slot = 4096 * -(-layout.used_bytes // 4096)
    rows = max(POOL_BYTES // slot, 2)
    linear = PackedLinear(Arena.in_ram(rows, slot), layout, "w", None, False)
    for view, part in zip(linear.views, chosen.parts(outputs, inputs), strict=True):
        if part.dtype != "uint8":
            view.fill_(0.01)
        elif part.role == "scales":
            view.fill_(118 if spec == "mxfp4" else 40)
        else:
            view.copy_(torch.randint(0, 96, part.shape, dtype=torch.uint8).expand(view.shape))
    return linear


def packed_call(spec: str, dtype: str, outputs: int, inputs: int, tokens: int = 1) -> Call:
    """The product by hotset's kernels."""
    linear = linear_of(spec, dtype, outputs, inputs)
    x, rows = torch.randn(tokens, inputs).to(linear.dtype), linear.views[0].shape[0]
    return lambda number: linear(x, [number % rows], [tokens])


def plain_call(outputs: int, inputs: int, dtype: torch.dtype, tokens: int = 1) -> Call:
    """The product of plain numbers by torch."""
    rows = max(POOL_BYTES // (outputs * inputs * dtype.itemsize), 2)
    weights = torch.randn(outputs, inputs).to(dtype).expand(rows, -1, -1).clone()
    x = torch.randn(tokens, inputs).to(dtype)
    return lambda number: torch.nn.functional.linear(x, weights[number % rows])


def torch_call(outputs: int, inputs: int) -> Call:
    """Torch's own product of 4 bits in groups of 32."""
    rows = max(POOL_BYTES * 2 // (outputs * inputs), 2)
    codes = torch._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, (outputs, inputs), dtype=torch.int32), 1)
    codes = codes.expand(rows, *codes.shape).clone()
    scales = torch.full((rows, inputs // 32, outputs, 2), 0.01, dtype=torch.bfloat16)
    x = torch.randn(1, inputs).bfloat16()
    return lambda number: torch._weight_int4pack_mm_for_cpu(x, codes[number % rows], 32, scales[number % rows])


def alternate(calls: dict[str, Call], seconds: float) -> dict[str, float]:
    """Microseconds of each, some calls of one after some of another."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    ends, number = time.perf_counter() + seconds * len(calls), 0
    while time.perf_counter() < ends:
        for name, call in calls.items():
            for _ in range(8):
                began = time.perf_counter()
                call(number)
                times[name].append(time.perf_counter() - began)
                number += 1
    return {name: round(1e6 * float(np.percentile(found[1:], 10)), 1) for name, found in times.items()}


def shape_row(outputs: int, inputs: int, threads: int, seconds: float) -> dict[str, Any]:
    """All formats of one shape, in bfloat16, and the product of 4 bits in float32."""
    torch.set_num_threads(threads)
    calls = {"bfloat16": plain_call(outputs, inputs, torch.bfloat16)}
    calls |= {
        name: packed_call(spec, "bfloat16", outputs, inputs) for name, spec in SPECS.items() if _fits(spec, inputs)
    }
    calls["float32"] = plain_call(outputs, inputs, torch.float32)
    calls["int4, computed in float32"] = packed_call(SPECS["int4"], "float32", outputs, inputs)
    if outputs % 16 == 0 and inputs % 128 == 0:
        calls["int4, torch"] = torch_call(outputs, inputs)
    found = alternate(calls, seconds)
    return {"outputs": outputs, "inputs": inputs, "threads": threads, "us": found}


def _fits(spec: str, inputs: int) -> bool:
    return "128" not in spec or inputs % 128 == 0


def token_rows(seconds: float) -> list[dict[str, Any]]:
    """Several tokens of one expert: as they lie, by the decoded matrix, and in bfloat16."""
    torch.set_num_threads(1)
    rows, usual = [], packed.FEW_TOKENS
    for spec in (SPECS["int4"], "integer:bits=8", "mxfp4"):
        for tokens in (1, 2, 4, 8, 16, 32):
            call = packed_call(spec, "bfloat16", 1536, 2048, tokens)

            def at_most(few: int, number: int, call: Call = call) -> None:
                packed.FEW_TOKENS = few
                call(number)

            calls: dict[str, Call] = {
                "as they lie": lambda number, at_most=at_most: at_most(1 << 30, number),  # type: ignore[misc]
                "decoded": lambda number, at_most=at_most: at_most(0, number),  # type: ignore[misc]
                "bfloat16": plain_call(1536, 2048, torch.bfloat16, tokens),
            }
            rows.append({"format": spec, "tokens": tokens, "us": alternate(calls, seconds)})
            packed.FEW_TOKENS = usual
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each kind")
    options = parser.parse_args()
    rows = []
    for outputs, inputs in SHAPES:
        for threads in (1, 2):
            rows.append(shape_row(outputs, inputs, threads, options.seconds))
            print(rows[-1], flush=True)
    wide = sorted(features() & {"avx2", "avx512f", "avx512bf16", "avx512vnni"})
    figures = {"torch": torch.__version__, "processor_has": wide, "rows": rows, "tokens": token_rows(options.seconds)}
    publish("lowbit_products", figures)


if __name__ == "__main__":
    main()

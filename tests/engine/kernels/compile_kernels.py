"""Compiles the expert kernels with the tile loader of every format for GPUs that need not be there.

``python tests/engine/kernels/compile_kernels.py 80 90`` prints registers and loads of both kernels.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from hotset import formats
from hotset.engine.kernels.activations import silu_and_mul
from hotset.engine.kernels.triton_kernels import down_kernel, up_kernel

SPECS = (
    "dense", "fp8", "fp8:scales=e8m0,block_n=1,block_k=32", "fp8:values=e5m2,scales=bfloat16", "mxfp4",
    "nvfp4:matrices=2", "nvfp4:matrices=2,divides=on", "integer", "integer:bits=8",
    "integer:zeros=bytes,scales=float16", "integer:ordered=2,zeros=bytes",
)  # fmt: skip
POINTERS = {"uint8": "*u8", "float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "int32": "*i32"}
COLUMNS, DEPTH = 1536, 2048


def compiled(kernel: Any, spec: str, capability: int) -> Any:
    """One of the two kernels for matrices in a format, as a program for a GPU of this kind."""
    chosen = formats.parse(spec)
    tile = chosen.tile()
    assert tile is not None
    parts = chosen.parts(COLUMNS, DEPTH)
    gated = kernel is up_kernel
    values: dict[str, Any] = {
        "n": COLUMNS // 2 if gated else COLUMNS, "k": DEPTH, "top_k": 8, "activate": silu_and_mul, "alpha": 1.0,
        "limit": 0.0, "gated": True, "interleaved": False, "load": tile.function, "settings": tile.settings,
        "has_bias": False, "clocked": False, "summed": triton.language.float32, "group": 8, "lanes": 8,
        "block_n": 2 if gated else 1, "block_k": 1024 if gated else 256, "stages": 1, "unroll": 1, "lane": tile.lane,
    }  # fmt: skip
    types: dict[str, Any] = {
        "x": "*bf16", "bias": "*bf16", "h": "*bf16", "weights": "*fp32", "raw": "*bf16", "out": "*bf16",
        "w": tuple(POINTERS[part.dtype] for part in parts), "strides": ("i64",) * len(parts), "pair_row": "*i32",
        "pair_late": "*i8", "phase": "i32", "stamp": "*i64", "bias_stride": "i64",
    }  # fmt: skip
    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if name in values else types[name] for name in names}
    constants = {(names.index(name),): value for name, value in values.items() if name in names}
    aligned = [(names.index(name),) for name in ("x", "h", "out") if name in names]
    aligned += [(names.index(name), place) for name in ("w", "strides") for place in range(len(parts))]
    source = ASTSource(kernel, signature, constants, {path: [["tt.divisibility", 16]] for path in aligned})
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": 4 if gated else 1, "enable_fp_fusion": False}
    return compile_kernel(source, target=target, options=options)


def main(capabilities: list[int]) -> None:
    """Compile everything; a kernel that cannot be compiled raises."""
    for capability in capabilities:
        for spec in SPECS:
            for kernel, name in ((up_kernel, "up"), (down_kernel, "down")):
                ptx = compiled(kernel, spec, capability).asm["ptx"]
                loads = Counter(word.removeprefix("ld.global.") for word in re.findall(r"ld\.global\S*", ptx))
                print(capability, spec, name, len(ptx.splitlines()), "lines", dict(loads), flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [80, 89, 90])

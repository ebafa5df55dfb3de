"""Compiles the expert kernels with every format, by tiles and by units, for GPUs that need not be there.

``python tests/engine/kernels/compile_kernels.py [--some] 80 90`` prints the loads of all kernels, or of some formats'.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from hotset import formats
from hotset.engine.kernels.activations import silu_and_mul
from hotset.engine.kernels.decoding import BLOCK_K, BLOCK_N, decode_kernel
from hotset.engine.kernels.triton_kernels import down_kernel, up_kernel
from hotset.engine.kernels.unit_kernels import down_units_kernel, order_kernel, up_units_kernel
from hotset.formats import FormatPart, TileLoader

SPECS = (
    "dense", "fp8", "fp8:scales=e8m0,block_n=1,block_k=32", "fp8:values=e5m2,scales=bfloat16", "mxfp4",
    "nvfp4:matrices=2", "nvfp4:matrices=2,divides=on", "integer", "integer:bits=8",
    "integer:zeros=bytes,scales=float16", "integer:ordered=2,zeros=bytes", "gguf:kind=Q5_1", "gguf:kind=Q5_K",
    "gguf:kind=Q8_0", "gguf:kind=Q4_K", "gguf:kind=Q6_K",
)  # fmt: skip
SOME = ("dense", "fp8", "mxfp4", "integer", "gguf:kind=Q4_K")
"""A format of each way to decode: enough to see that a generation of GPUs takes the kernels."""
POINTERS = {"uint8": "*u8", "float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "int32": "*i32"}
COLUMNS, DEPTH = 1536, 2048
TYPES: dict[str, Any] = {
    "x": "*bf16", "bias": "*bf16", "h": "*bf16", "weights": "*fp32", "raw": "*bf16", "out": "*bf16",
    "ordered": "*fp32", "pair_row": "*i32", "pair_late": "*i8", "phase": "i32", "stamp": "*i64", "bias_stride": "i64",
}  # fmt: skip
SHARED: dict[str, Any] = {
    "k": DEPTH, "top_k": 8, "activate": silu_and_mul, "alpha": 1.0, "limit": 0.0, "gated": True, "interleaved": False,
    "has_bias": False, "clocked": False, "summed": tl.float32, "group": 8,
}  # fmt: skip


def compiled(kernel: Any, spec: str, capability: int) -> Any:
    """One of the kernels for matrices in a format, as a program for a GPU of this kind."""
    chosen = formats.parse(spec)
    tile = chosen.tile()
    assert tile is not None
    parts = chosen.parts(COLUMNS, DEPTH)
    gated, by_units = kernel in (up_kernel, up_units_kernel), kernel in (up_units_kernel, down_units_kernel)
    if kernel is decode_kernel:
        return decoder(tile, parts, capability)
    own = of_units(tile, gated, capability) if by_units else of_tiles(tile, gated)
    values = SHARED | {"n": COLUMNS // 2 if gated else COLUMNS} | own
    types = TYPES | {"w": tuple(POINTERS[part.dtype] for part in parts), "strides": ("i64",) * len(parts)}
    types |= {"x": "*fp32", "h": "*fp32"} if by_units else {}
    warps = (1 if gated else 4) if by_units else (4 if gated else 1)
    return program(kernel, values, types, len(parts), capability, warps)


def decoder(tile: TileLoader, parts: Sequence[FormatPart], capability: int) -> Any:
    """What writes out matrices of these parts."""
    values = {"n": COLUMNS, "k": DEPTH, "load": tile.function, "settings": tile.settings}
    values |= {"block_n": BLOCK_N, "block_k": BLOCK_K}
    types = {"parts": tuple(POINTERS[part.dtype] for part in parts), "strides": ("i64",) * len(parts)}
    return program(decode_kernel, values, types | {"rows": "*i32", "out": "*bf16"}, len(parts), capability, 4)


def program(
    kernel: Any, values: dict[str, Any], types: dict[str, Any], parts: int, capability: int, warps: int
) -> Any:  # fmt: skip
    """A kernel with these constants and types."""
    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if name in values else types[name] for name in names}
    constants = {(names.index(name),): value for name, value in values.items() if name in names}
    aligned: list[tuple[int, ...]] = [(names.index(name),) for name in ("x", "h", "out") if name in names]
    aligned += [
        (names.index(name), place) for name in ("w", "parts", "strides") if name in names for place in range(parts)
    ]
    source = ASTSource(kernel, signature, constants, {path: [["tt.divisibility", 16]] for path in aligned})
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": warps, "enable_fp_fusion": False}
    return compile_kernel(source, target=target, options=options)


def of_tiles(tile: TileLoader, gated: bool) -> dict[str, Any]:
    """The constants of a kernel by tiles."""
    return {
        "load": tile.function, "settings": tile.settings, "lanes": 8, "block_n": 2 if gated else 1,
        "block_k": 1024 if gated else 256, "stages": 1, "unroll": 1, "lane": tile.lane,
    }  # fmt: skip


def of_units(tile: TileLoader, gated: bool, capability: int) -> dict[str, Any]:
    """The constants of a kernel by units."""
    units = tile.units
    assert units is not None
    assembly = units.assemble(capability)
    shape = units.shape(COLUMNS)
    return {
        "dtype": tl.bfloat16, "x_padded": DEPTH, "h_padded": DEPTH, "h_unit": units.inputs, "h_order": assembly.order,
        "h_lanes": 32, "shape": shape, "multiply": assembly.multiply, "constraints": assembly.constraints, "wide": 8,
        "rows": 2, "lanes": 32 if gated else 16, "unroll": 2,
    }  # fmt: skip


def kernels_of(spec: str) -> Iterator[tuple[Any, str]]:
    """The kernels that serve a format, and what to call them."""
    yield from ((up_kernel, "up"), (down_kernel, "down"))
    tile = formats.parse(spec).tile()
    if tile is not None and tile.units is not None:
        yield from ((up_units_kernel, "up units"), (down_units_kernel, "down units"))
    if spec != "dense":
        yield decode_kernel, "decode"


def main(capabilities: list[int], specs: Sequence[str]) -> None:
    """Compile the kernels of these formats; one that cannot be compiled raises."""
    for capability in capabilities:
        constants = {"k": DEPTH, "padded": DEPTH, "unit": 32, "order": 1, "lanes": 32, "block": 1024}
        program(order_kernel, constants, TYPES, 0, capability, 4)
        for spec in specs:
            for kernel, name in kernels_of(spec):
                made = compiled(kernel, spec, capability)
                ptx = made.asm["ptx"]
                loads = Counter(word.removeprefix("ld.global.") for word in re.findall(r"ld\.global\S*", ptx))
                print(capability, spec, f"{name}:", len(ptx.splitlines()), "lines", dict(loads), flush=True)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--some"]
    main([int(word) for word in words] or [80, 89, 90], SOME if "--some" in sys.argv else SPECS)

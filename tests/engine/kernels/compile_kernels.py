"""Compiles the expert kernels with every format, by tiles and by units, for GPUs that need not be there.

``python tests/engine/kernels/compile_kernels.py some 80 all 90`` prints the loads of the kernels of some formats for
one kind of GPU, and of all formats for another.
"""

from __future__ import annotations

import gc
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
SOME = {
    80: {"up": ("dense", "integer"), "down": ("fp8", "gguf:kind=Q4_K"), "up units": ("fp8",),
         "down units": ("nvfp4:matrices=2", "gguf:kind=Q4_K"), "decode": ("mxfp4",)},
    89: {"up": ("fp8", "gguf:kind=Q4_K"), "down": ("mxfp4",), "up units": ("mxfp4", "gguf:kind=Q4_K"),
         "down units": ("fp8",), "decode": ("integer", "gguf:kind=Q4_K")},
    100: {"up": ("mxfp4",), "down": ("dense", "integer"), "up units": ("integer",),
          "down units": ("mxfp4", "integer"), "decode": ("fp8",)},
}  # fmt: skip
"""Every kernel for every generation, and each way to decode once for one of them; E4M3 differs from 89 on."""
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


def chosen(extent: str, capability: int) -> Iterator[tuple[Any, str, str]]:
    """Kernels, what to call them, and the formats to compile them with."""
    some = SOME.get(capability)
    for spec in SPECS:
        for kernel, name in kernels_of(spec):
            if extent == "all" or some is None or spec in some[name]:
                yield kernel, name, spec


def main(words: Sequence[str]) -> None:
    """Compile the kernels for each kind of GPU; one that cannot be compiled raises."""
    gc.freeze()  # the compiler makes much that is soon gone: whatever was imported need not be looked through each time
    for extent, capability in zip(words[::2], map(int, words[1::2]), strict=True):
        constants = {"k": DEPTH, "padded": DEPTH, "unit": 32, "order": 1, "lanes": 32, "block": 1024}
        program(order_kernel, constants, TYPES, 0, capability, 4)
        for kernel, name, spec in chosen(extent, capability):
            made = compiled(kernel, spec, capability)
            ptx = made.asm["ptx"]
            loads = Counter(word.removeprefix("ld.global.") for word in re.findall(r"ld\.global\S*", ptx))
            print(capability, spec, f"{name}:", len(ptx.splitlines()), "lines", dict(loads), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["all", "90"])

"""Packed matrices on a CPU: what kernels that decode in registers make of them, and in which bits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("gguf")

import gguf_models  # noqa: E402
from examples import LONG  # noqa: E402

from hotset import formats  # noqa: E402
from hotset.engine.arena import Arena  # noqa: E402
from hotset.engine.kernels.packed import FEW_TOKENS, PackedLinear  # noqa: E402
from hotset.formats import WeightFormat, element_type, laid_out  # noqa: E402
from hotset.formats.gguf import KEPT, Gguf  # noqa: E402
from hotset.store import SlotLayout  # noqa: E402
from hotset.store.gguf import BLOCKS  # noqa: E402

ROOT = Path(__file__).parents[3]
SPECS = (
    "integer", "integer:short=on", "integer:group=64,zeros=bytes", "integer:group=128,scales=float16,zeros=bytes",
    "integer:group=0,scales=float32", "integer:bits=8", "integer:bits=8,group=128,scales=float16,zeros=bytes",
    "mxfp4", "nvfp4", "nvfp4:matrices=2,divides=on", "fp8", "fp8:block_n=1,block_k=32,scales=e8m0",
    "fp8:block_n=0,block_k=0,scales=bfloat16,values=e5m2", *(f"gguf:kind={kind}" for kind in KEPT),
)  # fmt: skip
QUICK = ("integer", "integer:short=on", "integer:bits=8", "mxfp4", "gguf:kind=Q5_K")
TOLERANCES = {"float32": 5e-7, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Of the largest output: that outputs are rounded, and sums in another order."""


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_part(part: formats.FormatPart, chosen: WeightFormat) -> Any:
    """Numbers that a matrix could have: scales around a hundredth, all codes."""
    if isinstance(chosen, Gguf):
        shape = (part.shape[0], part.shape[1] // chosen.block.size_bytes * chosen.block.weights)
        return torch.from_numpy(gguf_models.random_blocks(chosen.kind, shape, part.shape[0]))
    if part.dtype != "uint8" and "short" in chosen.spec:
        return (torch.randint(16, 32, part.shape) / 2048).to(element_type(part.dtype))
    if part.dtype != "uint8":
        return (torch.rand(part.shape) * 0.02 + 0.004).to(element_type(part.dtype))
    if part.role == "zeros":
        return torch.randint(0, 1 << chosen.bits, part.shape, dtype=torch.uint8)  # type: ignore[attr-defined]
    if part.role == "scales":  # exponents, or E4M3
        return torch.randint(115, 122, part.shape, dtype=torch.uint8) - (80 if chosen.name == "nvfp4" else 0)
    codes = torch.randint(0, 256, part.shape, dtype=torch.uint8)
    if chosen.name == "fp8":  # codes for no number come by themselves
        codes[(codes & 0x7F) >= (0x7C if chosen.values == "e5m2" else 0x7F)] = 0  # type: ignore[attr-defined]
    return codes


def linear_of(spec: str, dtype: str, outputs: int, inputs: int, rows: int = 3) -> PackedLinear:
    """A linear map of some rows of an arena, with matrices of random parts."""
    torch.manual_seed(outputs + inputs)
    chosen = formats.parse(f"{spec}{',' if ':' in spec else ':'}dtype={dtype}")
    parts, matrix = laid_out("w", chosen, outputs, inputs)
    assert matrix is not None
    layout = SlotLayout.of(parts, [matrix])
    arena = Arena.in_ram(rows, 4096 * -(-layout.used_bytes // 4096))
    linear = PackedLinear(arena, layout, "w", None, False)
    for view, part in zip(linear.views, chosen.parts(outputs, inputs), strict=True):
        for row in range(rows):
            view[row] = random_part(part, chosen)
    return linear


def decoded(linear: PackedLinear, row: int) -> Any:
    out = torch.empty(linear.width, linear.depth, dtype=linear.dtype)
    linear.format.decode([view[row] for view in linear.views], out)
    return out


def check(spec: str, dtype: str, outputs: int, inputs: int) -> None:
    """One token, some, and many, by several experts at once, against the decoded matrices in float64."""
    linear = linear_of(spec, dtype, outputs, inputs)
    assert linear.kernels is not None
    matrices = [decoded(linear, row) for row in range(3)]
    for row, matrix in enumerate(matrices):
        assert torch.equal(linear._expanded(linear.kernels, row), matrix), "decoded to other bits"
    counts = (1, FEW_TOKENS, 3, 4, FEW_TOKENS + 1)
    rows, ends = [2, 0, 1, 0, 2], torch.tensor(counts).cumsum(0).tolist()
    x = torch.randn(sum(counts), inputs).to(linear.dtype)
    out = linear(x, rows, ends)
    for row, given, result in zip(rows, x.split(counts), out.split(counts), strict=True):
        exact = given.double() @ matrices[row].double().T
        error = (result.double() - exact).abs().max() / exact.abs().max()
        assert error < TOLERANCES[dtype], (row, len(given), float(error))


@pytest.mark.parametrize(("outputs", "inputs"), [(70, 256), (34, 2880), (6, 64)])
@pytest.mark.parametrize("spec", SPECS)
def test_products_are_those_of_the_decoded_matrix(spec: str, outputs: int, inputs: int) -> None:
    if inputs % whole_of(spec):
        pytest.skip("no whole groups")
    check(spec, "bfloat16", outputs, inputs)


def whole_of(spec: str) -> int:
    """The inputs that matrices in a format have a multiple of."""
    kind = spec.partition("kind=")[2]
    return BLOCKS[kind].weights if kind else 128 if "128" in spec else 32


def inputs_of(spec: str) -> int:
    """Some inputs that a matrix may have."""
    return 384 if 384 % whole_of(spec) == 0 else 512


def in_other_types() -> list[tuple[str, str]]:
    """Formats and types: each is a kernel to compile, so that most formats take turns with the two types."""
    turns = zip(SPECS, cycle((("float32",), ("float16",))))
    return [
        (spec, dtype) for spec, own in turns for dtype in (("float32", "float16") if LONG or spec in QUICK else own)
    ]  # fmt: skip


@pytest.mark.parametrize(("spec", "dtype"), in_other_types())
def test_products_in_other_types(spec: str, dtype: str) -> None:
    check(spec, dtype, 38, inputs_of(spec))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("spec", QUICK)
def test_bits_depend_on_nothing_but_the_tokens_of_an_expert(spec: str, dtype: str) -> None:
    linear = linear_of(spec, dtype, 150, 256)
    counts = (1, 2, FEW_TOKENS, 1, 5)
    rows, ends = [0, 1, 2, 2, 0], torch.tensor(counts).cumsum(0).tolist()
    x = torch.randn(sum(counts), 256).to(linear.dtype)
    together = linear(x, rows, ends)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(linear(x, rows, ends), together)
    alone = [linear(given, [row], [len(given)]) for row, given in zip(rows, x.split(counts), strict=True)]
    assert torch.equal(torch.cat(alone), together)
    one = linear(x[:1], [1, 2, 0], [1, 2, 3])
    assert torch.equal(one, torch.cat([linear(x[:1], [row], [1]) for row in (1, 2, 0)]))


@pytest.mark.parametrize("spec", ["mxfp4", "nvfp4", "fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_codes_for_no_number_give_none(spec: str, dtype: str) -> None:
    linear = linear_of(spec, dtype, 8, 256)
    broken = linear.views[0 if spec == "fp8" else 1]
    broken[0][5, 1] = 0x7F if spec != "mxfp4" else 255
    out = linear(torch.ones(1, 256).to(linear.dtype), [0], [1])
    assert out[0].isnan().nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("spec", ["integer:group=16", "integer:ordered=1", "fp8:block_k=24"])
def test_shapes_without_a_kernel_go_by_the_decoded_matrix(spec: str) -> None:
    linear = linear_of(spec, "float32", 12, 96)
    assert linear.kernels is None
    x = torch.randn(2, 96)
    assert torch.equal(linear(x, [1], [2]), x @ decoded(linear, 1).T)


NARROWER = {"avx2": "+avx,+avx2,+f16c,+fma,+sse4.2", "generic": ""}


@pytest.mark.parametrize("processor", NARROWER if LONG else ["avx2"])
def test_narrower_processors_compute_the_same(processor: str) -> None:
    """The suite itself runs with the widest that the machine has; what is kept on disk is told apart by processor."""
    code = "import sys; sys.path[:0] = ['tests/engine/kernels', 'tests/formats', 'tests/support']\n"
    code += "import torch, test_packed_rows as rows\n"
    every = [(spec, dtype) for spec in QUICK for dtype in ("bfloat16", "float32")]
    wanted = every if LONG else [every[2], every[5], every[6], every[7]]
    code += "".join(f"rows.check({spec!r}, {dtype!r}, 38, {inputs_of(spec)})\n" for spec, dtype in wanted)
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": NARROWER[processor]}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
